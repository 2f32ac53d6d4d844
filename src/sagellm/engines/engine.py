"""`Engine`: our loop around any backend. A step is three calls: plan, execute, commit.

    plan      `planner.py`: the passes of `kvmgr/scheduler_ir` edit a draft of the step, preempted and
              rejected requests leave, blocks are bound, admitted requests enter rows, the plan is frozen
    execute   the backend computes the frozen plan: the only call that touches tensors
    commit    `commit.py`: tokens are appended, computed KV enters the prefix index, ended requests leave

With `engine.overlap` the next step is planned while one computes (`overlap.py`). Only `RequestTable`
(`request_table.py`) moves a request: planner and committer return what must be preempted or ended, and the
engine releases the blocks and calls the transition.

A failed step leaves everything as it was before its blocks were bound: admitted requests wait again, blocks
are given back; evictions stay. `recovery.py` says how the loop goes on: a backend that is out of memory gets
fewer tokens. After any other failure the requests of the step run one at a time, until each has taken its
step or has failed alone, which ends it with `FinishReason.ERROR`."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial

from sagellm.core.binding import Binding
from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import CapacityError, EngineFailedError, RequestError
from sagellm.core.events import EventBus, RequestPreempted, RequestQueued, RequestReceived, StepDone
from sagellm.core.features import APPROXIMATE_REUSE, REASONING_KV
from sagellm.core.kv_hints import HintOutcome, KVHintsEnvelope
from sagellm.core.plan import Draft, ExecutionPlan, RequestState, StepResult
from sagellm.core.protocols.engine import (
    RANKS_END_S,
    EngineDiagnostics,
    EngineStats,
    InferenceBackend,
    PinnedPrefix,
    PromptExplanation,
    SpeculationCounts,
    TokenCopies,
)
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
    Tokens,
)
from sagellm.engines.approximate import ApproximateReuse
from sagellm.engines.commit import Committer, Finish, StepOutputs, finished_event, output_of
from sagellm.engines.compaction import compact
from sagellm.engines.kv_waits import KVWaits
from sagellm.engines.overlap import InFlightStep, PlannedStep
from sagellm.engines.planner import MustLeave, Planner
from sagellm.engines.prefill_sends import OnLayer, PrefillSends
from sagellm.engines.reasoning_kv import ReasoningKV
from sagellm.engines.recovery import Recovery
from sagellm.engines.request_table import RequestTable
from sagellm.engines.speculation import Speculation
from sagellm.engines.validation import check_request
from sagellm.engines.view import EngineView
from sagellm.kvmgr.manager import BlockStates, KVCacheManager
from sagellm.kvmgr.scheduler_ir import DecodeBatch, PassPipeline

log = logging.getLogger("sagellm.engine")
MOST_IDLE_S = 0.002
"""A step waits so long for KV where it has nothing else to do; then the engine looks for new requests."""

RANKS_LOOK_S = 1.0
"""While idle, an engine of several ranks looks so often whether they are alive."""


class Engine:
    """Implements `EngineCore`: continuous batching over one backend. Synchronous; one thread owns it. With
    `overlap` the backend runs in a thread of its own; the tokens are the same. With `token_copies` requests
    may ask for approximate reuse, of which `recompute_tokens` are computed again in each run; with
    `compress_reasoning`, that old KV of their reasoning is dropped."""

    def __init__(
        self,
        backend: InferenceBackend,
        kv: KVCacheManager,
        scheduler: PassPipeline,
        *,
        max_batched_tokens: int = 2048,
        overlap: bool = False,
        speculation: Speculation | None = None,
        token_copies: TokenCopies | None = None,
        recompute_tokens: int = 16,
        compress_reasoning: bool = False,
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
        self._capability = capability = backend.capability()
        num_groups = 1 if capability.kv_schema is None else capability.kv_schema.num_groups
        if kv.num_groups != num_groups:
            raise ValueError(f"the manager has {kv.num_groups} KV groups, the backend {num_groups}")
        self.max_num_seqs = capability.max_num_seqs
        self.speculation = speculation
        self.max_model_len = min(capability.max_model_len, kv.quotes.most_blocks * kv.block_size)
        self.last_plan: ExecutionPlan | None = None
        self.last_step = NO_STEP
        self._request_table = table = RequestTable(
            self.max_num_seqs, DecodeBatch(capability.vocab_size, kv.block_size), self.max_model_len
        )
        self._kv_waits = None if kv.tiers is None else KVWaits(table, kv, kv.tiers, self.clock.now)
        self.prefill_sends = PrefillSends(kv)
        self._approximate = None
        if token_copies is not None:
            self._approximate = ApproximateReuse(table, kv, token_copies, recompute_tokens)
            self._capability = replace(capability, features=capability.features | {APPROXIMATE_REUSE})
        self.reasoning_kv = ReasoningKV(kv) if compress_reasoning else None
        if compress_reasoning:
            features = self._capability.features | {REASONING_KV}
            self._capability = replace(self._capability, features=features)
        self._recovery = Recovery(max_batched_tokens)
        self._planner = Planner(
            table, kv, scheduler, self._recovery, speculation, self._kv_waits, self._approximate,
            clock=self.clock, events=self.events,
        )  # fmt: skip
        self.view = EngineView(self, self._planner, table)
        self._committer = Committer(
            table, kv, vocab_size=capability.vocab_size, max_model_len=self.max_model_len
        )
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="sagellm-backend") if overlap else None
        self._in_flight: InFlightStep | None = None
        self._outputs = StepOutputs()
        self._num_steps, self._num_preemptions, self._step_s = 0, 0, 0.0

    # -- requests in and out

    def check_request(self, request: Request) -> None:
        """Raise `RequestError` unless `add` would take the request now."""
        if request.request_id in self._request_table.states:
            raise RequestError(f"request id {request.request_id!r} is in use: send another", "request_id")
        account_tokens = self.kv.quotes.max_blocks(request.account) * self.kv.block_size
        check_request(request, self._capability, self.max_model_len, account_tokens)

    def add(self, request: Request) -> None:
        self.check_request(request)
        state = RequestState.of(request)
        self._request_table.add(state)
        if self.reasoning_kv is not None:
            self.reasoning_kv.add(state)
        if self._kv_waits is not None:
            self._kv_waits.add(state)
        now_s = self.clock.now()
        if self.events.wants(RequestReceived):
            self.events.emit(RequestReceived(request, now_s))
        self.events.emit(RequestQueued(request.request_id, len(request.tokens), now_s))

    def fork(self, request_id: str, new_id: str, params: SamplingParams | None = None) -> None:
        """Start a second request whose prompt is all tokens of a running one. They are not scored again. Both
        share whole blocks of KV; the last, partial block is copied."""
        self.drain()
        parent = self.find(request_id)
        if parent is None or parent.status is not RequestStatus.RUNNING:
            raise RequestError(f"cannot fork {request_id!r}: no request of that id is running", "request_id")
        params = params or replace(parent.request.params, prompt_logprobs=None)
        group, now_s = parent.request.group or f"fork of {request_id}", self.clock.now()
        forked = replace(parent.request, request_id=new_id, tokens=Tokens(parent.tokens), params=params)
        self.branch(request_id, replace(forked, arrival_s=now_s, generated=(), moves=False, group=group))

    def branch(self, request_id: str, request: Request) -> None:
        self.drain()
        self.add(request)
        parent = self.find(request_id)
        if parent is not None and parent.status is RequestStatus.RUNNING and request.group is not None:
            self.kv.fork(parent, request.group)

    def find(self, request_id: str) -> RequestState | None:
        """The state of a request that waits or runs."""
        return self._request_table.states.get(request_id)

    def abort(self, request_id: str) -> bool:
        state = self._request_table.states.get(request_id)
        if state is None:
            return False
        if self.kv.is_published(request_id):  # the step that computes it may still fail
            self.drain()
        if state.status is not RequestStatus.FINISHED:
            self._finish(Finish(state, FinishReason.ABORT))
        self._outputs.drop(request_id)
        if not self._request_table.states:  # no step follows whose event would show it
            self._emit_step(ExecutionPlan(self._num_steps), self.clock.now())
        return True

    def has_work(self) -> bool:
        check_ranks: Callable[[], None] | None = getattr(self.backend, "check_ranks", None)
        if check_ranks is not None:
            check_ranks()
        moves = self.kv.tiers is not None and not self.kv.tiers.is_idle
        has_requests = bool(self._in_flight or self._request_table.states or self._outputs)
        return has_requests or moves or not self._wake_s

    def is_idle(self, tokens: Tokens, namespace: Namespace) -> bool:
        return not self.has_work()

    @property
    def _wake_s(self) -> float:
        """Seconds until KV that no request waits for should be loaded."""
        waits = self._kv_waits
        return min(self.kv.hints.wake_s, math.inf if waits is None else waits.wake_s)

    def idle_s(self) -> float | None:
        """Until KV is loaded that no request waits for, or ranks are looked at."""
        wake_s = self._wake_s
        if hasattr(self.backend, "check_ranks"):
            return min(wake_s, RANKS_LOOK_S)
        return None if wake_s == math.inf else wake_s

    def stats(self) -> EngineStats:
        metrics, each = self.kv.metrics, self.kv.num_groups
        total, (_, cached, free) = self.kv.pool.total_blocks // each, self.kv.block_states()
        states = BlockStates(total - cached // each - free // each, cached // each, free // each)
        reuse = metrics.snapshot() if metrics is not None else None
        misses = self.kv.misses.snapshot() if self.kv.misses is not None else None
        running, waiting = len(self._request_table.running), len(self._request_table.waiting)
        preemptions, steps = self._num_preemptions, self._num_steps
        return EngineStats(running, waiting, *states, preemptions, steps, reuse, misses, self.tier_faults())

    def tier_faults(self) -> Sequence[str]:
        return () if self.kv.tiers is None else self.kv.tiers.faults()

    def wake(self) -> None:
        """A step of this engine waits for tiers alone."""
        if self.kv.tiers is not None:
            self.kv.tiers.wake()

    def diagnostics(self) -> EngineDiagnostics:
        kv, fragmentation = self.kv, self.kv.fragmentation()
        expert_rows, speculation = getattr(self.backend, "expert_rows", dict), self.speculation
        return EngineDiagnostics(
            evicted_blocks=dict(kv.allocator.num_evicted),
            internal_fragmentation=fragmentation.internal,
            external_fragmentation=fragmentation.external,
            num_pinned_prefixes=kv.pins.num_prefixes,
            num_pinned_blocks=kv.pins.num_blocks,
            pass_time_s=dict(self.scheduler.pass_time_s),
            reuse_by_tenant={} if kv.metrics is None else kv.metrics.by_tenant(),
            expert_rows=expert_rows(),
            speculation=SpeculationCounts() if speculation is None else speculation.counts(),
            checkpoints={} if kv.checkpoints is None else kv.checkpoints.counts(),
            tiers=() if kv.tiers is None else kv.tiers.states(),
            num_kv_waits=0 if self._kv_waits is None else self._kv_waits.num_waits,
            num_approximate_tokens=0 if self._approximate is None else self._approximate.num_tokens,
            num_dropped_tokens=0 if self.reasoning_kv is None else self.reasoning_kv.num_tokens,
            step_s=self._step_s,
            communication_s=getattr(self.backend, "communication_s", None),
        )

    def capability(self) -> CapabilityDescriptor:
        return self._capability

    def pin_prefix(self, tokens: Tokens, namespace: Namespace) -> PinnedPrefix:
        self.drain()  # a step in flight that has published the prefix may fail
        hit = self.kv.pin_prefix(tokens, namespace)
        return PinnedPrefix(hit.num_tokens, hit.num_blocks, lambda: self.kv.unpin_prefix(hit))

    def clear_cache(self, *, tiers: bool = False) -> int:
        num_below = self.kv.tiers.clear() if tiers and self.kv.tiers is not None else 0
        return num_below + self.kv.clear_cache()

    def hint(self, envelope: KVHintsEnvelope, namespace: Namespace) -> Sequence[HintOutcome]:
        return self.kv.hints.apply(envelope, namespace)

    def explain(
        self, tokens: Tokens, namespace: Namespace, session_id: str | None = None
    ) -> PromptExplanation:
        spans = self.kv.explain(tokens, namespace)
        if spans is None:
            raise RequestError(
                "evictions are remembered with kv.miss_attribution only: start the server with "
                "--set kv.miss_attribution=true"
            )
        session = None
        if session_id is not None:
            session = self.kv.hints.session_tokens(namespace.tenant, session_id)
        size = self.backend.get_kv_schema().bytes_per_block
        return PromptExplanation(spans, self.kv.block_size, size, session)

    def set_policy(self, factory: Callable[[], EvictionPolicy]) -> None:
        self.kv.index.set_policy(factory)

    def set_passes(self, passes: Sequence[SchedulerPass]) -> None:
        self.scheduler.use(passes)

    def compact(self, max_copies: int | None = None) -> int:
        """Make free blocks contiguous with at most `max_copies` moves; returns their number. The backend
        copies them now. If that fails, the error is raised and nothing has moved. While blocks go to other
        instances or come from there, nothing moves."""
        self.drain()
        if self._kv_waits is not None:
            self._kv_waits.settle()
        kv = self.kv
        if kv.blocks_move:
            return 0
        return compact(kv, self.backend, self._request_table.running, self._num_steps, max_copies)

    def check(self) -> None:
        """Raise `BookkeepingError` where requests, batch and KV disagree."""
        self.kv.check()
        if self._approximate is not None:
            self._approximate.check()
        ahead, size = self._num_given_ahead(), self.kv.block_size
        self._request_table.check(lambda name: self.kv.num_slots(name) - ahead.get(name, 0) * size)

    def end_ranks(self, grace_s: float) -> bool:
        end: Callable[[float], None] | None = getattr(self.backend, "end_ranks", None)
        if end is not None:
            end(grace_s)
        return end is not None

    def close(self) -> None:
        self.end_ranks(RANKS_END_S)  # a step under way may wait for one that does not answer any more
        for request_id in list(self._request_table.states):
            with suppress(EngineFailedError):  # of a step that has failed with the ranks
                self.abort(request_id)
        if self._worker is not None:  # waits for the step in flight; its result is dropped
            self._worker.shutdown(wait=True)
            self._in_flight = None
        for part in (self.kv.tiers, self.speculation):
            if part is not None:
                part.close()
        self.backend.close()

    # -- the loop

    def step(self) -> Sequence[RequestOutput]:
        """Plan, execute and commit one step; returns what it added to each request. With overlap the step may
        have been planned ahead and be computing already; then the one behind it is planned while it computes,
        and is handed to the backend before the commit."""
        has_step = bool(self._in_flight or self._request_table.states)
        if self._kv_waits is not None:
            has_step = self._move_kv(self._kv_waits)
        self.kv.hints.advance()
        if not has_step:
            return self._take_outputs()
        for part in (self._approximate, self.reasoning_kv):
            if part is not None and part.is_ready:
                self.drain()
                part.advance()
        current = self._in_flight or self._begin_step()
        following = None
        if self._in_flight is not None and not self._recovery.isolates:
            following = self._planner.plan_ahead(current, self.view)
        self._complete(current, following)
        return self._take_outputs()

    def _move_kv(self, waits: KVWaits) -> bool:
        """Take in KV from tiers; returns whether there is a step to take.

        Where nothing can be computed before KV has moved, waits a moment for it.
        """
        waits.advance(start=self._in_flight is None)
        waits.load_hot(may_begin=self._in_flight is None)
        table = self._request_table
        if self._in_flight is not None or table.running or table.num_for_kv < len(table.waiting):
            return True
        if self._outputs:
            return False
        assert self.kv.tiers is not None
        self.kv.tiers.wait(MOST_IDLE_S)
        waits.advance(start=True)
        return table.num_for_kv < len(table.waiting)

    def _complete(self, current: InFlightStep, following: PlannedStep | None = None) -> None:
        """Execute or await a step and commit it; `following` starts in between.

        So do loads that were requested meanwhile: `following` writes none of their blocks. It may write
        blocks that the commit frees, so loads that are requested there start after it.
        """
        if self._in_flight is not None:
            current.drop_finished(self._request_table.decodes)
            self._in_flight = None
        self.last_plan = current.plan
        result = self._execute(current, following)
        if self.kv.tiers is not None:
            self.kv.tiers.start_loads()
        if result is not None:
            self._commit(current, result)
        self._num_steps += 1
        self._emit_step(self.last_plan, current.began_s)

    def drain(self) -> None:
        """Complete the in-flight step, if there is one, and start no other."""
        if self._in_flight is not None:
            self._complete(self._in_flight)
            self._outputs.materialize()

    def draft(self) -> Draft:
        """The next step with the decisions of the passes; nothing is bound or changed. An in-flight step
        counts as not begun."""
        return self.scheduler.run(self._planner.draft(self._num_steps), self.view)

    def _begin_step(self) -> InFlightStep:
        """Plan a step; requests that it preempts or ends leave. With overlap the backend begins to compute
        it, and it is the in-flight step (`_in_flight`)."""
        began_s = self.clock.now()
        binding = self._decide()
        for state in binding.draft.preempted:
            self._preempt(state)
        for request_id, reason in binding.draft.rejected.items():
            self._finish(Finish(self._request_table.states[request_id], FinishReason.ERROR, error=reason))
        must_leave = self._planner.bind(binding)
        if must_leave is not None and self._give_way(must_leave):
            binding.draft.hold(must_leave.state)  # a later step has the blocks that were moved or read
            must_leave = None
        if must_leave is not None and must_leave.error is None:
            self._preempt(must_leave.state)
        elif must_leave is not None:
            self._finish(Finish(must_leave.state, FinishReason.ERROR, error=must_leave.error))
        plan = self._planner.seal(binding)
        awaits = self._request_table.limited or self.kv.allocator.num_leaving
        if plan.is_empty and awaits and self.kv.tiers is not None:
            self.kv.tiers.wait(MOST_IDLE_S)  # for KV that comes, or for blocks that are being saved
        if self._worker is None or plan.is_empty:
            compute = partial(self._compute, plan, self.prefill_sends.begin_step(binding.draft))
            return InFlightStep(binding, plan, (), began_s, compute)
        return self._submit(self._worker, PlannedStep.of(binding, plan, self._request_table.decodes), began_s)

    def _give_way(self, must_leave: MustLeave) -> bool:
        """Stop what keeps, moves or reads blocks. Returns whether some are free now or soon."""
        waits = self._kv_waits
        if self.kv.pins.give_way() or (waits is not None and waits.give_way()):
            return True
        if must_leave.error is None:
            return False
        return self.prefill_sends.give_way(must_leave.state) or self.kv.blocks_move

    def _decide(self) -> Binding:
        """What the passes decide.

        Before a request is preempted or ended for lack of memory, prefixes that are kept for others are
        given up, tiers stop moving blocks, and the passes decide again. A request that would be ended waits
        for what moves or is sent: these blocks can be evicted then.
        """
        binding, waits = self._planner.decide(self._num_steps, self.view), self._kv_waits
        draft = binding.draft
        gave_way = bool(draft.preempted or draft.rejected) and self.kv.pins.give_way()
        if waits is not None and (draft.preempted or (draft.rejected and waits.holds_tails)):
            gave_way = waits.give_way() or gave_way
        if gave_way:
            self._planner.discard(binding)
            binding = self._planner.decide(self._num_steps, self.view)
        draft, moves = binding.draft, self.kv.blocks_move or (waits is not None and waits.is_moving)
        rejected = [self._request_table.states[request_id] for request_id in draft.rejected]
        for state in rejected:
            if self.prefill_sends.give_way(state) or moves:
                draft.record("blocks", state, "wait", "blocks move")
                del draft.rejected[state.request_id]
        if rejected and moves and not draft.num_scheduled and self.kv.tiers is not None:
            self.kv.tiers.wait(MOST_IDLE_S)
        return binding

    def _submit(self, worker: ThreadPoolExecutor, planned: PlannedStep, began_s: float) -> InFlightStep:
        """Have the backend compute the step; returns at once."""
        on_layer = self.prefill_sends.begin_step(planned.binding.draft)
        future = worker.submit(self._compute, planned.plan, on_layer)
        self._in_flight = InFlightStep(*planned, began_s, future.result)
        return self._in_flight

    def _compute(self, plan: ExecutionPlan, on_layer: OnLayer | None) -> tuple[StepResult, float]:
        """The result and its seconds; runs in the backend's thread, if any."""
        began_s = self.clock.now()
        by_layer = None if on_layer is None else getattr(self.backend, "execute_by_layer", None)
        result = self.backend.execute(plan) if by_layer is None else by_layer(plan, on_layer)
        return result, self.clock.now() - began_s

    def _execute(self, current: InFlightStep, following: PlannedStep | None) -> StepResult | None:
        """The result; None if the step is empty, or has failed and was undone. After a result the backend
        begins to compute `following`; after a failure that is undone too."""
        binding, draft, plan = current.binding, current.binding.draft, current.plan
        if plan.is_empty:
            self._recovery.relax()
            return None
        try:
            result, spent_s = current.wait()
        except EngineFailedError:
            raise
        except CapacityError as error:
            self._undo(binding, following)
            self._fail(self._recovery.short_of_memory(draft, plan, error), str(error))
            return None
        except Exception as error:
            log.exception("step %d with %d requests failed", plan.step, draft.num_scheduled)
            self._undo(binding, following)
            self._fail(self._recovery.failed(draft, plan), f"the backend failed: {error}")
            return None
        self._step_s += spent_s
        self.last_step = StepFacts(spent_s, len(plan.decode_rows), plan.num_prefill_tokens)
        del self._request_table.left_rows[: len(plan.left)]
        self._recovery.succeeded()
        if following is not None and self._worker is not None:
            self._submit(self._worker, following, self.clock.now())
        return result

    def _undo(self, binding: Binding, following: PlannedStep | None) -> None:
        """Give back the blocks of a failed step; its admitted requests wait again.

        So do requests whose loads have not started: they may begin with what the step has published.
        """
        if self.kv.tiers is not None:
            self.kv.tiers.drop_unstarted()
        self.prefill_sends.fail_step(binding.draft)
        for undone in (binding,) if following is None else (following.binding, binding):
            self.kv.rollback(undone)
            for chunk in reversed(list(undone.draft.admitted())):
                self._request_table.cancel_admission(chunk.state)
                if self._approximate is not None:
                    self._approximate.forget(chunk.state)
        if self.backend.get_kv_schema().state_bytes:  # the failed step has spoilt the states of its rows
            for state in list(binding.draft.scheduled()):
                if state.status is RequestStatus.RUNNING:
                    self._preempt(state)

    def _commit(self, current: InFlightStep, result: StepResult) -> None:
        plan = current.plan
        if current.decoding:
            plan, result = current.reorder(result)
        self.last_plan = plan
        if self.speculation is not None:
            self.speculation.observe(current.binding.draft, plan, result, self.clock.now() - current.began_s)
        ended = self._committer.commit(
            current.binding, plan, result, self._outputs, self.clock.now(), self._num_given_ahead()
        )
        for finish in ended:
            self._finish(finish)
        if self._approximate is not None:
            self._approximate.observe(current.binding.draft.chunks.values())
        self.prefill_sends.commit_step(current.binding.draft)

    def _num_given_ahead(self) -> Mapping[str, int]:
        """By id of request in decode, the blocks that the in-flight step brought it."""
        if self._in_flight is None:
            return {}
        return Counter(state.request_id for state in self._in_flight.binding.appended_to)

    # -- leaving the batch

    def _preempt(self, state: RequestState) -> None:
        self.events.emit(RequestPreempted(state.request_id, state.num_computed, self.clock.now()))
        self.prefill_sends.leave(state, keep=False)
        self.kv.release(state, ended=False)
        self._request_table.preempt(state)
        if self._approximate is not None:
            self._approximate.forget(state)
        if self._kv_waits is not None:
            self._kv_waits.add(state)
        self._num_preemptions += 1

    def _fail(self, states: Sequence[RequestState], error: str) -> None:
        for state in states:
            self._finish(Finish(state, FinishReason.ERROR, error=error))

    def _finish(self, finish: Finish) -> None:
        """Release the blocks of a request, end it, and report that."""
        state, reason, token_ids, logprobs, error, keep = finish
        self.prefill_sends.leave(state, keep=keep)
        if state.status is RequestStatus.RUNNING:
            self.kv.release(state, keep=keep)
        self.kv.forget(state)
        if self._kv_waits is not None:
            self._kv_waits.forget(state)
        if self._approximate is not None:
            self._approximate.forget(state)
        if self.speculation is not None:
            self.speculation.forget(state)
        self._request_table.finish(state, reason)
        if reason is not FinishReason.ABORT:
            self._outputs.append(output_of(state, token_ids, logprobs, reason, error))
        self.events.emit(finished_event(state, reason, self.clock.now()))

    def _take_outputs(self) -> StepOutputs:
        outputs, self._outputs = self._outputs, StepOutputs()
        return outputs

    def _emit_step(self, plan: ExecutionPlan, began_s: float) -> None:
        if self.events.wants(StepDone):
            running, waiting = len(self._request_table.running), len(self._request_table.waiting)
            prompts = plan.num_prefill_tokens
            decodes = plan.num_tokens - prompts
            spent_s = self.clock.now() - began_s
            self.events.emit(StepDone(plan.step, prompts, decodes, running, waiting, spent_s))
