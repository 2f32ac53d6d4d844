"""Forward pass of a native model over KV that was computed elsewhere, partly recomputed.

The algorithm is CacheBlend's (Yao et al., EuroSys 2025, arXiv:2405.16444): keys are rotated to their new
position, the first layer is computed for all tokens, and each further one for a share of them, those whose KV
deviates most from what is recomputed. An experiment: KV are plain tensors here, not blocks of a pool.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional as F

from sagellm.core.errors import UnsupportedModelError
from sagellm.engines.native.layer_parts import normed
from sagellm.engines.native.model import Attention, DecoderModel
from sagellm.engines.native.rope import RopeSpec, apply_rope, inverse_frequencies
from sagellm.engines.native.token_copies import plain_attention

Choose = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
"""Layer, token numbers [n] and the deviation of their KV [n] -> which of them to compute, [n] booleans."""


class LayerKV(NamedTuple):
    """Keys (rotated) and values of some tokens in one layer, each [tokens, kv_heads, head_dim]."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class Blended:
    """Logits [rows, vocab] of the tokens without cached KV; `num_computed`: cached tokens by layer."""

    logits: torch.Tensor
    num_computed: tuple[int, ...]


class BlendModel:
    """Computes with a native model whose layers have plain attention with RoPE.

    Raises `UnsupportedModelError` for another: its KV cannot be rotated to other positions, or its attention
    has parts that are not repeated here (windows, sinks, gates, latent or shared KV, recurrent layers).
    """

    def __init__(self, model: DecoderModel) -> None:
        self._model = model
        self._layers = [(layer, plain_attention(layer)) for layer in model._layers]
        ropes = {own.rope for _, own in self._layers}
        self._rope: RopeSpec = model._ropes[next(iter(ropes))]._spec
        if len(ropes) > 1 or self._rope.variant == "dynamic":
            raise UnsupportedModelError("keys can be moved where all layers rotate by one angle per position")

    @torch.inference_mode()
    def kv_of(self, tokens: Sequence[int]) -> list[LayerKV]:
        """The KV of a prompt by layer, computed exactly."""
        return self._run(tokens, None, 0, 0, None)[1]

    @torch.inference_mode()
    def logits(
        self,
        tokens: Sequence[int],
        cached: Sequence[LayerKV],
        num_exact: int,
        choose: Choose | None,
    ) -> Blended:
        """Logits of the tokens behind those that `cached` has.

        Cached keys are rotated to their position. The KV of the first `num_exact` tokens is exact. Of the
        others, those that `choose` names are computed in each layer from the second on, and in the first all.
        None: none are computed.
        """
        return self._run(tokens, cached, num_exact, len(cached[0].keys), choose)[0]

    def moved(self, kv: Sequence[LayerKV], distance: int) -> list[LayerKV]:
        """The same KV with keys rotated by `distance` positions, which may be negative."""
        angles = inverse_frequencies(self._rope) * distance
        still = self._model.spec.head_dim // 2 - len(angles)
        cos, sin = F.pad(angles.cos(), (0, still), value=1.0), F.pad(angles.sin(), (0, still))
        moved = []
        for keys, values in kv:
            turned = keys.clone()
            shape = (len(keys), -1)
            apply_rope(turned, cos.expand(shape).to(keys.dtype), sin.expand(shape).to(keys.dtype))
            moved.append(LayerKV(turned, values))
        return moved

    def _run(
        self,
        tokens: Sequence[int],
        cached: Sequence[LayerKV] | None,
        num_exact: int,
        num_cached: int,
        choose: Choose | None,
    ) -> tuple[Blended, list[LayerKV]]:
        """Computes rows of tokens layer by layer; `choose` makes them fewer."""
        model, ids = self._model, torch.tensor(tokens)
        rows = torch.arange(num_exact if choose else num_cached, len(ids))
        assert model._embed is not None
        x = model._embed.rows(ids[rows], model._dtype, model.spec.embed_scale)
        kept, counts = [], []
        for number, (layer, own) in enumerate(self._layers):
            seen = model._sublayer_input((x, None, None), layer.attn_norm)
            query, key, value = self._heads(own, seen, rows, len(ids))
            keys, values = key, value
            if cached is not None:
                new = LayerKV(key, value)
                keys, values = (_longer(part, len(ids)) for part in cached[number])
                if choose and number:
                    picked = rows >= num_cached
                    deviation = _deviation(new, LayerKV(keys[rows], values[rows]))
                    inside = ~picked
                    picked[inside] = choose(number, rows[inside], deviation[inside])
                    rows, x, query = rows[picked], x[picked], query[picked]
                    new = LayerKV(key[picked], value[picked])
                keys[rows], values[rows] = new
            counts.append(int((rows < num_cached).sum()))
            kept.append(LayerKV(keys, values))
            mixed = own.output(_attend(query, keys, values, rows))
            stream = model._sublayer_output(x, mixed, layer.attn_norm, layer.attn_out_norm)
            assert layer.feed_forward is not None
            seen = model._sublayer_input(stream, layer.mlp_norm)
            delta = model._feed_forward(layer.feed_forward, seen, stream[0])
            stream = model._sublayer_output(stream[0], delta, layer.mlp_norm, layer.mlp_out_norm)
            x = model._add_norm(stream, None)
        hidden = model._add_norm((x, None, None), model._final_norm)
        return Blended(model.head(hidden[rows >= num_cached]), tuple(counts)), kept

    def _heads(
        self, own: Attention, seen: torch.Tensor, rows: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, normed and rotated, each [rows, heads, head_dim]."""
        model, spec = self._model, self._model.spec
        heads = own.qkv(seen).view(len(rows), -1, spec.head_dim)
        num_kv = own.shape.num_kv_heads
        query, key, value = torch.split(heads.clone(), [spec.num_heads, num_kv, num_kv], dim=1)
        for part, norm in ((query, own.q_norm), (key, own.k_norm)):
            if norm.weight is not None:
                together = part.flatten(1) if spec.qk_norm == "all" else part
                part.copy_(normed(spec, together, norm).view(part.shape))
        cos, sin = model._ropes[own.rope].cos_sin(rows, length)
        for part in (query, key):
            apply_rope(part, cos, sin)
        return query, key, value


def joined(parts: Sequence[Sequence[LayerKV]]) -> list[LayerKV]:
    """The KV of parts behind each other, by layer."""
    return [
        LayerKV(torch.cat([kv.keys for kv in layer]), torch.cat([kv.values for kv in layer]))
        for layer in zip(*parts, strict=True)
    ]


def part_of(kv: Sequence[LayerKV], start: int) -> list[LayerKV]:
    """The KV of the tokens from `start` on, by layer."""
    return [LayerKV(keys[start:], values[start:]) for keys, values in kv]


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """Causal attention of tokens `rows` over all tokens, [rows, heads x head_dim]."""
    mask = torch.arange(len(keys)) <= rows[:, None]
    query, keys, values = (part.transpose(0, 1) for part in (query, keys, values))
    scale = 1 / math.sqrt(query.shape[-1])
    mixed = F.scaled_dot_product_attention(query, keys, values, mask, scale=scale, enable_gqa=True)
    return mixed.transpose(0, 1).flatten(1)


def _deviation(new: LayerKV, old: LayerKV) -> torch.Tensor:
    """Squared distance of keys and values of each token, [tokens]."""
    distances = ((ours - theirs).square().flatten(1).sum(1) for ours, theirs in zip(new, old, strict=True))
    return torch.stack(list(distances)).sum(0)


def _longer(part: torch.Tensor, length: int) -> torch.Tensor:
    """A copy with room for `length` tokens."""
    return torch.cat([part, part.new_zeros(length - len(part), *part.shape[1:])])
