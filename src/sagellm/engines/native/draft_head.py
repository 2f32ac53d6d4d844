"""`DraftHead`: one more decoder layer, which proposes what the model will draw.

For position q it reads token q and the model's last hidden state of position q - 1, and imitates the model's
logits of position q, through the model's own embedding and head. For positions further ahead it reads its own
last hidden state in place of the model's. This is multi-token prediction of DeepSeek-V3 (arXiv:2412.19437),
and what EAGLE proposes (Li et al. 2024, arXiv:2401.15077). A block drafter (after DFlash, arXiv:2602.06036)
is the same layer and computes all positions ahead in one pass: there it reads the last token and hidden state
that it knows, and a learned mask for each position. Its KV is that of one more layer in the model's
blocks, at the slots of its tokens. So it depends on tokens up to its own alone, and is reused, copied and
moved with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import torch

from sagellm.core.errors import UnsupportedModelError
from sagellm.core.protocols.fusion import KernelSet
from sagellm.engines.native.kv_cache import PagedKV
from sagellm.engines.native.layer_parts import NormWeights
from sagellm.engines.native.loading import ModelWeights
from sagellm.engines.native.model import Attention, Batch, DecoderModel, StepInputs
from sagellm.engines.native.model_spec import ModelSpec
from sagellm.engines.native.weights import MASKS

Value = TypeVar("Value")


class DraftHead(DecoderModel):
    """A model of one layer, the last of `spec`.

    Embedding and head are another model's. `weights` are those of both (`weights.head_parameters`). Its KV is
    `PagedKV.of_last_layer`, and its steps have `StepInputs.hidden`. Raises `UnsupportedModelError` for
    weights that cannot be used.
    """

    def __init__(
        self, spec: ModelSpec, weights: ModelWeights, dtype: torch.dtype, device: torch.device,
        kernels: KernelSet,
    ) -> None:  # fmt: skip
        experts = spec.experts
        last = replace(
            spec, num_layers=1, windows=spec.windows[-1:], ropes=spec.ropes[-1:], final_norm=True,
            experts=None if experts is None else replace(experts, layers=experts.layers[-1:]),
        )  # fmt: skip
        matrices = {**_renamed(weights.matrices, spec), "head": weights.matrices["head"]}
        own = ModelWeights(weights.embedding, matrices, _renamed(weights.tensors, spec))
        super().__init__(last, own, dtype, device, kernels)
        self._token_norm, self._hidden_norm = (
            NormWeights.of(own, name, spec.norm_offset) for name in ("token_norm", "hidden_norm")
        )
        self._from_token, self._from_hidden = matrices["from_token"], matrices["from_hidden"]
        self.masks = weights.tensors.get(MASKS)
        """Of a block drafter, what is added to hidden states for places further ahead [places, hidden]."""
        if self._from_token.shape != (spec.hidden_size, spec.hidden_size):
            raise UnsupportedModelError(
                f"a draft head with a quantized {spec.draft_head.projection} is not supported"
            )

    def _batch(self, x: torch.Tensor, step: StepInputs, kv: PagedKV) -> Batch:
        """The rows of a step, from the embeddings `x` [T, hidden] of its tokens."""
        assert step.hidden is not None
        batch = super()._batch(x, step, kv)
        token = self._from_token.multiply(self._add_norm((x, None, None), self._token_norm))
        hidden = self._from_hidden.multiply(self._add_norm((step.hidden, None, None), self._hidden_norm))
        if self.spec.norm_place in ("input", "both"):
            batch.stream = hidden, token, None  # added with the layer's first norm
        else:
            batch.stream = hidden.add_(token), None, None
        return batch

    @torch.inference_mode()
    def write_kv(self, step: StepInputs, kv: PagedKV) -> None:
        """Write the KV of a step's tokens, and compute no more of them. The step needs no attention plan."""
        batch, layer = self._batch(self._embedded(step), step, kv), self._layers[0]
        own = layer.mixer
        assert isinstance(own, Attention)
        qkv = own.qkv(self._sublayer_input(batch.stream, layer.attn_norm))
        angles = None if own.rope < 0 else batch.angles[own.rope]
        if own.latent is not None:
            assert angles is not None
            own.latent.write(kv, 0, qkv, step.slots[0], angles)
            return
        heads = qkv[:, own.gate_size :].contiguous().view(len(qkv), -1, own.shape.head_dim)
        self._rope_to_cache(own, heads, angles, step.slots[0], kv)


def _renamed(named: Mapping[str, Value], spec: ModelSpec) -> dict[str, Value]:
    """A head's weights as those of layer 0 and of the last norm."""
    theirs = f"layers.{spec.num_layers - 1}."
    found = {
        "layers.0." + name.removeprefix(theirs): v for name, v in named.items() if name.startswith(theirs)
    }
    found |= {
        "final_norm" + n.removeprefix("head_norm"): v for n, v in named.items() if n.startswith("head_norm")
    }
    others = ("token_norm", "hidden_norm", "from_token", "from_hidden")
    return found | {name: value for name, value in named.items() if name.startswith(others)}
