"""Compaction between two steps: blocks move so that free ones stand together."""

from __future__ import annotations

from collections.abc import Sequence

from sagellm.core.plan import BlockTableDelta, ExecutionPlan, RequestState
from sagellm.core.protocols.engine import InferenceBackend
from sagellm.kvmgr.kv_pool import as_copies, plan_compaction
from sagellm.kvmgr.manager import KVCacheManager


def compact(
    backend: InferenceBackend,
    kv: KVCacheManager,
    running: Sequence[RequestState],
    step: int,
    max_copies: int | None,
) -> int:
    """Move at most `max_copies` blocks, and have the backend copy them; returns how many moved. If the
    backend fails, nothing has moved."""
    moves = plan_compaction(kv.pool.block_info, kv.pool.total_blocks, max_copies)
    if not moves:
        return 0
    kv.remap(moves)
    grown = tuple(BlockTableDelta(state.row, 0, tuple(kv.block_table(state.request_id))) for state in running)
    try:
        backend.execute(ExecutionPlan(step, table_deltas=grown, copies=tuple(as_copies(moves))))
    except Exception:
        kv.remap({target: source for source, target in moves.items()})
        raise
    return len(moves)
