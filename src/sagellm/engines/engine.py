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
from sagellm.core.errors import CapacityError, RequestError
from sagellm.core.events import (
    EventBus,
    RequestPreempted,
    RequestQueued,
    RequestReceived,
    StepDone,
)
from sagellm.core.kv_hints import HintOutcome, KVHintsEnvelope
from sagellm.core.plan import Draft, ExecutionPlan, RequestState, StepResult
from sagellm.core.protocols.engine import EngineDiagnostics, EngineStats, InferenceBackend, PinnedPrefix
from sagellm.core.protocols.eviction import EvictionPolicy
from sagellm.core.protocols.scheduler_ir import NO_STEP, SchedulerPass, StepFacts
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
from sagellm.engines._outcome import StepOutputs, finished, output_of
from sagellm.engines._overlap import Ahead, Flight, Pipeline
from sagellm.engines._planner import Planner
from sagellm.engines._recovery import Recovery
from sagellm.engines._request_table import RequestTable
from sagellm.kvmgr.manager import KVCacheManager
from sagellm.kvmgr.scheduler_ir import DecodeBatch, PassPipeline

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
        scheduler: PassPipeline,
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
        self._request_table = RequestTable(self.max_num_seqs, self._decodes)
        self._recovery = Recovery(max_batched_tokens)
        self._outputs = StepOutputs()
        self._committer = Committer(
            self._request_table,
            kv,
            self._end,
            vocab_size=self._capability.vocab_size,
            max_model_len=self.max_model_len,
        )
        self._planner = Planner(
            self._request_table,
            kv,
            scheduler,
            self._recovery,
            preempt=self._preempt,
            end=self._end,
            clock=self.clock,
            events=self.events,
        )
        self._pipeline: Pipeline | None = None
        if overlap:
            self._pipeline = Pipeline(
                self._compute, self._planner, self._request_table, kv, self.max_model_len
            )
        self._num_steps = 0
        self._num_preemptions = 0

    # -- requests in and out

    def add(self, request: Request) -> None:
        if request.request_id in self._request_table.states:
            raise RequestError(f"request id {request.request_id!r} is in use: send another", "request_id")
        check_request(request, self._capability, self.max_model_len)
        check_quota(request, self.kv.max_blocks(request.account) * self.kv.block_size)
        self._request_table.add(RequestState.of(request))
        now_s = self.clock.now()
        if self.events.wants(RequestReceived):
            self.events.emit(RequestReceived(request, now_s))
        self.events.emit(RequestQueued(request.request_id, len(request.tokens), now_s))

    def fork(self, request_id: str, new_id: str, params: SamplingParams | None = None) -> None:
        """A second request goes on from where a running one stands, sharing its KV: whole blocks as they are,
        the last one as a copy. Its prompt is all that the first has so far; it is not scored again."""
        self._settle()
        parent = self._request_table.states.get(request_id)
        if parent is None or parent.status is not RequestStatus.RUNNING:
            raise RequestError(f"cannot fork {request_id!r}: no request of that id is running", "request_id")
        group = parent.request.group or f"fork of {request_id}"
        self.add(
            replace(
                parent.request,
                request_id=new_id,
                tokens=Tokens(parent.tokens),
                params=params or replace(parent.request.params, prompt_logprobs=None),
                arrival_s=self.clock.now(),
                group=group,
            )
        )
        self.kv.fork(parent, group)

    def abort(self, request_id: str) -> bool:
        state = self._request_table.states.get(request_id)
        if state is None:
            return False
        if self.kv.is_published(request_id):  # the step that computes it may still fail
            self._settle()
        if state.status is not RequestStatus.FINISHED:
            self._end(state, FinishReason.ABORT)
        self._outputs.drop(request_id)
        if not self._request_table.states:  # no step will follow to tell of it
            self._emit_step(ExecutionPlan(self._num_steps), self.clock.now())
        return True

    def has_work(self) -> bool:
        flies = self._pipeline is not None and self._pipeline.flight is not None
        return bool(flies or self._request_table.states or self._outputs)

    def stats(self) -> EngineStats:
        states, metrics = self.kv.block_states(), self.kv.metrics
        reuse = metrics.snapshot() if metrics is not None else None
        misses = self.kv.misses.snapshot() if self.kv.misses is not None else None
        running, waiting = len(self._request_table.running), len(self._request_table.waiting)
        preemptions, steps = self._num_preemptions, self._num_steps
        saved = self.kv.swap.num_used if self.kv.swap is not None else 0
        return EngineStats(running, waiting, *states, preemptions, steps, reuse, misses, saved)

    def diagnostics(self) -> EngineDiagnostics:
        kv, fragmentation = self.kv, self.kv.fragmentation()
        return EngineDiagnostics(
            evicted_blocks=dict(kv.room.num_evicted),
            internal_fragmentation=fragmentation.internal,
            external_fragmentation=fragmentation.external,
            num_pinned_prefixes=kv.pins.num_prefixes,
            num_pinned_blocks=kv.pins.num_blocks,
            pass_time_s=dict(self.scheduler.pass_time_s),
            reuse_by_tenant={} if kv.metrics is None else kv.metrics.by_tenant(),
        )

    def capability(self) -> CapabilityDescriptor:
        return self._capability

    @property
    def num_free_rows(self) -> int:
        return len(self._request_table.free_rows)

    def pin_prefix(self, tokens: Tokens, namespace: Namespace) -> PinnedPrefix:
        hit = self.kv.pin_prefix(tokens, namespace)
        return PinnedPrefix(hit.num_tokens, hit.num_blocks, lambda: self.kv.unpin_prefix(hit))

    def clear_cache(self) -> int:
        return self.kv.clear_cache()

    def hint(self, envelope: KVHintsEnvelope, namespace: Namespace) -> Sequence[HintOutcome]:
        return self.kv.hints.apply(envelope, namespace)

    def set_policy(self, factory: Callable[[], EvictionPolicy]) -> None:
        self.kv.index.set_policy(factory)

    def set_passes(self, passes: Sequence[SchedulerPass]) -> None:
        self.scheduler.use(passes)

    def compact(self, max_copies: int | None = None) -> int:
        """Move blocks between two steps so that free ones stand together; returns how many moved. The backend
        copies them now; if that fails, nothing has moved."""
        self._settle()
        return compact(self.backend, self.kv, self._request_table.running, self._num_steps, max_copies)

    def check(self) -> None:
        """Raise `BookkeepingError` where requests, batch and KV disagree."""
        self.kv.check()
        early = self._pipeline.grown_ahead() if self._pipeline is not None else ()
        self._request_table.check(lambda name: self.kv.num_slots(name) - (name in early) * self.kv.block_size)

    def close(self) -> None:
        for request_id in list(self._request_table.states):
            self.abort(request_id)
        if self._pipeline is not None:
            self._pipeline.close()
        self.backend.close()

    # -- the loop

    def step(self) -> Sequence[RequestOutput]:
        if self._pipeline is not None:
            return self._step_overlapped(self._pipeline)
        if not self._request_table.states:
            return self._take_outputs()
        began_s = self.clock.now()
        draft, plan = self._planner.plan(self._num_steps, self)
        self.last_plan = plan
        if not plan.is_empty:
            result = self._execute(draft, plan, lambda: self._compute(plan))
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
            if not self._request_table.states:
                return self._take_outputs()
            began_s = self.clock.now()
            draft, plan = self._planner.plan(self._num_steps, self)
            self.last_plan = plan
            if plan.is_empty:
                self._recovery.relax()
                self._num_steps += 1
                self._emit_step(plan, began_s)
                return self._take_outputs()
            flight = pipeline.submit(pipeline.bound(draft, plan), began_s)
        self._land(pipeline, flight, None if self._recovery.isolates else pipeline.plan_ahead(self))
        return self._take_outputs()

    def _land(self, pipeline: Pipeline, flight: Flight, ahead: Ahead | None = None) -> None:
        """Wait for a step, let the next one take off, and commit the first meanwhile."""
        pipeline.flight = None
        flight.adjust(self._decodes)
        draft, plan = flight.draft, flight.plan
        result = self._execute(draft, plan, flight.future.result, ahead.draft if ahead else None)
        if result is not None:
            if ahead is not None:
                pipeline.submit(ahead, self.clock.now())
            plan, result = flight.settle(result)
            now_s, grown = self.clock.now(), pipeline.grown_ahead()
            self._committer.commit(draft, plan, result, self._outputs, now_s, grown)
        self.last_plan = plan
        self._num_steps += 1
        self._emit_step(plan, flight.began_s)

    def _settle(self) -> None:
        """Nothing is in flight any more."""
        if self._pipeline is not None and self._pipeline.flight is not None:
            self._land(self._pipeline, self._pipeline.flight)
            self._outputs.keep()

    def draft(self) -> Draft:
        """What the next step could do, with the passes' decisions in it; nothing is bound, nothing moves. A
        step in flight counts as not begun."""
        return self.scheduler.run(self._planner.draft(self._num_steps), self)

    def bind_early(self, draft: Draft) -> bool:
        return self.kv.bind_early(draft)

    def _compute(self, plan: ExecutionPlan) -> tuple[StepResult, float]:
        """The backend's answer, and the seconds that it took; on the backend's thread, if it has one."""
        began_s = self.clock.now()
        return self.backend.execute(plan), self.clock.now() - began_s

    def _execute(
        self,
        draft: Draft,
        plan: ExecutionPlan,
        run: Callable[[], tuple[StepResult, float]],
        ahead: Draft | None = None,
    ) -> StepResult | None:
        """The backend's answer, or None after a failure that was dealt with; what was planned `ahead` is void
        then."""
        try:
            result, spent_s = run()
        except CapacityError as error:
            self._undo(draft, ahead)
            self._end_all(self._recovery.short_of_memory(draft, plan, error), str(error))
            return None
        except Exception as error:
            log.exception("step %d with %d requests failed", plan.step, draft.num_scheduled)
            self._undo(draft, ahead)
            self._end_all(self._recovery.failed(draft, plan), f"the backend failed: {error}")
            return None
        self.last_step = StepFacts(spent_s, len(plan.decode_rows), plan.num_prefill_tokens)
        del self._request_table.left[: len(plan.left)]
        self._recovery.succeeded()
        return result

    def _end_all(self, states: Iterable[RequestState], error: str) -> None:
        for state in states:
            self._end(state, FinishReason.ERROR, error=error)

    def _undo(self, draft: Draft, ahead: Draft | None) -> None:
        """After a failed execute: the books are as before the bind, admitted requests wait again."""
        for one in (ahead, draft) if ahead is not None else (draft,):
            self.kv.rollback(one)
            if one is draft:
                self.kv.give_up_saved(draft)
            for chunk in reversed(list(one.admitted())):
                self._request_table.leave(chunk.state)
                self._request_table.wait_again(chunk.state)

    # -- leaving the batch

    def _preempt(self, state: RequestState) -> None:
        self.events.emit(RequestPreempted(state.request_id, state.num_computed, self.clock.now()))
        self.kv.release(state, ended=False)
        self._request_table.leave(state)
        self._request_table.wait_again(state)
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
        self.kv.forget(state)
        state.finish_reason = reason
        self._request_table.end(state)
        if reason is not FinishReason.ABORT:
            self._outputs.append(output_of(state, token, logprobs, reason, error))
        self.events.emit(finished(state, reason, self.clock.now()))

    def _take_outputs(self) -> StepOutputs:
        outputs, self._outputs = self._outputs, StepOutputs()
        return outputs

    def _emit_step(self, plan: ExecutionPlan, began_s: float) -> None:
        if self.events.wants(StepDone):
            running, waiting = len(self._request_table.running), len(self._request_table.waiting)
            prompts, decodes = plan.num_prefill_tokens, len(plan.decode_rows)
            spent_s = self.clock.now() - began_s
            self.events.emit(StepDone(plan.step, prompts, decodes, running, waiting, spent_s))
