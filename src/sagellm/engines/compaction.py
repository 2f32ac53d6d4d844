"""Moves blocks of a device so that free ones are contiguous."""

from __future__ import annotations

from collections.abc import Iterable

from sagellm.core.plan import BlockTableDelta, ExecutionPlan, RequestState
from sagellm.core.protocols.engine import InferenceBackend
from sagellm.kvmgr.kv_pool import as_copies, plan_compaction
from sagellm.kvmgr.manager import KVCacheManager


def compact(
    kv: KVCacheManager,
    backend: InferenceBackend,
    running: Iterable[RequestState],
    step: int,
    max_copies: int | None,
) -> int:
    """Move at most `max_copies` blocks; returns how many. The backend copies them now.

    No step is in flight. If it raises an error, nothing has moved.
    """
    moves = plan_compaction(kv.pool.block_info, kv.pool.total_blocks, max_copies)
    if not moves:
        return 0
    kv.remap(moves)
    tables = [(state.row, tuple(kv.block_table(state.request_id))) for state in running]
    deltas = tuple(BlockTableDelta(row, 0, block_ids) for row, block_ids in tables)
    copies = tuple(as_copies(moves))
    try:
        backend.execute(ExecutionPlan(step, table_deltas=deltas, copies=copies))
    except Exception:
        kv.remap({target: source for source, target in moves.items()})
        raise
    return len(moves)
