"""From the requests to a frozen plan: passes decide, blocks are bound, requests enter rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sagellm.core.clock import Clock
from sagellm.core.errors import CapacityError, PlanError, SageError
from sagellm.core.events import EventBus, RequestScheduled
from sagellm.core.plan import Draft, RequestState
from sagellm.core.protocols.scheduler_ir import SchedulingView
from sagellm.engines.overlap import InFlightStep, PlannedStep
from sagellm.engines.recovery import Recovery
from sagellm.engines.request_table import RequestTable
from sagellm.kvmgr.manager import KVCacheManager
from sagellm.kvmgr.scheduler_ir import PassPipeline, build_draft, freeze, verify_bound


class MustLeave(NamedTuple):
    """A request must leave the batch for lack of memory. With `error` it ends, else it waits again."""

    state: RequestState
    error: str | None = None


class Planner:
    """Plans steps. It admits requests; requests that must leave the batch are returned to the engine.

    The engine calls `decide`, removes the requests that the draft preempts and rejects, then calls `bind` and
    `seal`.
    """

    def __init__(
        self,
        table: RequestTable,
        kv: KVCacheManager,
        scheduler: PassPipeline,
        recovery: Recovery,
        *,
        clock: Clock,
        events: EventBus,
    ) -> None:
        self._table = table
        self._kv = kv
        self._scheduler = scheduler
        self._recovery = recovery
        self._clock = clock
        self._events = events

    def draft(self, step: int) -> Draft:
        """What the step could do, before any pass has decided anything."""
        table = self._table
        return build_draft(
            step,
            self._clock.now(),
            self._recovery.token_budget,
            table.running,
            table.waiting.values(),
            table.decodes,
            table.prefilling.values(),
            table.num_new_running,
        )

    def decide(self, step: int, view: SchedulingView) -> Draft:
        """The draft with the decisions of all passes.

        Raises what a pass raises, and `PlanError` for decisions that break the rules; then nothing is bound.
        """
        draft = self.draft(step)
        draft.may_bind = not self._recovery.isolates
        self._run_passes(draft, view)
        self._table.set_order(draft.running)
        self._recovery.isolate(draft)
        return draft

    def save_kv(self, draft: Draft, state: RequestState) -> None:
        """Plan the copies to host memory that the draft wants for a request that it preempts, if they fit."""
        if state.request_id in draft.swapped and not self._kv.swap_out(draft, state):
            draft.swapped.remove(state.request_id)
            draft.record("bind", state, "recompute", "there is no room in host memory")

    def bind(self, draft: Draft) -> MustLeave | None:
        """Bind the blocks of all requests that get them; the requests that must leave have left.

        Running requests come first. Where a request lacks blocks that guarantees keep for others, the
        requests admitted behind it are put off to a later step, since they may hold what it lacks; then it is
        put off itself. If nothing is left to bind for that reason, returns a request that must leave.
        """
        for name in (*(state.request_id for state in draft.preempted), *draft.rejected):
            draft.skipped_decodes.pop(name, None)
        self._put_off_stale(draft)
        short: CapacityError | None = None
        while draft.num_scheduled:
            try:
                self._kv.bind(draft)
                return None
            except CapacityError as error:
                state, reason = self._table.states[error.request_id or ""], str(error)
                admitted = [c.state for c in draft.admitted() if c.state.request_id not in draft.bound]
                index = admitted.index(state) if state in admitted else -1
                behind = admitted[index + 1 :]
                if not behind:
                    short = short or error
                for put_off in behind or [state]:
                    self._put_off(draft, put_off, reason)
        return None if short is None else self._make_way(short)

    def seal(self, draft: Draft) -> PlannedStep:
        """Verify the bound draft, admit its requests into rows, and freeze it."""
        self._verify_and_admit(draft)
        return self._freeze(draft)

    def plan_ahead(self, in_flight: InFlightStep, view: SchedulingView) -> PlannedStep | None:
        """The step behind one whose result is not known yet, planned on the requests as that will leave them.

        None, with no change but evictions and the order of the running requests, where a request would have
        to leave the batch or memory is short; with a sliding window, since blocks behind the window would be
        given up too early; and where a prompt that ends in the step in flight is shared with its group.
        """
        draft, table = in_flight.draft, self._table
        ends_shared = any(c.samples and c.state.request.group is not None for c in draft.chunks.values())
        if self._kv.window is not None or ends_shared:
            return None
        in_flight.drop_finished(table.decodes)
        chunks = list(draft.chunks.values())
        self._kv.foresee(chunks)
        with table.as_if_executed(chunks, draft.decode_indices, self._kv.num_slots) as full_length:
            return self._plan_behind(in_flight, full_length, view)

    def _plan_behind(
        self, in_flight: InFlightStep, full_length: Sequence[RequestState], view: SchedulingView
    ) -> PlannedStep | None:
        draft = self.draft(in_flight.plan.step + 1)
        draft.may_bind = True
        draft.skipped_decodes = {state.request_id: state for state in full_length}
        try:
            self._run_passes(draft, view)
            self._put_off_stale(draft)
            if draft.preempted or draft.rejected or not draft.num_scheduled:
                raise CapacityError("requests would have to leave")
            self._kv.bind(draft)
            self._table.set_order(draft.running)
            self._verify_and_admit(draft)
        except SageError:
            self._discard(draft)
            return None
        return self._freeze(draft, num_sent=len(in_flight.plan.left))

    def _run_passes(self, draft: Draft, view: SchedulingView) -> None:
        try:
            self._scheduler.run(draft, view)
        except Exception:
            self._discard(draft)
            raise
        before, after = len(self._table.running), len(draft.running)
        if before != after:
            raise PlanError(f"a pass lost running requests: {after} of {before} are left")

    def _discard(self, draft: Draft) -> None:
        """Unbind a draft that is not executed.

        Its order of the running requests is kept: a pass that has sorted them looks only at new ones.
        """
        self._kv.rollback(draft)
        running = self._table.running
        if len(draft.running) == len(running) and set(draft.running) == set(running):
            self._table.set_order(draft.running)

    def _verify_and_admit(self, draft: Draft) -> None:
        try:
            verify_bound(draft)
            for chunk in draft.admitted():
                state, is_first = chunk.state, chunk.state.scheduled_s is None
                self._table.admit(state, chunk.start, draft.now_s)
                self._kv.admitted(chunk, again=not is_first)
                if is_first:
                    self._events.emit(RequestScheduled(state.request_id, chunk.start, draft.now_s))
        except SageError:
            self._kv.rollback(draft)
            raise

    def _freeze(self, draft: Draft, num_sent: int = 0) -> PlannedStep:
        """The plan of the draft. The backend has already been sent the first `num_sent` of the left rows."""
        table = self._table
        draft.decode_indices = (
            table.decodes.indices_without(draft.skipped_decodes) if draft.skipped_decodes else None
        )
        plan = freeze(draft, tuple(table.left_rows[num_sent:]), self._kv, table.decodes)
        members, indices = table.decodes.states, draft.decode_indices
        return PlannedStep(draft, plan, list(members) if indices is None else [members[i] for i in indices])

    def _put_off(self, draft: Draft, state: RequestState, reason: str) -> None:
        draft.hold(state)
        draft.record("bind", state, "wait", reason)

    def _put_off_stale(self, draft: Draft) -> None:
        """Put off requests whose prefix hit holds no longer."""
        for chunk in list(draft.admitted()):
            bound = chunk.state.request_id in draft.bound
            if not bound and chunk.hit is not None and not self._kv.is_current(chunk.hit):
                self._put_off(draft, chunk.state, "the request whose last block it would copy has left")

    def _make_way(self, error: CapacityError) -> MustLeave | None:
        """Nothing could be bound though the passes expected it, since guarantees of others are in the way.

        Of several running requests the last one leaves. For a request that is alone, guaranteed blocks in the
        cache are evicted where its ceilings are in the way; otherwise it can never go on.
        """
        state, running = self._table.states[error.request_id or ""], self._table.running
        if len(running) > 1:
            return MustLeave(running[-1])
        is_alone = not running or running[0] is state
        if is_alone and not self._kv.make_room_below_ceilings(state, error.num_blocks):
            return MustLeave(state, f"out of KV memory: {error}")
        return None
