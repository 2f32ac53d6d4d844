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
MOST_DIMS, MOST_LATENT_DIMS = 256, 576
"""Of a head, and of one whose values are a part of the keys."""
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
        if keys.shape[3] > MOST_DIMS and not _is_part(inputs[2], keys):
            return f"a head of {keys.shape[3]} is more than the {MOST_DIMS} that fit into shared memory"
        if keys.shape[3] > MOST_LATENT_DIMS:
            return f"a latent vector of {keys.shape[3]} is more than the {MOST_LATENT_DIMS} that fit"
        return ""

    def _compute(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spans: torch.Tensor,
        tables: torch.Tensor, window: int | None = None, scores: Scores | None = None, decode_rows: int = 0,
    ) -> torch.Tensor:  # fmt: skip
        num_rows, heads, dim = query.shape
        _, block_size, kv_heads, value_dim = values.shape
        output = query.new_empty(num_rows, heads, value_dim)
        if not len(spans):
            return output
        group, key_head, value_head = heads // kv_heads, keys.stride(2), values.stride(2)
        if kv_heads == 1 and dim > MOST_DIMS and group > FEWEST_ROWS and group % FEWEST_ROWS == 0:
            # The sums of many heads with so many dims do not fit: as KV heads that lie at one place.
            kv_heads, group, key_head, value_head = group // FEWEST_ROWS, FEWEST_ROWS, 0, 0
        main, rest = _parts_of(dim, value_dim)
        packed, dims = triton.next_power_of_2(group), triton.next_power_of_2(main)
        value_dims = triton.next_power_of_2(value_dim)
        one_token = len(spans) == num_rows  # a span has at least one
        keys_of_tile, queries = tile_sizes(dims * keys.element_size())
        rows = max(packed, FEWEST_ROWS if one_token else queries)
        tiles = len(spans) if one_token else num_rows // (rows // packed) + len(spans)
        splits = self._splits(tiles * kv_heads, query.device)
        parts, tops, totals = output, output, output
        if splits > 1:
            tops, totals = query.new_empty(2, num_rows, heads, splits, dtype=torch.float32)
            parts = query.new_empty(num_rows, heads, splits, value_dim, dtype=torch.float32)
        scale, softcap, sinks = dim**-0.5, None, None
        if scores is not None:
            scale, softcap, sinks = scores.scale, scores.softcap, scores.sinks
        attention_kernel[tiles, kv_heads, splits](
            query, keys, values, spans, tables, parts, tops, totals, totals if sinks is None else sinks,
            *query.stride()[:2], *keys.stride()[:2], key_head, *values.stride()[:2], value_head, len(spans),
            window or _NO_WINDOW, scale, softcap or 1.0,
            KV_HEADS=kv_heads, GROUP=group, PACKED=packed, DIM=main, DIMS=max(dims, 16), REST=rest,
            RESTS=max(16, triton.next_power_of_2(rest)), VALUE_DIM=value_dim, VALUE_DIMS=max(value_dims, 16),
            BLOCK_SIZE=block_size, ROWS=rows, TILE=keys_of_tile, SPLITS=splits, ONE_TOKEN=one_token,
            VALUES_IN_KEYS=main == value_dim and _is_part(values, keys), CAPPED=softcap is not None,
            SINKS=sinks is not None,
        )  # fmt: skip
        if splits > 1:
            reduce_kernel[(num_rows * heads,)](
                parts, tops, totals, totals if sinks is None else sinks, output, heads,
                DIM=value_dim, DIMS=value_dims, SPLITS=splits, SINKS=sinks is not None,
            )  # fmt: skip
        return output

    def _splits(self, programs: int, device: torch.device) -> int:
        """Into how many parts to cut keys to fill the device. A power of two."""
        wanted = PROGRAMS_PER_PROCESSOR * (self._processors or _processors(device))
        splits: int = triton.next_power_of_2(max(1, wanted // programs))
        return min(MOST_SPLITS, splits)


def _is_part(values: torch.Tensor, keys: torch.Tensor) -> bool:
    """Whether values are the first dims of the keys."""
    return values.data_ptr() == keys.data_ptr() and values.stride() == keys.stride()


def _parts_of(dim: int, value_dim: int) -> tuple[int, int]:
    """The dims of a key as a power of two and a rest. 512 + 64 take less memory than 1,024. The rest is 0
    where keys and values have equally many.
    """
    if dim == value_dim:
        return dim, 0
    power = 1 << (dim.bit_length() - 1)
    return power, dim - power


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
    output = query.new_full((*query.shape[:2], values.shape[3]), torch.nan)
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
def base_of(top: tl.tensor) -> tl.tensor:
    """What weights are relative to. While a row has met nothing above -inf, exp(-inf - -inf) would be NaN
    where the twin has 0.
    """
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def attend_tile(
    scores: tl.tensor, v: tl.tensor, visible: tl.tensor, acc: tl.tensor, top: tl.tensor, total: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add one tile of keys to `acc`, its top score and sum of weights. `top` is the largest score so far and
    `total` the sum of weights, both per row.
    """
    scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = base_of(new_top)
    weights = tl.exp(scores - base[:, None])
    kept = tl.exp(top - base)
    acc = acc * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return acc, new_top, total * kept + tl.sum(weights, 1)


@triton.jit
def load_rows(
    base: tl.tensor, place: tl.tensor, there: tl.tensor, FIRST: tl.constexpr, COUNT: tl.constexpr,
    PADDED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """COUNT dims from FIRST on of n vectors, as [n, PADDED]. Vectors that are not `there` are 0."""
    dims = tl.arange(0, PADDED)
    loaded = there[:, None] & (dims < COUNT)[None, :]
    return tl.load(base + place[:, None] + (FIRST + dims)[None, :], mask=loaded, other=0.0)


@triton.jit
def score_tile(
    q: tl.tensor, q_rest: tl.tensor, k: tl.tensor, k_rest: tl.tensor, scale: tl.tensor, softcap: tl.tensor,
    REST: tl.constexpr, CAPPED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Scores [ROWS, TILE]. The second part of queries and keys has `REST` dims."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if REST > 0:
        scores += tl.dot(q_rest, tl.trans(k_rest), input_precision="ieee")
    scores = scores * scale
    if CAPPED:  # tanh
        scores = softcap * (1.0 - 2.0 / (tl.exp(scores * (2.0 / softcap)) + 1.0))
    return scores


@triton.jit
def share_of_keys(
    first: tl.tensor, stop: tl.tensor, split: tl.tensor, TILE: tl.constexpr, SPLITS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Begin and end of a split's keys, whole tiles but for the last."""
    share = tl.cdiv(tl.cdiv(stop - first, TILE), SPLITS) * TILE
    begin = first + split * share
    return begin, tl.minimum(begin + share, stop)


@triton.jit
def store_part(
    acc: tl.tensor, top: tl.tensor, total: tl.tensor, part: tl.tensor, own: tl.tensor, output: tl.tensor,
    tops: tl.tensor, totals: tl.tensor, VALUE_DIM: tl.constexpr, VALUE_DIMS: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:  # fmt: skip
    """Store the rows of one split. The only one is divided by the sum of weights."""
    if SPLITS == 1:
        acc = acc / total[:, None]
    else:
        tl.store(tops + part, top, mask=own)
        tl.store(totals + part, total, mask=own)
    dims = tl.arange(0, VALUE_DIMS)
    place = part[:, None] * VALUE_DIM + dims[None, :]
    tl.store(output + place, acc.to(output.dtype.element_ty), mask=own[:, None] & (dims < VALUE_DIM)[None, :])


@triton.jit
def attention_kernel(
    query: tl.tensor, keys: tl.tensor, values: tl.tensor, spans: tl.tensor, tables: tl.tensor,
    output: tl.tensor, tops: tl.tensor, totals: tl.tensor, sinks: tl.tensor, query_row: tl.tensor,
    query_head: tl.tensor, key_block: tl.tensor, key_token: tl.tensor, key_head: tl.tensor,
    value_block: tl.tensor, value_token: tl.tensor, value_head: tl.tensor, num_spans: tl.tensor,
    window: tl.tensor, scale: tl.tensor, softcap: tl.tensor, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    PACKED: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr, REST: tl.constexpr, RESTS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, ONE_TOKEN: tl.constexpr, VALUES_IN_KEYS: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr,
) -> None:  # fmt: skip
    """Program (tile of tokens, KV head, split of keys). Row r of a tile is token r // PACKED, head r % PACKED
    of the group; PACKED, DIMS, RESTS, VALUE_DIMS and TILE are powers of two. A key has DIM and then REST
    dims. With several splits `output` is float32 [T, heads, SPLITS, VALUE_DIM], not divided by the sum of
    weights, which goes to `totals` beside `tops`.
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

    rows, columns = tl.arange(0, ROWS), tl.arange(0, TILE)
    token, head = first_token + rows // PACKED, rows % PACKED
    own = (head < GROUP) & (token < num_tokens) & (rows // PACKED < tokens)
    flat_row = (first_row + token).to(tl.int64)
    flat_head = kv_head * GROUP + head
    at_query = flat_row * query_row + flat_head * query_head
    q = load_rows(query, at_query, own, 0, DIM, DIMS)
    q_rest = load_rows(query, at_query, own, DIM, REST, RESTS) if REST > 0 else q

    position = start + token
    first_key = tl.maximum(start + first_token + 1 - window, 0)
    stop_key = start + tl.minimum(first_token + tokens, num_tokens)
    begin, end = share_of_keys(first_key, stop_key, split, TILE, SPLITS)
    acc = tl.zeros([ROWS, VALUE_DIMS], dtype=tl.float32)
    top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    for at in range(begin, end, TILE):
        key = at + columns
        there = key < end
        block = tl.load(tables + entry + key // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        slot = key % BLOCK_SIZE
        at_key = block * key_block + slot * key_token + kv_head * key_head
        k = load_rows(keys, at_key, there, 0, DIM, DIMS)
        k_rest = load_rows(keys, at_key, there, DIM, REST, RESTS) if REST > 0 else k
        scores = score_tile(q, q_rest, k, k_rest, scale, softcap, REST, CAPPED)
        at_value = block * value_block + slot * value_token + kv_head * value_head
        v = k if VALUES_IN_KEYS else load_rows(values, at_value, there, 0, VALUE_DIM, VALUE_DIMS)
        near = (key[None, :] <= position[:, None]) & (key[None, :] > position[:, None] - window)
        acc, top, total = attend_tile(scores, v, near & there[None, :], acc, top, total)
    if SINKS and SPLITS == 1:
        total += tl.exp(tl.load(sinks + flat_head, mask=own, other=float("-inf")) - base_of(top))
    part = (flat_row * (KV_HEADS * GROUP) + flat_head) * SPLITS + split
    store_part(acc, top, total, part, own, output, tops, totals, VALUE_DIM, VALUE_DIMS, SPLITS)


@triton.jit
def reduce_kernel(
    parts: tl.tensor, tops: tl.tensor, totals: tl.tensor, sinks: tl.tensor, output: tl.tensor,
    heads: tl.tensor, DIM: tl.constexpr, DIMS: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr,
) -> None:  # fmt: skip
    """Program (row times head): sum its splits [SPLITS, DIM]. SPLITS is a power of two."""
    row = tl.program_id(0).to(tl.int64)
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, DIMS)
    inside = dims < DIM
    top = tl.load(tops + row * SPLITS + splits)
    highest = tl.max(top, 0)
    weight = tl.exp(top - base_of(highest))
    total = tl.sum(weight * tl.load(totals + row * SPLITS + splits), 0)
    if SINKS:
        total += tl.exp(tl.load(sinks + row % heads) - base_of(highest))
    place = (row * SPLITS + splits)[:, None] * DIM + dims[None, :]
    part = tl.load(parts + place, mask=inside[None, :], other=0.0)
    answer = tl.sum(part * weight[:, None], 0) / total
    tl.store(output + row * DIM + dims, answer.to(output.dtype.element_ty), mask=inside)
