"""Attention over the paged KV cache on a GPU, by the Triton kernels of this folder.

The inputs are those of the CPU's kernel (`accel/fusion/cpu/attention.py`), on the device.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton

from sagellm.accel.fusion._attention_inputs import obstacle
from sagellm.accel.fusion.triton._launch import device_obstacle, refuse
from sagellm.accel.fusion.triton.attention_kernels import attention_kernel, reduce_kernel
from sagellm.core.protocols.fusion import KernelSupport, Tolerance

FEWEST_ROWS, MOST_ROWS = 16, 64
"""Of a tile of queries or keys; a matrix unit takes no fewer."""
MOST_SPLITS, PROGRAMS_PER_PROCESSOR = 32, 2
_KEY_BYTES, _QUERY_BYTES = 16_384, 32_768
_NO_WINDOW = 2**30


class TritonPagedAttention:
    """Implements `FusedKernel`. Inputs, in this order:

    `query` [T, heads, head_dim]; `keys` and `values`, pools [num_blocks, block_size, kv_heads, head_dim] in
    the query's dtype; `spans`, int64 [n, 4], each the first row, number of tokens (at least one), position of
    the first and first table entry of a sequence's tokens in the query, in order of rows; `tables`, int32,
    block ids of all sequences; and maybe `window`.

    A token attends to the last `window` positions of its sequence up to its own, or to all of them, scaled by
    1/sqrt(head_dim). Returns [T, heads, head_dim]; rows of no span are undefined. Nothing is read back from
    the device, so spans and tables are not checked; a captured graph may change them. Nothing behind a
    sequence's last position is read; within a tile of 64 rows a NaN in V of a later position reaches earlier
    ones of the chunk, as in torch's SDPA. Keys are split until the device is full, so the last bits depend
    on the batch.
    """

    name = "paged_attention"
    tolerances: tuple[Tolerance, ...] = (
        Tolerance("float32", 2e-5, 2e-5),
        Tolerance("bfloat16", 1e-2, 1.6e-2),
        Tolerance("float16", 2e-3, 2e-3),
    )

    def __init__(self, processors: int | None = None) -> None:
        """`processors`: those of the device, unless another number is to be assumed."""
        self._processors = processors

    def supports(self, *inputs: Any) -> KernelSupport:
        reason = _obstacle(*inputs)
        return KernelSupport(not reason, reason)

    def apply(self, *inputs: Any) -> torch.Tensor:
        """Raises `KernelError` where `supports` says no."""
        refuse(_obstacle(*inputs))
        return self._computed(*inputs)

    def reference(self, *inputs: Any) -> torch.Tensor:
        return paged_attention(*inputs)

    def _computed(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spans: torch.Tensor,
        tables: torch.Tensor, window: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        if not len(spans):
            return out
        num_rows, heads, dim = query.shape
        _, block_size, kv_heads, _ = keys.shape
        group = heads // kv_heads
        packed, dims = triton.next_power_of_2(group), triton.next_power_of_2(dim)
        one_token = len(spans) == num_rows  # a span has at least one
        keys_of_tile, queries = tile_sizes(dims * keys.element_size())
        rows = max(packed, FEWEST_ROWS if one_token else queries)
        tiles = len(spans) if one_token else num_rows // (rows // packed) + len(spans)
        splits = self._splits(tiles * kv_heads, query.device)
        parts, tops, totals = out, out, out
        if splits > 1:
            tops, totals = query.new_empty(2, num_rows, heads, splits, dtype=torch.float32)
            parts = query.new_empty(num_rows, heads, splits, dim, dtype=torch.float32)
        attention_kernel[tiles, kv_heads, splits](
            query, keys, values, spans, tables, parts, tops, totals, *query.stride()[:2], *keys.stride()[:3],
            *values.stride()[:3], len(spans), window or _NO_WINDOW, dim**-0.5,
            KV_HEADS=kv_heads, GROUP=group, PACKED=packed, DIM=dim, DIMS=max(dims, 16), BLOCK_SIZE=block_size,
            ROWS=rows, TILE=keys_of_tile, SPLITS=splits, ONE_TOKEN=one_token,
        )  # fmt: skip
        if splits > 1:
            reduce_kernel[(num_rows * heads,)](parts, tops, totals, out, DIM=dim, DIMS=dims, SPLITS=splits)
        return out

    def _splits(self, programs: int, device: torch.device) -> int:
        """Into how many parts keys are cut, a power of two: as many as fill the device."""
        wanted = PROGRAMS_PER_PROCESSOR * (self._processors or _processors(device))
        splits: int = triton.next_power_of_2(max(1, wanted // programs))
        return min(MOST_SPLITS, splits)


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def tile_sizes(bytes_per_head: int) -> tuple[int, int]:
    """Keys of a tile, and rows of queries of a chunk's: what fits into the 99 KiB of shared memory that the
    smaller devices have.
    """
    keys, queries = (size // bytes_per_head for size in (_KEY_BYTES, _QUERY_BYTES))
    return max(FEWEST_ROWS, min(MOST_ROWS, keys)), max(FEWEST_ROWS, min(MOST_ROWS, queries))


def _obstacle(*inputs: Any) -> str:
    """What stands in the way; empty where nothing does."""
    return obstacle(*inputs) or _no_tiles(*inputs[:2]) or device_obstacle(*inputs[:5])


def _no_tiles(query: torch.Tensor, keys: torch.Tensor) -> str:
    if query.dtype != keys.dtype:
        return f"paged attention has no kernel for {query.dtype} over {keys.dtype}: use one dtype"
    if keys.shape[3] > 256:
        return f"a head of {keys.shape[3]} is more than the 256 that fit into shared memory"
    return ""


def paged_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spans: torch.Tensor, tables: torch.Tensor,
    window: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """The same from plain operators, sequence by sequence: all scores, a mask, softmax; rows of no span are
    NaN.
    """
    out = torch.full_like(query, torch.nan)
    block_size, group = keys.shape[1], query.shape[1] // keys.shape[2]
    for first_row, num_tokens, start, first_entry in spans.tolist():
        seen = torch.arange(start + num_tokens, device=query.device)
        places = (tables[first_entry + seen // block_size].long(), seen % block_size)
        k, v = (pool[places].repeat_interleave(group, dim=1) for pool in (keys, values))
        rows = slice(first_row, first_row + num_tokens)
        own = seen[start:, None]
        hidden = (seen > own) | (seen <= own - (window or _NO_WINDOW))
        scores = torch.einsum("thd,lhd->htl", query[rows], k) * query.shape[2] ** -0.5
        out[rows] = torch.einsum("htl,lhd->thd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
    return out
