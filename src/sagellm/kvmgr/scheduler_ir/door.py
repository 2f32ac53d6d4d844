"""`build_plan`: requests in, a complete plan out, with no engine behind it: the design documents' way in."""

from __future__ import annotations

from collections.abc import Sequence

from sagellm.core.blocks import cdiv
from sagellm.core.errors import PlanError
from sagellm.core.plan import BlockTableDelta, Draft, ExecutionPlan, RequestState
from sagellm.core.protocols.scheduler_ir import SchedulerPass
from sagellm.kvmgr.scheduler_ir.batch import DecodeBatch
from sagellm.kvmgr.scheduler_ir.freeze import freeze
from sagellm.kvmgr.scheduler_ir.pipeline import BaseSchedulerIR, ScheduleRequest


def build_plan(
    requests: Sequence[ScheduleRequest],
    running: Sequence[ScheduleRequest] = (),
    *,
    available_memory: int,
    passes: Sequence[SchedulerPass] = (),
    step: int = 0,
    max_batched_tokens: int = 8192,
    max_num_seqs: int = 256,
) -> ExecutionPlan:
    """The plan of one step: `requests` wait, `running` are in decode, `available_memory` blocks are free.

    Stateless, so blocks and rows are numbered here: free blocks from 0 on, then those that running requests
    hold and those that hits name; running requests are in rows 0, 1, ... in their order. Whoever has a pool
    lets an `Engine` plan instead. Raises `PlanError` where block sizes differ, or passes break the rules.
    """
    sizes = sorted({one.block_size for one in [*requests, *running]})
    if len(sizes) > 1:
        raise PlanError(
            f"requests have blocks of {sizes[0]} and of {sizes[-1]} tokens: one pool has one size"
        )
    result = BaseSchedulerIR(passes).schedule(
        requests,
        running,
        available_memory,
        max_batched_tokens=max_batched_tokens,
        max_num_seqs=max_num_seqs,
    )
    draft = result.draft
    draft.step = step
    binding = _Binding(available_memory, sizes[0] if sizes else 1)
    decodes = draft.decodes
    assert isinstance(decodes, DecodeBatch)  # the simple door's own
    for row, state in enumerate(decodes.states):
        state.row = row
        binding.hold(state.request_id, state.num_computed)
    left = binding.leave(draft.preempted)
    free_rows = [*left, *range(len(running), max_num_seqs)]
    binding.grow(draft)
    for chunk, row in zip(draft.admitted(), free_rows, strict=False):  # the verifier has counted rows
        assert chunk.hit is not None
        chunk.state.row = row
        binding.hold(chunk.state.request_id, chunk.hit.num_tokens)
        binding.fill(chunk.state.request_id, chunk.end)
    draft.decode_indices = (
        decodes.indices_without(set(draft.skipped_decodes)) if draft.skipped_decodes else None
    )
    return freeze(draft, left, binding, decodes)


class _Binding:
    """Hands out block ids: free ones from the front, held ones numbered behind all that are free."""

    def __init__(self, num_free: int, block_size: int) -> None:
        self._free = list(range(num_free - 1, -1, -1))
        self._next_held = num_free
        self._block_size = block_size
        self._tables: dict[str, list[int]] = {}

    def block_table(self, request_id: str) -> Sequence[int]:
        return self._tables[request_id]

    def hold(self, request_id: str, num_tokens: int) -> None:
        """Blocks that have the KV of so many tokens already."""
        count = cdiv(num_tokens, self._block_size)
        self._tables[request_id] = list(range(self._next_held, self._next_held + count))
        self._next_held += count

    def leave(self, states: Sequence[RequestState]) -> tuple[int, ...]:
        """Preempted requests give blocks and rows back; their rows."""
        for state in states:
            self._free += reversed(self._tables.pop(state.request_id))
        return tuple(state.row for state in states)

    def fill(self, request_id: str, num_tokens: int) -> None:
        """Free blocks until the table holds so many tokens."""
        table = self._tables[request_id]
        missing = cdiv(num_tokens, self._block_size) - len(table)
        if missing > 0:
            table += reversed(self._free[-missing:])
            del self._free[-missing:]

    def grow(self, draft: Draft) -> None:
        """One more block for each request in decode that needs it, told to the backend."""
        for state in draft.needing_block():
            table = self._tables[state.request_id]
            first = len(table)
            self.fill(state.request_id, state.num_computed + 1)
            draft.table_deltas.append(BlockTableDelta(state.row, first, tuple(table[first:])))
