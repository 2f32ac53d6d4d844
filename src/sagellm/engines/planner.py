"""`Planner`: from the requests to a frozen plan, by passes and a bind."""

from __future__ import annotations

from typing import NamedTuple

from sagellm.core.binding import Binding
from sagellm.core.clock import Clock
from sagellm.core.errors import CapacityError, PlanError, SageError
from sagellm.core.events import EventBus, RequestScheduled
from sagellm.core.plan import Chunk, Draft, ExecutionPlan, RequestState, StepStart
from sagellm.core.protocols.scheduler_ir import SchedulingView
from sagellm.engines.approximate import ApproximateReuse
from sagellm.engines.kv_waits import KVWaits
from sagellm.engines.overlap import InFlightStep, PlannedStep
from sagellm.engines.recovery import Recovery
from sagellm.engines.request_table import RequestTable
from sagellm.engines.speculation import Speculation
from sagellm.kvmgr.manager import KVCacheManager
from sagellm.kvmgr.scheduler_ir import PassPipeline, freeze, verify_bound, verify_proposals


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
        speculation: Speculation | None = None,
        kv_waits: KVWaits | None = None,
        approximate: ApproximateReuse | None = None,
        *,
        clock: Clock,
        events: EventBus,
    ) -> None:
        self._table = table
        self._kv = kv
        self._scheduler = scheduler
        self._recovery = recovery
        self._speculation = speculation
        self._kv_waits = kv_waits
        self._approximate = approximate
        self._clock = clock
        self._events = events
        self._bindable_early: Binding | None = None
        """The binding of the draft that passes edit now, if they may have blocks bound."""

    def draft(self, step: int) -> Draft:
        """The draft that the first pass sees. Every running request computes all it can, none is admitted:
        a prompt that is not complete has one chunk with all its uncomputed tokens, up to its limit."""
        table = self._table
        draft = Draft(
            StepStart(step, self._clock.now(), table.num_new_running),
            self._recovery.token_budget,
            table.running.copy(),
            table.plannable(),
            {s.request_id: Chunk(s, s.num_computed, s.num_uncomputed) for s in table.prefilling.values()},
            table.decodes,
            num_draft_tokens=0 if self._speculation is None else self._speculation.num_tokens,
        )
        self._cut_to_limits(draft)
        return draft

    def _cut_to_limits(self, draft: Draft) -> None:
        """Let no request compute tokens whose KV comes from elsewhere (`RequestState.compute_until`).

        A request that has computed all before them is held. If the cache has more than that by now, a request
        is admitted as usual, without a limit.
        """
        for name, state in list(self._table.limited.items()):
            chunk, stop = draft.chunks.get(name), state.compute_until
            if chunk is None or stop is None:
                continue
            if chunk.start < stop:
                chunk.num_tokens = min(chunk.num_tokens, stop - chunk.start)
            elif chunk.admits:
                self._table.limit(state, None)
            else:
                draft.hold(state)
                draft.record("tiers", state, "hold", "KV of its next tokens is on its way")

    def _plan_approximate(self, draft: Draft) -> None:
        """Look for approximate reuse of admitted requests, if no tier loads their tail."""
        if self._approximate is None:
            return
        for chunk in draft.admitted():
            if self._kv_waits is not None and self._kv_waits.loads_tail_of(chunk.state):
                self._approximate.forget(chunk.state)
            else:
                self._approximate.plan(chunk)

    def decide(self, step: int, view: SchedulingView) -> Binding:
        """A draft with the decisions of all passes, in its binding. Raises what a pass raises, and
        `PlanError` for decisions that break the rules; then nothing is bound."""
        while True:
            binding = Binding(self.draft(step))
            self._run_passes(binding, view, may_bind_early=not self._recovery.isolates)
            if self._kv_waits is None or not self._kv_waits.hold_back(binding, start=True):
                break
            self.discard(binding)
        self._plan_approximate(binding.draft)
        self._table.set_order(binding.draft.running)
        self._recovery.isolate(binding.draft)
        return binding

    def bind_early(self, draft: Draft) -> bool:
        """Bind what the passes have decided so far; see `SchedulingView.bind_early`.

        Not with tiers: they are asked for what a draft admits before any of it is bound. Nor where a request
        has a limit, to which its chunk is cut behind the passes, or may get one.
        """
        may_bind = self._kv_waits is None and self._approximate is None and not self._table.limited
        binding = self._bindable_early if may_bind else None
        if binding is None or binding.draft is not draft or draft.preempted:
            return False
        try:
            self._kv.bind(binding, early=True)
        except CapacityError:
            return False
        return True

    def bind(self, binding: Binding) -> MustLeave | None:
        """Bind the blocks of the step; preempted and rejected requests have left.

        Running requests come first. Where a request lacks blocks that guarantees keep for others, the
        requests admitted behind it are put off to a later step, since they may hold what it lacks; then it is
        put off itself. If nothing is left to bind for that reason, returns a request that must leave.
        """
        draft = binding.draft
        for state in draft.preempted:
            draft.skipped_decodes.pop(state.request_id, None)
        for request_id in draft.rejected:
            draft.skipped_decodes.pop(request_id, None)
        self._put_off_stale(binding)
        short: CapacityError | None = None
        while draft.num_scheduled:
            try:
                self._kv.bind(binding)
            except CapacityError as error:
                state, reason = self._table.states[error.request_id or ""], str(error)
                admitted = [c.state for c in draft.admitted() if c.state.request_id not in binding.chunks]
                index = admitted.index(state) if state in admitted else -1
                behind = admitted[index + 1 :]
                if not behind:
                    short = short or error
                for put_off in behind or [state]:
                    self._put_off(draft, put_off, reason)
            else:
                self._propose(binding)
                return None
        must_leave = None if short is None else self._make_way(short)
        if must_leave is not None:
            draft.skipped_decodes.pop(must_leave.state.request_id, None)
        return must_leave

    def seal(self, binding: Binding, num_sent: int = 0) -> ExecutionPlan:
        """Verify the bound draft, admit its requests into rows, and freeze it. The backend has already been
        sent the first `num_sent` of the rows that requests have left."""
        draft, table = binding.draft, self._table
        try:
            verify_bound(binding)
            if draft.proposals:
                verify_proposals(draft, table.decodes.vocab_size, self._kv.num_slots)
            for chunk in draft.admitted():
                state, is_first = chunk.state, chunk.state.scheduled_s is None
                table.admit(state, chunk.start, draft.step.now_s)
                self._kv.admitted(chunk, again=not is_first)
                if self._approximate is not None:
                    self._approximate.admitted(chunk)
                if is_first:
                    self._events.emit(RequestScheduled(state.request_id, chunk.start, draft.step.now_s))
        except SageError:
            self._kv.rollback(binding)
            raise
        if draft.skipped_decodes:
            binding.decode_indices = table.decodes.indices_without(draft.skipped_decodes)
        return freeze(binding, tuple(table.left_rows[num_sent:]), self._kv, table.decodes)

    def plan_ahead(self, in_flight: InFlightStep, view: SchedulingView) -> PlannedStep | None:
        """Plan the step behind the one in flight, whose result is not known yet.

        Returns None where a request would have to leave the batch or memory is short; where all layers have
        a sliding window, since blocks behind it would be given up too early; where a prompt that ends in the
        step in flight is shared with its group; behind a step with proposed tokens, of which it is not known
        how many are accepted; and where a proposer is asked, which has to see the tokens. Then nothing has
        changed but evictions, the order of the running requests, and what `foresee` has published.
        """
        draft, table = in_flight.binding.draft, self._table
        ends_shared = any(c.samples and c.state.request.group is not None for c in draft.chunks.values())
        if self._kv.window is not None or ends_shared or draft.proposals or self._asks_behind(in_flight):
            return None
        in_flight.drop_finished(table.decodes)
        chunks, indices = list(draft.chunks.values()), in_flight.binding.decode_indices
        self._kv.foresee(chunks)
        with table.as_if_executed(chunks, indices, self._kv.num_slots) as full_length:
            binding = Binding(self.draft(in_flight.plan.step + 1))
            draft = binding.draft
            draft.skipped_decodes = {state.request_id: state for state in full_length}
            try:
                self._run_passes(binding, view, may_bind_early=True)
                if self._kv_waits is not None and self._kv_waits.hold_back(binding, start=False):
                    raise CapacityError("KV comes from tiers")
                self._plan_approximate(draft)
                self._put_off_stale(binding)
                if draft.preempted or draft.rejected or not draft.num_scheduled:
                    raise CapacityError("requests would have to leave")
                self._kv.bind(binding)
                table.set_order(draft.running)
                plan = self.seal(binding, num_sent=len(in_flight.plan.left))
            except SageError:
                self.discard(binding)
                return None
            return PlannedStep.of(binding, plan, table.decodes)

    def _asks_behind(self, in_flight: InFlightStep) -> bool:
        """Whether a proposer is asked behind the step in flight.

        What prompts the next step has is not known yet. There are likely some if this one has.
        """
        speculation, chunks = self._speculation, in_flight.binding.draft.chunks.values()
        num_rows = len(self._table.decodes) + sum(chunk.samples for chunk in chunks)
        if speculation is None or not speculation.is_on or not num_rows:
            return False
        return speculation.should_ask(num_rows, in_flight.plan.num_prefill_tokens)

    def _run_passes(self, binding: Binding, view: SchedulingView, *, may_bind_early: bool) -> None:
        self._bindable_early = binding if may_bind_early else None
        try:
            self._scheduler.run(binding.draft, view, binding)
            before, after = len(self._table.running), len(binding.draft.running)
            if before != after:
                raise PlanError(f"a pass lost running requests: {after} of {before} are left")
            self._cut_to_limits(binding.draft)
        except Exception:
            self.discard(binding)
            raise
        finally:
            self._bindable_early = None

    def discard(self, binding: Binding) -> None:
        """Undo a binding that is not executed. The draft's order of the running requests is kept: a pass that
        has sorted them looks only at new ones."""
        self._kv.rollback(binding)
        draft, running = binding.draft, self._table.running
        if len(draft.running) == len(running) and set(draft.running) == set(running):
            self._table.set_order(draft.running)

    def _propose(self, binding: Binding) -> None:
        """Fill the proposals of a bound draft, unless a failure is being isolated."""
        if self._speculation is None or not self._speculation.is_on or self._recovery.isolates:
            return
        try:
            self._speculation.propose(binding, self._table.decodes, self._kv)
        except Exception:
            self._kv.rollback(binding)
            raise

    def _put_off(self, draft: Draft, state: RequestState, reason: str) -> None:
        draft.hold(state)
        draft.record("bind", state, "wait", reason)

    def _put_off_stale(self, binding: Binding) -> None:
        """Put off requests whose prefix hit holds no longer."""
        draft = binding.draft
        for chunk in list(draft.admitted()):
            bound = chunk.state.request_id in binding.chunks
            if not bound and chunk.hit is not None and not self._kv.quotes.is_current(chunk.hit):
                self._put_off(draft, chunk.state, "the request whose last block it would copy has left")

    def _make_way(self, error: CapacityError) -> MustLeave | None:
        """Choose a request that must leave when nothing could be bound.

        Passes do not count the guarantees of others, which were in the way.

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
