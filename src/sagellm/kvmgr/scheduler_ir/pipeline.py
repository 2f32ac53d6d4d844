"""`BaseSchedulerIR`: passes in the order given, each timed, the verifier before the first and after the
last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sagellm.core.blocks import cdiv
from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import ConfigError
from sagellm.core.plan import Draft, RequestState
from sagellm.core.protocols.prefix_cache import PrefixHit
from sagellm.core.protocols.scheduler_ir import (
    NO_STEP,
    BlockBudget,
    ResumeCost,
    SchedulerPass,
    SchedulingView,
    StepFacts,
)
from sagellm.core.types import Request, RequestStatus, Tokens
from sagellm.kvmgr.scheduler_ir.batch import DecodeBatch
from sagellm.kvmgr.scheduler_ir.builder import IRBuilder
from sagellm.kvmgr.scheduler_ir.passes.chunked_prefill import ChunkedPrefillPass
from sagellm.kvmgr.scheduler_ir.passes.memory_aware_preemption import MemoryAwarePreemptionPass
from sagellm.kvmgr.scheduler_ir.verify import verify


class BaseSchedulerIR:
    """Runs passes over drafts. `pass_time_s` adds up the time of each pass by name.

    Chunking under the token budget and, behind it, the memory check close every schedule: where they are not
    in `passes`, or stand the other way round, they run after them; unless a pass does both itself, and says
    so by `closes = True`.
    """

    def __init__(self, passes: Sequence[SchedulerPass] = (), clock: Clock | None = None) -> None:
        self.builder = IRBuilder()
        self._clock = clock or MonotonicClock()
        self.pass_time_s: dict[str, float] = {}
        self.use(passes)

    def use(self, passes: Sequence[SchedulerPass]) -> None:
        """Schedule by these passes, in this order, from the next step on."""
        names = [one.name for one in passes]
        closing = [place for place, one in enumerate(passes) if getattr(one, "closes", False)]
        behind = names[closing[0] + 1 :] if closing else []
        for name in (ChunkedPrefillPass.name, MemoryAwarePreemptionPass.name):
            if name in behind:
                raise ConfigError(f"{names[closing[0]]} closes the schedule: {name} cannot stand behind it")
        self.passes, self.order = list(passes), list(passes)
        if closing:
            return
        if ChunkedPrefillPass.name not in names:
            self.order.append(ChunkedPrefillPass())
            names.append(ChunkedPrefillPass.name)
        num_after = names[::-1].index(ChunkedPrefillPass.name)
        if MemoryAwarePreemptionPass.name not in names[len(names) - num_after :]:  # chunks must be paid for
            self.order.append(MemoryAwarePreemptionPass())

    def add_optimization_pass(self, scheduler_pass: SchedulerPass) -> None:
        """Append a pass; order is order of execution."""
        self.use([*self.passes, scheduler_pass])

    def run(self, draft: Draft, view: SchedulingView) -> Draft:
        """Apply all passes to the draft in place and verify it; raises `PlanError`."""
        verify(draft, view, scheduled=False)
        for scheduler_pass in self.order:
            began_s = self._clock.now()
            scheduler_pass(draft, view)
            spent_s = self._clock.now() - began_s
            self.pass_time_s[scheduler_pass.name] = self.pass_time_s.get(scheduler_pass.name, 0.0) + spent_s
        verify(draft, view)
        return draft

    def schedule(
        self,
        pending_requests: Sequence[ScheduleRequest],
        running_requests: Sequence[ScheduleRequest],
        available_memory: int,
        *,
        max_batched_tokens: int = 8192,
        max_num_seqs: int = 256,
    ) -> ScheduleResult:
        """The simple door of the design documents: who may run now, given `available_memory` free blocks.

        Stateless: running requests are taken to hold blocks for all their tokens but the last.
        """
        by_id = {request.request_id: request for request in [*pending_requests, *running_requests]}
        view = _SimpleView(by_id, available_memory, max_num_seqs, max_batched_tokens, len(running_requests))
        if by_id:
            view.block_size = next(iter(by_id.values())).block_size
        running = [_running(request) for request in running_requests]
        waiting = [RequestState.of(_as_request(request)) for request in pending_requests]
        decodes = DecodeBatch(1, 1)
        for state, request in zip(running, running_requests, strict=True):
            held = cdiv(state.num_computed, request.block_size) * request.block_size
            decodes.enter(state, held, held + request.max_tokens + 1)
        draft = self.builder.draft(0, 0.0, max_batched_tokens, running, waiting, decodes)
        self.run(draft, view)
        return ScheduleResult(
            [by_id[chunk.state.request_id] for chunk in draft.admitted()],
            [by_id[state.request_id] for state in draft.preempted],
            draft,
        )


@dataclass(slots=True)
class ScheduleRequest:
    """A request as the design documents hand it to the scheduler.

    `prefix_cache_hit`: leading tokens that are cached already, in whole blocks. Times in seconds.
    """

    request_id: str
    token_ids: list[int]
    max_tokens: int
    priority: int = 0
    arrived_time: float = 0.0
    prefix_cache_hit: int = 0
    block_size: int = 16

    @property
    def kv_blocks_needed(self) -> int:
        """Blocks for the prompt beyond what is cached, and for all that may be generated."""
        total = cdiv(len(self.token_ids) + self.max_tokens, self.block_size)
        return total - self.prefix_cache_hit // self.block_size


@dataclass(slots=True)
class ScheduleResult:
    """Who starts now, who has to give way, and the draft with every decision and its reason."""

    scheduled_requests: list[ScheduleRequest]
    preempted_requests: list[ScheduleRequest]
    draft: Draft


@dataclass(slots=True)
class _SimpleView:
    """A view without an engine: prices follow from the requests themselves."""

    requests: dict[str, ScheduleRequest]
    free_blocks: int
    max_num_seqs: int
    max_batched_tokens: int
    num_running: int
    block_size: int = 16

    @property
    def kv(self) -> _SimpleView:
        return self

    @property
    def num_blocks(self) -> int:
        return self.free_blocks

    @property
    def version(self) -> int:
        return 0

    @property
    def last_step(self) -> StepFacts:
        return NO_STEP

    @property
    def num_free_rows(self) -> int:
        return max(0, self.max_num_seqs - self.num_running)

    def bind_early(self, draft: Draft) -> bool:
        return False

    def match(self, state: RequestState) -> PrefixHit:
        request = self.requests[state.request_id]
        whole = min(request.prefix_cache_hit, len(state.tokens) - 1) // request.block_size
        return PrefixHit(whole * request.block_size, whole, state.tokens, state.request.namespace)

    def available_blocks(self) -> int:
        return self.free_blocks

    def budget(self) -> BlockBudget:
        return BlockBudget(self.free_blocks)

    def blocks_to_append(self, state: RequestState, num_tokens: int) -> int:
        size = self.requests[state.request_id].block_size
        return cdiv(state.num_computed + num_tokens, size) - cdiv(state.num_computed, size)

    def blocks_to_admit(self, hit: PrefixHit, num_tokens: int) -> int:
        size = hit.num_tokens // hit.num_blocks if hit.num_blocks else self.block_size
        return cdiv(hit.num_tokens + num_tokens, size) - hit.num_blocks

    def blocks_freed_by_preempting(self, state: RequestState) -> int:
        return cdiv(state.num_computed, self.requests[state.request_id].block_size)

    def resume_cost(self, state: RequestState) -> ResumeCost:
        return ResumeCost(0, 0, 0.0, 0.0)


def _as_request(request: ScheduleRequest) -> Request:
    return Request(
        request.request_id,
        Tokens(request.token_ids),
        arrival_s=request.arrived_time,
        priority=request.priority,
    )


def _running(request: ScheduleRequest) -> RequestState:
    state = RequestState.of(_as_request(request))
    state.status = RequestStatus.RUNNING
    state.num_computed = len(state.tokens) - 1
    return state
