"""`TokenCopier` copies the KV of tokens to other positions, with rotated keys.

RoPE rotates a key by an angle that is linear in its position, so a key is moved by a rotation by the distance
(CacheBlend: Yao et al., EuroSys 2025, arXiv:2405.16444; EPIC: Hu et al. 2024, arXiv:2410.15332). A copied
token has seen its old context, not the new one: its KV is an approximation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from sagellm.core.errors import PlanError, UnsupportedModelError
from sagellm.engines.native.accelerators import module_of
from sagellm.engines.native.kv_cache import PagedKV
from sagellm.engines.native.model import Attention, DecoderLayer, DecoderModel
from sagellm.engines.native.rope import RopeSpec, apply_rope, inverse_frequencies

DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class TokenCopier:
    """Copies within the pool of a model with plain attention and RoPE.

    With a draft `head`, of its KV too. Raises `UnsupportedModelError` for another, with the reason.
    """

    def __init__(self, model: object, kv: PagedKV, head: DecoderModel | None = None) -> None:
        if not isinstance(model, DecoderModel):
            raise UnsupportedModelError("a model that transformers runs has other keys")
        if kv.keys[0].dtype not in DTYPES:
            raise UnsupportedModelError(f"KV in {kv.keys[0].dtype} cannot be rotated")
        self._kv = kv
        self._ropes: list[RopeSpec] = [
            part._ropes[plain_attention(own).rope]._spec
            for part in (model, *([] if head is None else [head]))
            for own in part._layers
        ]
        if any(rope.variant == "dynamic" for rope in self._ropes):
            raise UnsupportedModelError("angles of dynamic RoPE are not linear in the position")

    @torch.inference_mode()
    def copy(self, sources: Sequence[int], targets: Sequence[int], distance: int) -> None:
        """Copy KV from the slots `sources` to `targets`, `distance` positions later.

        A slot is block id x block size + offset. The targets are consecutive positions of a request and no
        sources; what follows them in a block that begins with them is zeroed, since attention may read it.
        Returns when the KV is there. Raises `PlanError` for slots outside the pool.
        """
        kv, device = self._kv, self._kv.device
        size, num_slots = kv.block_size, kv.num_blocks * kv.block_size
        if len(sources) != len(targets) or not set(sources).isdisjoint(targets):
            raise PlanError(f"{len(sources)} slots cannot be copied to these {len(targets)}")
        if not sources or not 0 <= min(*sources, *targets) <= max(*sources, *targets) < num_slots:
            raise PlanError(f"a slot to copy is not in the pool of {num_slots}")
        if len(targets) > targets[-1] % size:
            kv.clear_blocks([targets[-1] // size])
        from_slots, to_slots = (torch.tensor(slots, device=device) for slots in (sources, targets))
        for layer, rope in enumerate(self._ropes):
            keys = kv.keys[layer].flatten(0, 1)[from_slots]
            wide = keys.to(torch.promote_types(keys.dtype, torch.float32))
            apply_rope(wide, *_cos_sin(rope, distance, wide))
            kv.write(layer, to_slots, wide.to(keys.dtype), kv.values[layer].flatten(0, 1)[from_slots])
        if device.type != "cpu":
            module_of(device).current_stream(device).synchronize()


def _cos_sin(rope: RopeSpec, distance: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The cos and sin for keys [T, heads, head_dim], each [T, head_dim / 2]."""
    angles = inverse_frequencies(rope).double() * distance
    still = like.shape[-1] // 2 - len(angles)  # these dims do not rotate
    parts = F.pad(angles.cos(), (0, still), value=1.0), F.pad(angles.sin(), (0, still))
    cos, sin = (part.to(like).expand(len(like), -1) for part in parts)
    return cos, sin


def sees_kv_by_slot(model: object) -> bool:
    """Whether attention needs no positions but those in keys.

    Then it goes on without some of the blocks before.
    """
    try:
        return isinstance(model, DecoderModel) and all(map(plain_attention, model._layers))
    except UnsupportedModelError:
        return False


def plain_attention(layer: DecoderLayer) -> Attention:
    """The attention of a layer whose KV can be moved.

    It has RoPE, sees all tokens, and has KV of its own. Raises `UnsupportedModelError` for another layer.
    """
    own = layer.mixer
    if (
        not isinstance(own, Attention)
        or own.latent is not None
        or own.rope < 0
        or own.scores is not None
        or own.gate_size
        or not own.has_kv
        or own.kind[1] is not None
        or layer.input is not None
        or layer.scale is not None
    ):
        raise UnsupportedModelError(
            "a layer has other attention than plain RoPE over all tokens (a window, sinks, a gate, latent or "
            "shared KV, a recurrent state)"
        )
    return own
