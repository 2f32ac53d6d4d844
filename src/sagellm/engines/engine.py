"""`Engine`: our loop around any backend. A step is three calls: plan, execute, commit.

plan     builder -> passes -> preempt -> kv.bind -> verify -> freeze
execute  the backend computes; the only call with tensors
commit   requests move forward: tokens are appended, what is computed enters the index, what ended is released
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import CapacityError, PlanError, RequestError, SageError
from sagellm.core.events import (
    EventBus,
    RequestPreempted,
    RequestQueued,
    RequestReceived,
    RequestScheduled,
    StepDone,
)
from sagellm.core.kv_hints import HintOutcome, KvHintsEnvelope
from sagellm.core.plan import Chunk, Draft, ExecutionPlan, RequestState, StepResult
from sagellm.core.protocols.engine import EngineStats, InferenceBackend
from sagellm.core.protocols.eviction import EvictionPolicy
from sagellm.core.protocols.scheduler_ir import NO_STEP, StepFacts
from sagellm.core.types import (
    CapabilityDescriptor,
    FinishReason,
    Namespace,
    Request,
    RequestOutput,
    RequestStatus,
    SamplingParams,
    TokenLogprob,
    Tokens,
)
from sagellm.engines._commit import Committer
from sagellm.engines._compaction import compact
from sagellm.engines._door import check_quota, check_request
from sagellm.engines._leap import Leap, LeapingBackend, can_leap, leap
from sagellm.engines._outcome import StepOutputs, finished, output_of
from sagellm.engines._overlap import Flight, Pipeline, plan_ahead
from sagellm.engines._recovery import Recovery
from sagellm.engines._roster import Roster
from sagellm.kvmgr.manager import KVCacheManager
from sagellm.kvmgr.scheduler_ir import BaseSchedulerIR, DecodeBatch, freeze, verify_bound

log = logging.getLogger("sagellm.engine")


class Engine:
    """Implements `EngineCore`: continuous batching over one backend. Synchronous; one thread owns it. With
    `overlap` the backend has a thread, and steps are planned while others compute, with the same tokens.

    A backend that runs out of memory is met with a smaller token budget. After any other failure the requests
    of the step run one at a time until each has either taken its step or failed alone, which ends it with
    `FinishReason.ERROR`; the loop goes on.
    """

    def __init__(
        self,
        backend: InferenceBackend,
        kv: KVCacheManager,
        scheduler: BaseSchedulerIR,
        *,
        max_batched_tokens: int = 2048,
        overlap: bool = False,
        clock: Clock | None = None,
        events: EventBus | None = None,
    ) -> None:
        if max_batched_tokens < 1:
            raise ValueError(f"max_batched_tokens must be at least 1, got {max_batched_tokens}")
        self.backend = backend
        self.kv = kv
        self.scheduler = scheduler
        self.clock = clock or MonotonicClock()
        self.events = events or EventBus()
        self.max_batched_tokens = max_batched_tokens
        self._capability = backend.capability()
        self.max_num_seqs = self._capability.max_num_seqs
        self.max_model_len = min(self._capability.max_model_len, kv.pool.total_blocks * kv.block_size)
        self.last_plan: ExecutionPlan | None = None
        self.last_step = NO_STEP
        self._decodes = DecodeBatch(self._capability.vocab_size, kv.block_size)
        self._roster = Roster(self.max_num_seqs, self._decodes)
        self._recovery = Recovery(max_batched_tokens)
        self._outputs = StepOutputs()
        self._leaping = backend if isinstance(backend, LeapingBackend) else None
        self._pipeline = Pipeline(backend) if overlap else None
        self._committer = Committer(
            self._roster,
            kv,
            self._end,
            vocab_size=self._capability.vocab_size,
            max_model_len=self.max_model_len,
        )
        self._num_steps = 0
        self._num_preemptions = 0

    # -- requests in and out

    def add(self, request: Request) -> None:
        if request.request_id in self._roster.states:
            raise RequestError(f"request id {request.request_id!r} is in use: send another", "request_id")
        check_request(request, self._capability.vocab_size, self.max_model_len)
        check_quota(request, self.kv.max_blocks(request.account) * self.kv.block_size)
        self._roster.add(RequestState.of(request))
        now_s = self.clock.now()
        if self.events.wants(RequestReceived):
            self.events.emit(RequestReceived(request, now_s))
        self.events.emit(RequestQueued(request.request_id, len(request.tokens), now_s))

    def fork(self, request_id: str, new_id: str, params: SamplingParams | None = None) -> None:
        """A second request goes on from where a running one stands, sharing its KV: whole blocks as they are,
        the last one as a copy. Its prompt is all that the first has so far."""
        self._settle()
        parent = self._roster.states.get(request_id)
        if parent is None or parent.status is not RequestStatus.RUNNING:
            raise RequestError(f"cannot fork {request_id!r}: no request of that id is running", "request_id")
        group = parent.request.group or f"fork of {request_id}"
        self.add(
            replace(
                parent.request,
                request_id=new_id,
                tokens=Tokens(parent.tokens),
                params=params or parent.request.params,
                arrival_s=self.clock.now(),
                group=group,
            )
        )
        self.kv.fork(parent, group)

    def abort(self, request_id: str) -> bool:
        state = self._roster.states.get(request_id)
        if state is None:
            return False
        self._end(state, FinishReason.ABORT)
        if not self._roster.states:  # no step will follow to tell of it
            self._emit_step(ExecutionPlan(self._num_steps), self.clock.now())
        return True

    def has_work(self) -> bool:
        flies = self._pipeline is not None and self._pipeline.flight is not None
        return bool(flies or self._roster.states or self._outputs)

    def stats(self) -> EngineStats:
        states, metrics = self.kv.block_states(), self.kv.metrics
        reuse = metrics.snapshot() if metrics is not None else None
        misses = self.kv.misses.snapshot() if self.kv.misses is not None else None
        running, waiting = len(self._roster.running), len(self._roster.waiting)
        preemptions, steps = self._num_preemptions, self._num_steps
        return EngineStats(running, waiting, *states, preemptions, steps, reuse, misses)

    def capability(self) -> CapabilityDescriptor:
        return self._capability

    @property
    def num_free_rows(self) -> int:
        return len(self._roster.free_rows)

    def pin_prefix(self, tokens: Tokens, namespace: Namespace) -> Callable[[], None]:
        hit = self.kv.pin_prefix(tokens, namespace)
        return lambda: self.kv.unpin_prefix(hit)

    def hint(self, envelope: KvHintsEnvelope, namespace: Namespace) -> Sequence[HintOutcome]:
        return self.kv.hints.apply(envelope, namespace)

    def set_policy(self, factory: Callable[[], EvictionPolicy]) -> None:
        self.kv.index.set_policy(factory)

    def compact(self, max_copies: int | None = None) -> int:
        """Move blocks between two steps so that free ones stand together; returns how many moved. The backend
        copies them now; if that fails, nothing has moved."""
        self._settle()
        return compact(self.backend, self.kv, self._roster.running, self._num_steps, max_copies)

    def check(self) -> None:
        """Raise `BookkeepingError` where requests, batch and KV disagree."""
        self.kv.check()
        early = self._pipeline.grown_ahead() if self._pipeline is not None else {}
        self._roster.check(lambda name: self.kv.num_slots(name) - early.get(name, 0) * self.kv.block_size)

    def close(self) -> None:
        for request_id in list(self._roster.states):
            self.abort(request_id)
        if self._pipeline is not None:
            self._pipeline.close()
        self.backend.close()

    # -- the loop

    def step(self) -> Sequence[RequestOutput]:
        if self._pipeline is not None:
            return self._step_overlapped(self._pipeline)
        if not self._roster.states:
            return self._take_outputs()
        began_s = self.clock.now()
        draft = self._schedule()
        plan = self._plan(draft)
        if not plan.is_empty:
            result = self._execute(draft, plan, lambda: self.backend.execute(plan))
            if result is not None:
                self._committer.commit(draft, plan, result, self._outputs, self.clock.now())
        else:
            self._recovery.relax()
        self._num_steps += 1
        self._emit_step(plan, began_s)
        return self._take_outputs()

    def _step_overlapped(self, pipeline: Pipeline) -> Sequence[RequestOutput]:
        """One step lands; the next one computes by then, if it could be planned ahead."""
        flight = pipeline.flight
        if flight is None:
            if not self._roster.states:
                return self._take_outputs()
            began_s = self.clock.now()
            draft = self._schedule()
            plan = self._plan(draft)
            if plan.is_empty:
                self._recovery.relax()
                self._num_steps += 1
                self._emit_step(plan, began_s)
                return self._take_outputs()
            flight = pipeline.submit(draft, plan, began_s)
        ahead = plan_ahead(flight, self._roster, self.kv, self.scheduler, self._recovery.token_budget)
        self._land(pipeline, flight, ahead)
        return self._take_outputs()

    def _land(
        self, pipeline: Pipeline, flight: Flight, ahead: tuple[Draft, ExecutionPlan] | None = None
    ) -> None:
        """Wait for a step, let the next one take off, and commit the first meanwhile."""
        pipeline.flight = None
        draft, plan = flight.draft, flight.plan
        result = self._execute(draft, plan, flight.future.result, ahead[0] if ahead else None)
        if result is not None:
            if ahead is not None:
                pipeline.submit(*ahead, self.clock.now())
            plan, result = flight.settle(result, self._decodes)
            self._committer.commit(draft, plan, result, self._outputs, self.clock.now())
        self.last_plan = plan
        self._num_steps += 1
        self._emit_step(plan, flight.began_s)

    def _settle(self) -> None:
        """Nothing is in flight any more."""
        if self._pipeline is not None and self._pipeline.flight is not None:
            self._land(self._pipeline, self._pipeline.flight)
            self._outputs.keep()

    def leap(self, until_s: float) -> Leap | None:
        """The steps that would only decode and begin before `until_s`, at once, on a backend that foresees
        them (a simulated one); None where the next is another. Their tokens are told to nobody."""
        calm = self._recovery.token_budget >= len(self._decodes) and not self._outputs
        if self._leaping is None or not (calm and can_leap(self.scheduler, self.kv, self._roster)):
            return None
        done = leap(self._leaping, self.kv, self._roster, self.clock, self._num_steps, until_s)
        if done is not None:
            self._num_steps += done.num_steps
            self.last_step = StepFacts(done.durations_s[-1], done.num_decodes, 0)
        return done

    def draft(self) -> Draft:
        """What the next step could do, with the passes' decisions in it; nothing is bound, nothing moves."""
        return self.scheduler.run(self._build(), self)

    def bind_early(self, draft: Draft) -> bool:
        return self.kv.bind_early(draft)

    def _build(self) -> Draft:
        roster = self._roster
        return self.scheduler.builder.draft(
            self._num_steps,
            self.clock.now(),
            self._recovery.token_budget,
            roster.running,
            roster.waiting.values(),
            self._decodes,
            roster.prefilling.values(),
            roster.num_new_running,
        )

    def _schedule(self) -> Draft:
        draft = self._build()
        draft.may_bind = not self._recovery.isolates
        try:
            return self.scheduler.run(draft, self)
        except Exception:
            self.kv.rollback(draft)
            raise

    def _plan(self, draft: Draft) -> ExecutionPlan:
        roster = self._roster
        if len(draft.running) != len(roster.running):
            raise PlanError(
                f"a pass lost running requests: {len(draft.running)} of {len(roster.running)} are left"
            )
        roster.running[:] = draft.running
        roster.num_new_running = 0
        self._recovery.isolate(draft)
        for state in draft.preempted:
            self._preempt(state)
            draft.out.pop(state.request_id, None)
        for request_id, reason in draft.rejected.items():
            self._end(roster.states[request_id], FinishReason.ERROR, error=reason)
            draft.out.pop(request_id, None)
        self._bind(draft)
        try:
            verify_bound(draft)
            self._enter(draft)
        except SageError:
            self.kv.rollback(draft)
            raise
        draft.places = self._decodes.places(draft.out) if draft.out else None
        plan = self.last_plan = freeze(draft, tuple(roster.left), self.kv, self._decodes)
        return plan

    def _bind(self, draft: Draft) -> None:
        """Bind what can be bound: who counted on blocks that others got first waits for the next step."""
        for chunk in list(draft.admitted()):
            bound = chunk.state.request_id in draft.bound
            if not bound and chunk.hit is not None and not self.kv.is_current(chunk.hit):
                self._put_off(draft, chunk, "the request whose last block it would copy has left")
        short: list[tuple[RequestState, str]] = []
        while draft.num_scheduled:
            try:
                self.kv.bind(draft)
                return
            except CapacityError as error:
                named = self._roster.states.get(error.request_id or "")
                if named is not None and named.decoding:
                    short.append((named, str(error)))
                    draft.hold(named)
                    draft.say("bind", named, "wait", str(error))
                    continue
                chunk = draft.chunks.get(error.request_id or "") or next(reversed(draft.chunks.values()))
                short.append((chunk.state, str(error)))
                admitted = list(draft.admitted())
                behind = admitted[admitted.index(chunk) :] if chunk in admitted else [chunk]
                for one in behind:  # nobody overtakes whom memory keeps waiting
                    self._put_off(draft, one, str(error))
        if short:
            self._make_way(*short[0])

    def _make_way(self, state: RequestState, reason: str) -> None:
        """Nothing could be bound, though the passes thought so (what is guaranteed to others is in the way):
        the last of several goes back to the queue, and who is alone can never go on."""
        running = self._roster.running
        if len(running) > 1:
            self._preempt(running[-1])
        elif not running or running[0] is state:
            self._end(state, FinishReason.ERROR, error=f"out of KV memory: {reason}")

    def _put_off(self, draft: Draft, chunk: Chunk, reason: str) -> None:
        del draft.chunks[chunk.state.request_id]
        draft.say("bind", chunk.state, "wait", reason)

    def _enter(self, draft: Draft) -> None:
        """Admitted requests get rows; their state becomes that of a running one."""
        for chunk in draft.admitted():
            state = chunk.state
            self._roster.enter(state)
            state.num_computed = chunk.start
            self.kv.admitted(chunk, again=state.scheduled_s is not None)
            if state.scheduled_s is None:
                state.scheduled_s, state.num_cached = draft.now_s, chunk.start
                self.events.emit(RequestScheduled(state.request_id, chunk.start, draft.now_s))

    def _execute(
        self,
        draft: Draft,
        plan: ExecutionPlan,
        run: Callable[[], StepResult],
        ahead: Draft | None = None,
    ) -> StepResult | None:
        """The backend's answer, or None after a failure that was dealt with; what was planned `ahead` is void
        then."""
        began_s = self.clock.now()
        try:
            result = run()
        except CapacityError as error:
            self._undo(draft, ahead)
            self._end_all(self._recovery.short_of_memory(draft, error), str(error))
            return None
        except Exception as error:
            log.exception("step %d with %d requests failed", plan.step, draft.num_scheduled)
            self._undo(draft, ahead)
            self._end_all(self._recovery.failed(draft), f"the backend failed: {error}")
            return None
        spent_s = self.clock.now() - began_s
        self.last_step = StepFacts(spent_s, len(plan.decode_rows), plan.num_prefill_tokens)
        del self._roster.left[: len(plan.left)]
        self._recovery.succeeded()
        return result

    def _end_all(self, states: Iterable[RequestState], error: str) -> None:
        for state in states:
            self._end(state, FinishReason.ERROR, error=error)

    def _undo(self, draft: Draft, ahead: Draft | None) -> None:
        """After a failed execute: the books are as before the bind, admitted requests wait again."""
        if ahead is not None:
            self.kv.rollback(ahead)
        self.kv.rollback(draft)
        draft.decodes = self._decodes  # as it is now
        for chunk in reversed(list(draft.admitted())):
            self._roster.leave(chunk.state)
            self._roster.wait_again(chunk.state)

    # -- leaving the batch

    def _preempt(self, state: RequestState) -> None:
        self.events.emit(RequestPreempted(state.request_id, state.num_computed, self.clock.now()))
        self.kv.release(state, ended=False)
        self._roster.leave(state)
        self._roster.wait_again(state)
        state.num_preemptions += 1
        self._num_preemptions += 1

    def _end(
        self,
        state: RequestState,
        reason: FinishReason,
        token: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        *,
        error: str | None = None,
        keep: bool = True,
    ) -> None:
        """`keep`: whether what it computed may serve others."""
        if state.status is RequestStatus.RUNNING:
            self.kv.release(state, keep=keep)
        self._roster.end(state)
        if reason is not FinishReason.ABORT:
            self._outputs.append(output_of(state, token, logprobs, reason, error))
        self.events.emit(finished(state, reason, self.clock.now()))

    def _take_outputs(self) -> StepOutputs:
        outputs, self._outputs = self._outputs, StepOutputs()
        return outputs

    def _emit_step(self, plan: ExecutionPlan, began_s: float) -> None:
        if self.events.wants(StepDone):
            running, waiting = len(self._roster.running), len(self._roster.waiting)
            prompts, decodes = plan.num_prefill_tokens, len(plan.decode_rows)
            spent_s = self.clock.now() - began_s
            self.events.emit(StepDone(plan.step, prompts, decodes, running, waiting, spent_s))
