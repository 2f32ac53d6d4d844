"""Triton source of paged attention: one kernel for decode rows and chunks, one to sum its splits.

Online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867) over tiles of keys, the keys of a tile shared
out to several programs as in Flash-Decoding (Dao et al. 2023), the query heads of one KV head packed as rows.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def span_of_tile(spans: tl.tensor, num_spans: tl.tensor, tile: tl.tensor, TOKENS: tl.constexpr) -> tl.tensor:
    """The last span that can own `tile`: span i's tiles begin at first_row // TOKENS + i at the latest place
    where those before it can end, so that no host has to count tiles (the arithmetic of vLLM's kernel).
    """
    low = 0
    high = num_spans
    while low < high:
        middle = (low + high) // 2
        begin = tl.load(spans + 4 * middle).to(tl.int32) // TOKENS + middle
        if begin <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def attend_tile(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, visible: tl.tensor, scale: tl.tensor, acc: tl.tensor,
    top: tl.tensor, total: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """One tile of keys taken into `acc`, its largest score `top` and sum of weights `total`, per row."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    # While a row has met nothing above -inf, exp(-inf - -inf) would be NaN where the twin has 0.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp(scores - base[:, None])
    kept = tl.exp(top - base)
    acc = acc * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return acc, new_top, total * kept + tl.sum(weights, 1)


@triton.jit
def load_tile(
    pool: tl.tensor, block: tl.tensor, slot: tl.tensor, by_block: tl.tensor, by_token: tl.tensor,
    head: tl.tensor, dims: tl.tensor, there: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """[TILE, DIMS] of a pool, whose `head` is so many elements behind a token's first; 0 if not `there`."""
    place = block * by_block + slot * by_token + head
    return tl.load(pool + place[:, None] + dims[None, :], mask=there, other=0.0)


@triton.jit
def attention_kernel(
    query: tl.tensor, keys: tl.tensor, values: tl.tensor, spans: tl.tensor, tables: tl.tensor, out: tl.tensor,
    tops: tl.tensor, totals: tl.tensor, query_row: tl.tensor, query_head: tl.tensor, key_block: tl.tensor,
    key_token: tl.tensor, key_head: tl.tensor, value_block: tl.tensor, value_token: tl.tensor,
    value_head: tl.tensor, num_spans: tl.tensor, window: tl.tensor, scale: tl.tensor,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PACKED: tl.constexpr, DIM: tl.constexpr,
    DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    SPLITS: tl.constexpr, ONE_TOKEN: tl.constexpr,
) -> None:  # fmt: skip
    """Program (tile of tokens, KV head, split of keys). Row r of a tile is token r // PACKED, head r % PACKED
    of the group; PACKED, DIMS and TILE are powers of two. With several splits `out` is float32
    [T, heads, SPLITS, DIM], not divided by the sum of weights, which goes to `totals` beside `tops`.
    """
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tokens: tl.constexpr = 1 if ONE_TOKEN else ROWS // PACKED
    span = tile if ONE_TOKEN else span_of_tile(spans, num_spans, tile, tokens)
    first_row = tl.load(spans + 4 * span).to(tl.int32)
    num_tokens = tl.load(spans + 4 * span + 1).to(tl.int32)
    start = tl.load(spans + 4 * span + 2).to(tl.int32)
    entry = tl.load(spans + 4 * span + 3)
    first_token = 0 if ONE_TOKEN else (tile - (first_row // tokens + span)) * tokens
    if first_token >= num_tokens:
        return

    rows, dims, columns = tl.arange(0, ROWS), tl.arange(0, DIMS), tl.arange(0, TILE)
    token, head = first_token + rows // PACKED, rows % PACKED
    own = (head < GROUP) & (token < num_tokens) & (rows // PACKED < tokens)
    flat_row = (first_row + token).to(tl.int64)
    flat_head, inside = kv_head * GROUP + head, dims < DIM
    place = flat_row * query_row + flat_head * query_head
    q = tl.load(query + place[:, None] + dims[None, :], mask=own[:, None] & inside[None, :], other=0.0)

    position = start + token
    first_key = tl.maximum(start + first_token + 1 - window, 0)
    stop_key = start + tl.minimum(first_token + tokens, num_tokens)
    share = tl.cdiv(tl.cdiv(stop_key - first_key, TILE), SPLITS) * TILE
    begin = first_key + split * share
    end = tl.minimum(begin + share, stop_key)
    acc = tl.zeros([ROWS, DIMS], dtype=tl.float32)
    top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    for at in range(begin, end, TILE):
        key = at + columns
        there = key < end
        block = tl.load(tables + entry + key // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        slot = key % BLOCK_SIZE
        loaded = there[:, None] & inside[None, :]
        k = load_tile(keys, block, slot, key_block, key_token, kv_head * key_head, dims, loaded)
        v = load_tile(values, block, slot, value_block, value_token, kv_head * value_head, dims, loaded)
        near = (key[None, :] <= position[:, None]) & (key[None, :] > position[:, None] - window)
        acc, top, total = attend_tile(q, k, v, near & there[None, :], scale, acc, top, total)

    part = (flat_row * (KV_HEADS * GROUP) + flat_head) * SPLITS + split
    if SPLITS == 1:
        acc = acc / total[:, None]
    else:
        tl.store(tops + part, top, mask=own)
        tl.store(totals + part, total, mask=own)
    place = part[:, None] * DIM + dims[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=own[:, None] & inside[None, :])


@triton.jit
def reduce_kernel(
    parts: tl.tensor, tops: tl.tensor, totals: tl.tensor, out: tl.tensor,
    DIM: tl.constexpr, DIMS: tl.constexpr, SPLITS: tl.constexpr,
) -> None:  # fmt: skip
    """Program (row times head): the parts of its splits [SPLITS, DIM] as one; SPLITS is a power of two."""
    row = tl.program_id(0).to(tl.int64)
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, DIMS)
    inside = dims < DIM
    top = tl.load(tops + row * SPLITS + splits)
    highest = tl.max(top, 0)
    weight = tl.exp(top - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(weight * tl.load(totals + row * SPLITS + splits), 0)
    place = (row * SPLITS + splits)[:, None] * DIM + dims[None, :]
    part = tl.load(parts + place, mask=inside[None, :], other=0.0)
    answer = tl.sum(part * weight[:, None], 0) / total
    tl.store(out + row * DIM + dims, answer.to(out.dtype.element_ty), mask=inside)
