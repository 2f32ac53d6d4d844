"""Paged attention on a GPU in Triton: one kernel for decode rows and chunks.

Online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867) over tiles of keys. The keys of a span are
split over several programs as in Flash-Decoding (Dao et al. 2023), and a second kernel sums the splits. The
query heads of one KV head are packed as rows.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from sagellm.accel.fusion.checked_kernels import PagedAttention, attention_weights
from sagellm.accel.fusion.triton._launch import TritonKernel
from sagellm.core.protocols.fusion import Scores

FEWEST_ROWS, MOST_ROWS = 16, 64
"""Of a tile of queries or keys; a matrix unit takes no fewer."""
MOST_SPLITS, PROGRAMS_PER_PROCESSOR = 32, 2
_KEY_BYTES, _QUERY_BYTES = 16_384, 32_768
_NO_WINDOW = 2**30


class TritonPagedAttention(TritonKernel, PagedAttention):
    """`PagedAttention` on a GPU.

    Query and pools have one dtype. Each span has at least one token, and spans come in order of rows. The
    kernel reads nothing back from the device, so it does not check spans and tables; a captured graph may
    change them. Within a tile of 64 rows a NaN in V of a later position reaches earlier rows of the chunk, as
    in torch's SDPA. Keys are split until the device is full, so the last bits depend on the batch.
    """

    def __init__(self, processors: int | None = None) -> None:
        """`processors` is the number to assume; default: that of the device."""
        self._processors = processors

    def reference(self, *inputs: Any) -> torch.Tensor:
        return paged_attention(*inputs)

    def _obstacle(self, *inputs: Any) -> str:
        reason = super()._obstacle(*inputs)
        if reason:
            return reason
        query, keys = inputs[:2]
        if query.dtype != keys.dtype:
            return f"no kernel for {query.dtype} over {keys.dtype}: use one dtype"
        scores = inputs[6] if len(inputs) > 6 else None
        if scores is not None and not scores.is_scaled_only:
            return "no kernel for capped scores or sinks"
        if inputs[2].shape != keys.shape:
            return "keys and values have different numbers of dims"
        if keys.shape[3] > 256:
            return f"a head of {keys.shape[3]} is more than the 256 that fit into shared memory"
        return ""

    def _compute(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spans: torch.Tensor,
        tables: torch.Tensor, window: int | None = None, scores: Scores | None = None,
    ) -> torch.Tensor:  # fmt: skip
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        if not len(spans):
            return output
        num_rows, heads, dim = query.shape
        _, block_size, kv_heads, _ = keys.shape
        group = heads // kv_heads
        packed, dims = triton.next_power_of_2(group), triton.next_power_of_2(dim)
        one_token = len(spans) == num_rows  # a span has at least one
        keys_of_tile, queries = tile_sizes(dims * keys.element_size())
        rows = max(packed, FEWEST_ROWS if one_token else queries)
        tiles = len(spans) if one_token else num_rows // (rows // packed) + len(spans)
        splits = self._splits(tiles * kv_heads, query.device)
        parts, tops, totals = output, output, output
        if splits > 1:
            tops, totals = query.new_empty(2, num_rows, heads, splits, dtype=torch.float32)
            parts = query.new_empty(num_rows, heads, splits, dim, dtype=torch.float32)
        attention_kernel[tiles, kv_heads, splits](
            query, keys, values, spans, tables, parts, tops, totals, *query.stride()[:2], *keys.stride()[:3],
            *values.stride()[:3], len(spans), window or _NO_WINDOW,
            dim**-0.5 if scores is None else scores.scale,
            KV_HEADS=kv_heads, GROUP=group, PACKED=packed, DIM=dim, DIMS=max(dims, 16), BLOCK_SIZE=block_size,
            ROWS=rows, TILE=keys_of_tile, SPLITS=splits, ONE_TOKEN=one_token,
        )  # fmt: skip
        if splits > 1:
            reduce_kernel[(num_rows * heads,)](parts, tops, totals, output, DIM=dim, DIMS=dims, SPLITS=splits)
        return output

    def _splits(self, programs: int, device: torch.device) -> int:
        """Into how many parts to cut keys to fill the device. A power of two."""
        wanted = PROGRAMS_PER_PROCESSOR * (self._processors or _processors(device))
        splits: int = triton.next_power_of_2(max(1, wanted // programs))
        return min(MOST_SPLITS, splits)


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def tile_sizes(bytes_per_head: int) -> tuple[int, int]:
    """Keys of a tile, and query rows of a chunk's tile. They fit into the 99 KiB of shared memory that the
    smaller devices have.
    """
    keys, queries = (size // bytes_per_head for size in (_KEY_BYTES, _QUERY_BYTES))
    return max(FEWEST_ROWS, min(MOST_ROWS, keys)), max(FEWEST_ROWS, min(MOST_ROWS, queries))


def paged_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spans: torch.Tensor, tables: torch.Tensor,
    window: int | None = None, scores: Scores | None = None,
) -> torch.Tensor:  # fmt: skip
    """Slow twin, sequence by sequence: all scores, a mask, softmax. Rows outside every span are NaN."""
    output = torch.full_like(query, torch.nan)
    block_size, group = keys.shape[1], query.shape[1] // keys.shape[2]
    for first_row, num_tokens, start, first_entry in spans.tolist():
        seen = torch.arange(start + num_tokens, device=query.device)
        places = (tables[first_entry + seen // block_size].long(), seen % block_size)
        k, v = (pool[places].repeat_interleave(group, dim=1) for pool in (keys, values))
        rows = slice(first_row, first_row + num_tokens)
        own = seen[start:, None]
        hidden = (seen > own) | (seen <= own - (window or _NO_WINDOW))
        weights = attention_weights(
            torch.einsum("thd,lhd->htl", query[rows], k), query.shape[2], scores, hidden
        )
        output[rows] = torch.einsum("htl,lhd->thd", weights, v)
    return output


@triton.jit
def span_of_tile(spans: tl.tensor, num_spans: tl.tensor, tile: tl.tensor, TOKENS: tl.constexpr) -> tl.tensor:
    """The last span that can own `tile`. Span i's tiles begin at first_row // TOKENS + i, the latest place
    where the spans before it can end. So the host need not count tiles (the arithmetic of vLLM's kernel).
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
    """Add one tile of keys to `acc`, its top score and sum of weights. `top` is the largest score so far and
    `total` the sum of weights, both per row.
    """
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
    """[TILE, DIMS] of a pool; 0 where `there` is false. `head` is the offset in elements behind a token's
    first one.
    """
    place = block * by_block + slot * by_token + head
    return tl.load(pool + place[:, None] + dims[None, :], mask=there, other=0.0)


@triton.jit
def attention_kernel(
    query: tl.tensor, keys: tl.tensor, values: tl.tensor, spans: tl.tensor, tables: tl.tensor,
    output: tl.tensor, tops: tl.tensor, totals: tl.tensor, query_row: tl.tensor, query_head: tl.tensor,
    key_block: tl.tensor, key_token: tl.tensor, key_head: tl.tensor, value_block: tl.tensor,
    value_token: tl.tensor, value_head: tl.tensor, num_spans: tl.tensor, window: tl.tensor, scale: tl.tensor,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PACKED: tl.constexpr, DIM: tl.constexpr,
    DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    SPLITS: tl.constexpr, ONE_TOKEN: tl.constexpr,
) -> None:  # fmt: skip
    """Program (tile of tokens, KV head, split of keys). Row r of a tile is token r // PACKED, head r % PACKED
    of the group; PACKED, DIMS and TILE are powers of two. With several splits `output` is float32 [T, heads,
    SPLITS, DIM], not divided by the sum of weights, which goes to `totals` beside `tops`.
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
    tl.store(output + place, acc.to(output.dtype.element_ty), mask=own[:, None] & inside[None, :])


@triton.jit
def reduce_kernel(
    parts: tl.tensor, tops: tl.tensor, totals: tl.tensor, output: tl.tensor,
    DIM: tl.constexpr, DIMS: tl.constexpr, SPLITS: tl.constexpr,
) -> None:  # fmt: skip
    """Program (row times head): sum its splits [SPLITS, DIM]. SPLITS is a power of two."""
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
    tl.store(output + row * DIM + dims, answer.to(output.dtype.element_ty), mask=inside)
