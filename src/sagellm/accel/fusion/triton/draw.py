"""Drawing tokens on a GPU without a sort, in one launch per step.

Bisection finds the thresholds of top_k and top_p; then the distribution function is inverted.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sagellm.accel.fusion.triton._launch import TritonKernel
from sagellm.core.protocols.fusion import Tolerance

TILE = 4096
PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "uniform")


class TritonDraw(TritonKernel):
    """Draws one token per row. Inputs: `logits` float32 [S, vocab] with contiguous rows; `params` float64 [S,
    5], for each row temperature (above 0), top_k (0: all), top_p, min_p and a uniform number in [0, 1).

    The result, int64 [S], is the inverse distribution function at that number over ascending ids, after
    top_k, top_p of what it leaves, and min_p. Of equal logits the larger ids are cut first. So the token is
    the twin's, unless the number lies within the rounding of float32 weights (relative 1e-6) of a token's
    boundary. A row whose logits are not numbers has an undefined result.
    """

    name = "draw"
    tolerances: tuple[Tolerance, ...] = (Tolerance("float32", 0.0, 0.0),)

    def _compute(self, logits: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        if len(logits):
            draw_kernel[(len(logits),)](
                logits, params, tokens, logits.stride(0), logits.shape[1], TILE=TILE, num_warps=8
            )
        return tokens

    def reference(self, *inputs: Any) -> torch.Tensor:
        return draw(*inputs)

    def _obstacle(self, logits: torch.Tensor, params: torch.Tensor) -> str:
        if logits.dtype != torch.float32 or logits.ndim != 2 or logits.stride(1) != 1 or not logits.shape[1]:
            return (
                f"logits are float32 [S, vocab] with contiguous rows, not {logits.dtype} {list(logits.shape)}"
            )
        wanted = (len(logits), len(PARAMETERS))
        if params.dtype != torch.float64 or params.shape != wanted or not params.is_contiguous():
            return f"params are contiguous float64 {list(wanted)}, not {params.dtype} {list(params.shape)}"
        return self._device_obstacle(logits, params)


def draw(logits: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
    """Slow twin of `TritonDraw`: whole rows sorted, in float64."""
    temperature, top_k, top_p, min_p, uniform = params[:, :, None].unbind(1)
    scores = logits.double()
    scores = (scores - scores.amax(-1, keepdim=True)) / temperature
    ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[1], device=scores.device)
    ordered.masked_fill_((top_k > 0) & (rank >= top_k), -torch.inf)
    mass = ordered.softmax(-1)
    cut = (mass.cumsum(-1) - mass >= top_p) & (top_p < 1.0)
    cut[:, 0] = False
    kept = ordered.masked_fill_(cut | (ordered < min_p.log()), -torch.inf)
    cumulative = torch.empty_like(scores).scatter_(-1, ids, kept).exp_().cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    last = torch.searchsorted(cumulative, total)
    return torch.minimum(torch.searchsorted(cumulative, uniform * total, right=True), last)[:, 0]


@triton.jit
def order_key(logit: tl.tensor) -> tl.tensor:
    """int32 in the order of the float32 `logit`; both zeros are equal."""
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def tile_of(
    row: tl.tensor, at: tl.tensor, vocab: tl.tensor, TILE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Token ids of a tile and their logits, -inf behind the last."""
    ids = at + tl.arange(0, TILE)
    return ids, tl.load(row + ids, mask=ids < vocab, other=float("-inf"))


@triton.jit
def above(
    row: tl.tensor, vocab: tl.tensor, key: tl.tensor, highest: tl.tensor, per_degree: tl.tensor,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """The number of tokens above `key`, and their mass relative to the likeliest token's."""
    count = tl.zeros([], dtype=tl.int32)
    mass = tl.zeros([], dtype=tl.float64)
    for at in range(0, vocab, TILE):
        ids, logit = tile_of(row, at, vocab, TILE)
        counted = (order_key(logit) > key) & (ids < vocab)
        count += tl.sum(counted.to(tl.int32), 0)
        weight = tl.where(counted, tl.exp((logit - highest) * per_degree), 0.0)
        mass += tl.sum(weight.to(tl.float64), 0)
    return count, mass


@triton.jit
def lowest_kept(
    row: tl.tensor, vocab: tl.tensor, highest: tl.tensor, per_degree: tl.tensor, limit: tl.tensor,
    mass_limit: tl.tensor, floor: tl.tensor, TILE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The lowest key with fewer than `limit` tokens and less than `mass_limit` above. It is at least `floor`.
    Count and mass above a key only fall as the key rises, so 32 halvings find it.
    """
    low, high = floor.to(tl.int64), order_key(highest).to(tl.int64)
    while low < high:
        middle = (low + high) >> 1
        count, mass = above(row, vocab, middle.to(tl.int32), highest, per_degree, TILE)
        if (count < limit) & (mass < mass_limit):
            high = middle
        else:
            low = middle + 1
    return high.to(tl.int32)


@triton.jit
def kept_weight(
    ids: tl.tensor, logit: tl.tensor, vocab: tl.tensor, key: tl.tensor, ties: tl.tensor, num_ties: tl.tensor,
    min_score: tl.tensor, highest: tl.tensor, per_degree: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Weights of a tile, 0 if filtered out, and ties up to its end."""
    own = order_key(logit)
    tied = ((own == key) & (ids < vocab)).to(tl.int32)
    rank = ties + tl.cumsum(tied, 0) - tied
    score = (logit - highest) * per_degree
    kept = ((own > key) | ((tied > 0) & (rank < num_ties))) & (score >= min_score)
    return tl.where(kept, tl.exp(score), 0.0).to(tl.float64), ties + tl.sum(tied, 0)


@triton.jit
def kept_mass(
    row: tl.tensor, vocab: tl.tensor, key: tl.tensor, num_ties: tl.tensor, min_score: tl.tensor,
    highest: tl.tensor, per_degree: tl.tensor, TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """The mass of the kept tokens, and the last id that has any."""
    total = tl.zeros([], dtype=tl.float64)
    ties = tl.zeros([], dtype=tl.int32)
    last = tl.zeros([], dtype=tl.int32)
    for at in range(0, vocab, TILE):
        ids, logit = tile_of(row, at, vocab, TILE)
        weight, ties = kept_weight(ids, logit, vocab, key, ties, num_ties, min_score, highest, per_degree)
        total += tl.sum(weight, 0)
        last = tl.maximum(last, tl.max(tl.where(weight > 0, ids, 0), 0))
    return total, last


@triton.jit
def draw_kernel(
    logits: tl.tensor,
    params: tl.tensor,
    tokens: tl.tensor,
    logits_row: tl.tensor,
    vocab: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Program: one row. `params` float64 [S, 5]: temperature, top_k (0: all), top_p, min_p, uniform."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * logits_row
    per_degree = (1.0 / tl.load(params + 5 * index)).to(tl.float32)
    top_k = tl.load(params + 5 * index + 1).to(tl.int32)
    top_p = tl.load(params + 5 * index + 2)
    min_p = tl.load(params + 5 * index + 3)
    highest = tl.full([], float("-inf"), dtype=tl.float32)
    for at in range(0, vocab, TILE):
        ids, logit = tile_of(row, at, vocab, TILE)
        highest = tl.maximum(highest, tl.max(logit, 0))

    key = tl.full([], -(2**31), dtype=tl.int32)
    num_ties = vocab
    if (top_k > 0) & (top_k < vocab):
        key = lowest_kept(row, vocab, highest, per_degree, top_k, float("inf"), key, TILE)
        count, mass = above(row, vocab, key, highest, per_degree, TILE)
        num_ties = top_k - count
    if top_p < 1.0:
        total, last = kept_mass(row, vocab, key, num_ties, float("-inf"), highest, per_degree, TILE)
        floor = key
        key = lowest_kept(row, vocab, highest, per_degree, vocab + 1, top_p * total, floor, TILE)
        count, mass = above(row, vocab, key, highest, per_degree, TILE)
        bits = key ^ ((key >> 31) & 0x7FFFFFFF)
        each = tl.exp((bits.to(tl.float32, bitcast=True) - highest) * per_degree).to(tl.float64)
        wanted = tl.maximum(tl.ceil((top_p * total - mass) / each), 1.0)
        fewer = tl.minimum(wanted, vocab.to(tl.float64)).to(tl.int32)
        num_ties = tl.minimum(fewer, tl.where(key == floor, num_ties, vocab))

    min_score = tl.where(min_p > 0, tl.log(min_p), float("-inf")).to(tl.float32)
    total, last = kept_mass(row, vocab, key, num_ties, min_score, highest, per_degree, TILE)
    point = tl.load(params + 5 * index + 4) * total
    below = tl.zeros([], dtype=tl.float64)
    ties = tl.zeros([], dtype=tl.int32)
    token = last  # rounding must not step over the last one with any mass
    for at in range(0, vocab, TILE):
        ids, logit = tile_of(row, at, vocab, TILE)
        weight, ties = kept_weight(ids, logit, vocab, key, ties, num_ties, min_score, highest, per_degree)
        passed = (below + tl.cumsum(weight, 0) > point) & (weight > 0)
        token = tl.minimum(token, tl.min(tl.where(passed, ids, last), 0))
        below += tl.sum(weight, 0)
    tl.store(tokens + index, token.to(tl.int64))
