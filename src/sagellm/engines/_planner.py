"""From the queues to a frozen plan: passes decide, blocks are bound, requests enter rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from sagellm.core.clock import Clock
from sagellm.core.errors import CapacityError, PlanError, SageError
from sagellm.core.events import EventBus, RequestScheduled
from sagellm.core.plan import Draft, ExecutionPlan, RequestState
from sagellm.core.protocols.scheduler_ir import SchedulingView
from sagellm.core.types import FinishReason
from sagellm.engines._recovery import Recovery
from sagellm.engines._request_table import RequestTable
from sagellm.kvmgr.manager import KVCacheManager
from sagellm.kvmgr.scheduler_ir import PassPipeline, build_draft, freeze, verify_bound


class EndWithError(Protocol):
    """Ends a request that cannot go on."""

    def __call__(self, state: RequestState, reason: FinishReason, *, error: str) -> None: ...


class Planner:
    """The first of the three calls of a step. `preempt` sends a running request back to the queue."""

    def __init__(
        self,
        roster: RequestTable,
        kv: KVCacheManager,
        scheduler: PassPipeline,
        recovery: Recovery,
        *,
        preempt: Callable[[RequestState], None],
        end: EndWithError,
        clock: Clock,
        events: EventBus,
    ) -> None:
        self._request_table = roster
        self._kv = kv
        self._scheduler = scheduler
        self._recovery = recovery
        self._preempt = preempt
        self._end = end
        self._clock = clock
        self._events = events

    def draft(self, step: int) -> Draft:
        """What the step could do before any pass has said anything."""
        roster = self._request_table
        return build_draft(
            step,
            self._clock.now(),
            self._recovery.token_budget,
            roster.running,
            roster.waiting.values(),
            roster.decodes,
            roster.prefilling.values(),
            roster.num_new_running,
        )

    def plan(self, step: int, view: SchedulingView) -> tuple[Draft, ExecutionPlan]:
        """The step with everything in it that can be done. Raises `SageError` where a pass decided what
        cannot be; then nothing is bound."""
        draft = self.draft(step)
        draft.may_bind = not self._recovery.isolates
        self._run(draft, view)
        self._check_running(draft)
        self._request_table.running[:] = draft.running
        self._request_table.num_new_running = 0
        self._recovery.isolate(draft)
        self._take_out(draft)
        for request_id, reason in draft.rejected.items():
            self._end(self._request_table.states[request_id], FinishReason.ERROR, error=reason)
            draft.skipped_decodes.pop(request_id, None)
        self._bind(draft)
        self._seal(draft)
        return draft, self._freeze(draft)

    def _take_out(self, draft: Draft) -> None:
        """Whom the passes preempt goes back to the queue; its KV is saved first, if it is to be."""
        for state in draft.preempted:
            name = state.request_id
            if name in draft.swapped and not self._kv.swap_out(draft, state):
                draft.swapped.remove(name)
                draft.record("bind", state, "recompute", "there is no room in host memory")
            self._preempt(state)
            draft.skipped_decodes.pop(name, None)

    def plan_ahead(
        self, step: int, view: SchedulingView, ended: list[RequestState], num_told: int
    ) -> tuple[Draft, ExecutionPlan] | None:
        """The step behind one whose result is not known, the requests being as that will leave them. `ended`
        then end by their length; the first `num_told` rows that were left the backend knows of. None, and
        nothing but evictions and the order of those that run has changed, where requests would have to leave,
        or memory is short: that has to be seen.
        """
        draft = self.draft(step)
        draft.may_bind = True
        draft.skipped_decodes = {state.request_id: state for state in ended}
        try:
            self._run(draft, view)
            self._check_running(draft)
            self._drop_stale(draft)
            if draft.preempted or draft.rejected or not draft.num_scheduled:
                raise CapacityError("requests would have to leave")
            self._kv.bind(draft)
            self._request_table.running[:] = draft.running
            self._request_table.num_new_running = 0
            self._seal(draft)
        except SageError:
            self._kv.rollback(draft)
            self._keep_order(draft)
            return None
        return draft, self._freeze(draft, num_told)

    def _run(self, draft: Draft, view: SchedulingView) -> None:
        try:
            self._scheduler.run(draft, view)
        except Exception:
            self._kv.rollback(draft)
            self._keep_order(draft)
            raise

    def _keep_order(self, draft: Draft) -> None:
        """The order of those that run outlives a draft that is thrown away: a pass that has sorted them looks
        only at those who come."""
        running = self._request_table.running
        if len(draft.running) == len(running) and set(draft.running) == set(running):
            running[:] = draft.running
            self._request_table.num_new_running = 0

    def _check_running(self, draft: Draft) -> None:
        before, after = len(self._request_table.running), len(draft.running)
        if before != after:
            raise PlanError(f"a pass lost running requests: {after} of {before} are left")

    def _seal(self, draft: Draft) -> None:
        try:
            verify_bound(draft)
            self._enter(draft)
        except SageError:
            self._kv.rollback(draft)
            raise

    def _freeze(self, draft: Draft, num_told: int = 0) -> ExecutionPlan:
        roster = self._request_table
        draft.decode_indices = (
            roster.decodes.indices_without(draft.skipped_decodes) if draft.skipped_decodes else None
        )
        return freeze(draft, tuple(roster.left[num_told:]), self._kv, roster.decodes)

    # -- blocks

    def _drop_stale(self, draft: Draft) -> None:
        for chunk in list(draft.admitted()):
            bound = chunk.state.request_id in draft.bound
            if not bound and chunk.hit is not None and not self._kv.is_current(chunk.hit):
                self._put_off(draft, chunk.state, "the request whose last block it would copy has left")

    def _bind(self, draft: Draft) -> None:
        """Bind what can be bound. Where a request lacks blocks that guarantees keep for others, the requests
        admitted behind it wait for a later step first, since they may hold what it lacks; then it waits
        itself. Running requests come before all admitted ones."""
        self._drop_stale(draft)
        short: CapacityError | None = None
        while draft.num_scheduled:
            try:
                self._kv.bind(draft)
                return
            except CapacityError as error:
                state, reason = self._request_table.states[error.request_id or ""], str(error)
                admitted = [chunk for chunk in draft.admitted() if chunk.state.request_id not in draft.bound]
                place = next((i for i, chunk in enumerate(admitted) if chunk.state is state), -1)
                behind = admitted[place + 1 :]
                if not behind:
                    short = short or error
                for one in [chunk.state for chunk in behind] or [state]:
                    self._put_off(draft, one, reason)
        if short is not None:
            self._make_way(self._request_table.states[short.request_id or ""], short)

    def _make_way(self, state: RequestState, error: CapacityError) -> None:
        """Nothing could be bound, though the passes expected it (guarantees of others are in the way): the
        last of several running requests goes back to the queue. For one that is alone, guaranteed blocks in
        the cache are evicted where its ceilings are in the way; otherwise it can never go on."""
        running = self._request_table.running
        if len(running) > 1:
            self._preempt(running[-1])
            return
        is_alone = not running or running[0] is state
        if is_alone and not self._kv.make_room_below_ceilings(state, error.num_blocks):
            self._end(state, FinishReason.ERROR, error=f"out of KV memory: {error}")

    def _put_off(self, draft: Draft, state: RequestState, reason: str) -> None:
        draft.hold(state)
        draft.record("bind", state, "wait", reason)

    def _enter(self, draft: Draft) -> None:
        """Admitted requests get rows; their state becomes that of a running one."""
        for chunk in draft.admitted():
            state = chunk.state
            self._request_table.enter(state)
            state.num_computed = chunk.start
            self._kv.admitted(chunk, again=state.scheduled_s is not None)
            if not state.num_preemptions:  # also if the step in which it entered before has failed
                state.num_cached = chunk.start
            if state.scheduled_s is None:
                state.scheduled_s = draft.now_s
                self._events.emit(RequestScheduled(state.request_id, chunk.start, draft.now_s))
