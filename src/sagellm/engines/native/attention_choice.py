"""Whether an attention kernel is used, and for what.

Decode rows are the kernel's by rule: torch has to gather the blocks of every row, which reads and writes the
context once more. For prefill chunks it is measured at start, one chunk behind a context of the model's own
shape: where torch multiplies bfloat16 by instructions for it, or on a GPU by a kernel of its own, ours may be
slower.
"""

from __future__ import annotations

from functools import partial

import torch

from sagellm.core.blocks import cdiv
from sagellm.core.protocols.fusion import FusedKernel
from sagellm.engines.native.attention import AttentionPlanner, Span, attend
from sagellm.engines.native.kv_cache import PagedKV
from sagellm.engines.native.timing import cpu_s, cuda_s, one_thread

CONTEXT, CHUNK, _REPEATS = 384, 128, 2
_NOTHING = (((0, 4), torch.int64), ((0,), torch.int32))


def attention_planner(
    kv: PagedKV, num_heads: int, kernel: FusedKernel | None, alone: FusedKernel | None
) -> AttentionPlanner:
    """With `kernel` for what it does better here, or without where it does not support the pool; `alone` is
    the kernel on one thread, which is measured.
    """
    if kernel is None or alone is None or not _supported(kernel, kv, num_heads):
        return AttentionPlanner(kv)
    return AttentionPlanner(kv, kernel, chunks=chunks_pay(alone, kv, num_heads))


def chunks_pay(kernel: FusedKernel, kv: PagedKV, num_heads: int) -> bool:
    """Whether a prefill chunk is faster by `kernel`, which on a CPU is one of one thread."""
    small = _like(kv, cdiv(CONTEXT + CHUNK, kv.block_size))
    span = Span(0, CHUNK, CONTEXT, range(small.num_blocks))
    query = _query(kv, CHUNK, num_heads)
    key = query.new_ones(CHUNK, *small.keys[0].shape[2:])
    seconds = cuda_s if query.is_cuda else cpu_s
    with one_thread():
        by_torch, by_kernel = (
            seconds(partial(attend, planner.plan([], [span], None), small, 0, query, key, key), _REPEATS)
            for planner in (AttentionPlanner(small), AttentionPlanner(small, kernel))
        )
    return by_kernel < by_torch


def _supported(kernel: FusedKernel, kv: PagedKV, num_heads: int) -> bool:
    query = _query(kv, 1, num_heads)
    spans, tables = (query.new_zeros(shape, dtype=dtype) for shape, dtype in _NOTHING)
    return kernel.supports(query, kv.keys[0], kv.values[0], spans, tables).usable


def _query(kv: PagedKV, rows: int, num_heads: int) -> torch.Tensor:
    pool = kv.keys[0]
    return pool.new_ones(rows, num_heads, pool.shape[3])


def _like(kv: PagedKV, num_blocks: int) -> PagedKV:
    """One layer of another number of blocks, written once: memory that nobody wrote to is read too fast."""
    pool = kv.keys[0]
    _, block_size, kv_heads, head_dim = pool.shape
    small = PagedKV(1, num_blocks, block_size, kv_heads, head_dim, pool.device, pool.dtype)
    for own in (*small.keys, *small.values):
        own.fill_(1.0)
    return small
