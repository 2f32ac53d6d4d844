"""Scheduling without an engine: plain requests in, scheduled requests or a complete plan out.

`BaseSchedulerIR.schedule` and `IRBuilder.build` are the forms of the design documents. Both are stateless: a
running request is assumed to hold blocks for all its tokens but the last, and to be in decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sagellm.core.binding import Binding
from sagellm.core.blocks import cdiv
from sagellm.core.errors import PlanError
from sagellm.core.plan import BlockTableDelta, Draft, ExecutionPlan, RequestState, StepStart
from sagellm.core.protocols.prefix_cache import PrefixHit
from sagellm.core.protocols.scheduler_ir import NO_STEP, BlockBudget, SchedulerPass, StepFacts
from sagellm.core.types import Request, RequestStatus, Tokens
from sagellm.kvmgr.scheduler_ir import DecodeBatch, PassPipeline, freeze


@dataclass(slots=True)
class ScheduleRequest:
    """A request as the design documents describe it. Times in seconds. `prefix_cache_hit` is the number of
    leading tokens that are cached, in whole blocks."""

    request_id: str
    token_ids: list[int]
    max_tokens: int
    priority: int = 0
    arrived_time: float = 0.0
    prefix_cache_hit: int = 0
    block_size: int = 16

    @property
    def kv_blocks_needed(self) -> int:
        """Blocks for the prompt beyond what is cached, and for all `max_tokens` of output."""
        total = cdiv(len(self.token_ids) + self.max_tokens, self.block_size)
        return total - self.prefix_cache_hit // self.block_size

    def to_state(self, row: int | None = None) -> RequestState:
        """The state of this request: it decodes in `row`, or waits."""
        tokens = Tokens(self.token_ids)
        request = Request(self.request_id, tokens, arrival_s=self.arrived_time, priority=self.priority)
        if row is None:
            return RequestState.of(request)
        return RequestState(request, Tokens(tokens), RequestStatus.RUNNING, row, decoding=True)


@dataclass(slots=True)
class ScheduleResult:
    """The requests that start or are preempted, and the draft with all decisions."""

    scheduled_requests: list[ScheduleRequest]
    preempted_requests: list[ScheduleRequest]
    draft: Draft


class BaseSchedulerIR(PassPipeline):
    """A `PassPipeline` that also schedules plain requests."""

    def schedule(
        self,
        pending_requests: Sequence[ScheduleRequest],
        running_requests: Sequence[ScheduleRequest],
        available_memory: int,
        *,
        max_batched_tokens: int = 8192,
        max_num_seqs: int = 256,
    ) -> ScheduleResult:
        """Decide which requests run in the next step, given `available_memory` free blocks."""
        by_id = {request.request_id: request for request in [*pending_requests, *running_requests]}
        block_size = next(iter(by_id.values())).block_size if by_id else 16
        num_free_rows = max(0, max_num_seqs - len(running_requests))
        view = _PlainView(
            by_id, available_memory, block_size, max_num_seqs, max_batched_tokens, num_free_rows
        )
        running = [request.to_state(row) for row, request in enumerate(running_requests)]
        decodes = DecodeBatch(1, 1)
        for state, request in zip(running, running_requests, strict=True):
            held = cdiv(state.num_computed, request.block_size) * request.block_size
            decodes.enter(state, held, held + request.max_tokens + 1)
        waiting = [request.to_state() for request in pending_requests]
        draft = Draft(StepStart(0, 0.0), max_batched_tokens, running, waiting, decodes=decodes)
        self.run(draft, view)
        return ScheduleResult(
            [by_id[chunk.state.request_id] for chunk in draft.admitted()],
            [by_id[state.request_id] for state in draft.preempted],
            draft,
        )


class IRBuilder:
    """From plain requests to a complete plan."""

    def build(
        self,
        requests: Sequence[ScheduleRequest],
        running: Sequence[ScheduleRequest] = (),
        *,
        available_memory: int,
        passes: Sequence[SchedulerPass] = (),
        step: int = 0,
        max_batched_tokens: int = 8192,
        max_num_seqs: int = 256,
    ) -> ExecutionPlan:
        """The plan of one step.

        `requests` wait, `running` are in decode, and `available_memory` blocks are free. Blocks are numbered
        from 0: the free ones, then those of running requests, then those of prefix hits. Running requests are
        in rows 0, 1, ... in their order. Raises `PlanError` where block sizes differ or a pass breaks the
        rules.
        """
        sizes = sorted({request.block_size for request in [*requests, *running]})
        if len(sizes) > 1:
            raise PlanError(
                f"requests have blocks of {sizes[0]} and of {sizes[-1]} tokens: one pool has one size"
            )
        scheduler = BaseSchedulerIR(passes)
        draft = scheduler.schedule(
            requests,
            running,
            available_memory,
            max_batched_tokens=max_batched_tokens,
            max_num_seqs=max_num_seqs,
        ).draft
        draft.step = StepStart(step, 0.0)
        binding = Binding(draft)
        decodes = draft.decodes
        assert isinstance(decodes, DecodeBatch)  # `schedule` made it
        tables = _NumberedTables(available_memory, sizes[0] if sizes else 1)
        for state in decodes.states:
            tables.add_held(state.request_id, state.num_computed)
        left = tuple(state.row for state in draft.preempted)
        for state in draft.preempted:
            tables.release(state.request_id)
        for state in draft.needing_block():
            first = len(tables.block_table(state.request_id))
            new = tables.extend_to(state.request_id, state.num_computed + 1)
            binding.table_deltas.append(BlockTableDelta(state.row, first, tuple(new)))
        free_rows = [*left, *range(len(running), max_num_seqs)]
        for chunk, row in zip(draft.admitted(), free_rows, strict=False):  # the verifier has counted rows
            assert chunk.hit is not None
            chunk.state = replace(chunk.state, row=row)
            tables.add_held(chunk.state.request_id, chunk.hit.num_tokens)
            tables.extend_to(chunk.state.request_id, chunk.end)
        if draft.skipped_decodes:
            binding.decode_indices = decodes.indices_without(set(draft.skipped_decodes))
        return freeze(binding, left, tables, decodes)


@dataclass(slots=True)
class _PlainView:
    """A `SchedulingView` and its `KVQuotes` without an engine: prices follow from the requests alone."""

    requests: dict[str, ScheduleRequest]
    num_blocks: int  # all are free
    block_size: int
    max_num_seqs: int
    max_batched_tokens: int
    num_free_rows: int
    version: int = 0
    last_step: StepFacts = NO_STEP

    @property
    def kv(self) -> _PlainView:
        return self

    @property
    def most_blocks(self) -> int:
        return self.num_blocks

    def bind_early(self, draft: Draft) -> bool:
        return False

    def match(self, state: RequestState) -> PrefixHit:
        request = self.requests[state.request_id]
        whole = min(request.prefix_cache_hit, len(state.tokens) - 1) // request.block_size
        return PrefixHit(whole * request.block_size, whole, state.tokens, state.request.namespace)

    def available_blocks(self) -> int:
        return self.num_blocks

    def block_budget(self) -> BlockBudget:
        return BlockBudget(self.num_blocks)

    def blocks_to_append(self, state: RequestState, num_tokens: int) -> int:
        size = self.requests[state.request_id].block_size
        return cdiv(state.num_computed + num_tokens, size) - cdiv(state.num_computed, size)

    def blocks_to_admit(self, hit: PrefixHit, num_tokens: int) -> int:
        size = hit.num_tokens // hit.num_blocks if hit.num_blocks else self.block_size
        return cdiv(hit.num_tokens + num_tokens, size) - hit.num_blocks

    def blocks_freed_by_preempting(self, state: RequestState) -> int:
        return cdiv(state.num_computed, self.requests[state.request_id].block_size)

    def resume_s(self, state: RequestState) -> float:
        return 0.0


class _NumberedTables:
    """Block tables without a pool. Free ids are taken from 0 on; held blocks have ids behind them."""

    def __init__(self, num_free: int, block_size: int) -> None:
        self._free = list(range(num_free - 1, -1, -1))
        self._next_held = num_free
        self._block_size = block_size
        self._tables: dict[str, list[int]] = {}

    def block_table(self, request_id: str) -> Sequence[int]:
        return self._tables[request_id]

    def state_pages(self, request_id: str) -> tuple[int, ...]:
        return ()

    def add_held(self, request_id: str, num_tokens: int) -> None:
        """Make a table of blocks that already hold the KV of `num_tokens` tokens."""
        count = cdiv(num_tokens, self._block_size)
        self._tables[request_id] = list(range(self._next_held, self._next_held + count))
        self._next_held += count

    def release(self, request_id: str) -> None:
        """Free all blocks of a request."""
        self._free += reversed(self._tables.pop(request_id))

    def extend_to(self, request_id: str, num_tokens: int) -> list[int]:
        """Append free blocks until the table has room for `num_tokens`. Returns the new ones."""
        table = self._tables[request_id]
        new = [self._free.pop() for _ in range(cdiv(num_tokens, self._block_size) - len(table))]
        table += new
        return new
