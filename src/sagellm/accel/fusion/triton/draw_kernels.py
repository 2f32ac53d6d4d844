"""Triton source of sampling without a sort: thresholds by bisection, then the inverse of the distribution."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def order_key(logit: tl.tensor) -> tl.tensor:
    """int32 in the order of the float32 `logit`; both zeros are one."""
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
    """How many tokens stand above `key`, and their mass, relative to the likeliest's."""
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
    """The lowest key that still has fewer than `limit` tokens and less than `mass_limit` above it; at least
    `floor`. What stands above a key only falls as the key rises, so 32 halvings find it.
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
    """Weights of a tile, 0 for what is filtered out, and the ties met up to its end."""
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
    """The mass of what is kept, and the last id that has any."""
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
