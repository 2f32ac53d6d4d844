"""The slow twin of `attend`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sagellm.core.protocols.fusion import Scores
from sagellm.core.types import Window, first_seen
from sagellm.engines.native.attention import Span
from sagellm.engines.native.kv_cache import PagedKV


def attention_reference(
    spans: Sequence[Span], kv: PagedKV, layer: int, query: torch.Tensor, window: Window | None,
    scores: Scores | None = None,
) -> torch.Tensor:  # fmt: skip
    """Token by token: causal, windowed, grouped-query attention."""
    output = torch.empty_like(query)
    for span in spans:
        for i in range(span.num_tokens):
            position = span.start + i
            first = first_seen(window, position)
            slots = [
                span.block_ids[p // kv.block_size] * kv.block_size + p % kv.block_size
                for p in range(first, position + 1)
            ]
            row = span.first_row + i
            output[row] = _one_token(
                query[row],
                kv.keys[layer].flatten(0, 1)[slots],
                kv.values[layer].flatten(0, 1)[slots],
                scores,
            )
    return output


def _one_token(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, how: Scores | None
) -> torch.Tensor:
    """`query` [heads, dim] over `keys` and `values` [L, kv_heads, dim]."""
    group = query.shape[0] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = torch.einsum("hd,lhd->hl", query, keys)
    if how is None:
        return torch.einsum("hl,lhd->hd", (scores / query.shape[-1] ** 0.5).softmax(-1), values)
    scores = scores * how.scale
    if how.softcap is not None:
        scores = how.softcap * (scores / how.softcap).tanh()
    weights = scores.exp()
    total = weights.sum(-1) + (0 if how.sinks is None else how.sinks.exp())
    return torch.einsum("hl,lhd->hd", weights / total[:, None], values)
