"""`Engine`: our loop around any backend. A step is three calls: plan, execute, commit.

plan     builder -> passes -> preempt -> kv.bind -> verify -> freeze
execute  the backend computes; the only call with tensors
commit   requests move forward: tokens are appended, what is computed enters the index, what ended is released
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import CapacityError, PlanError, RequestError, SageError
from sagellm.core.events import (
    EventBus,
    RequestFinished,
    RequestPreempted,
    RequestQueued,
    RequestReceived,
    RequestScheduled,
    StepDone,
)
from sagellm.core.kv_hints import HintOutcome, KvHintsEnvelope
from sagellm.core.plan import NO_ROW, Chunk, Draft, ExecutionPlan, Growth, RequestState, StepResult
from sagellm.core.protocols.engine import EngineStats, InferenceBackend
from sagellm.core.protocols.eviction import EvictionPolicy
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
from sagellm.engines._door import check_quota, check_request
from sagellm.engines._outcome import output_of, stop_reason
from sagellm.kvmgr.kv_pool import as_copies, plan_compaction
from sagellm.kvmgr.manager import KVCacheManager
from sagellm.kvmgr.scheduler_ir import BaseSchedulerIR, freeze, verify_bound

log = logging.getLogger("sagellm.engine")

MAX_CAPACITY_FAILURES = 3
"""Times that a step of one token may run out of device memory, in a row, before its request ends."""


class Engine:
    """Implements `EngineCore`: continuous batching over one backend. Synchronous; one thread owns it.

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
        self._states: dict[str, RequestState] = {}
        self._waiting: dict[str, RequestState] = {}
        self._running: list[RequestState] = []
        self._free_rows = list(range(self.max_num_seqs - 1, -1, -1))
        self._left: list[int] = []
        self._outputs: list[RequestOutput] = []
        self._token_budget = max_batched_tokens
        self._num_capacity_failures = 0
        self._suspects: list[str] = []
        self._num_steps = 0
        self._num_preemptions = 0

    # -- requests in and out

    def add(self, request: Request) -> None:
        if request.request_id in self._states:
            raise RequestError(f"request id {request.request_id!r} is in use: send another", "request_id")
        check_request(request, self._capability.vocab_size, self.max_model_len)
        check_quota(request, self.kv.max_blocks(request.account) * self.kv.block_size)
        state = RequestState.of(request)
        self._states[request.request_id] = state
        self._waiting[request.request_id] = state
        now_s = self.clock.now()
        if self.events.wants(RequestReceived):
            self.events.emit(RequestReceived(request, now_s))
        self.events.emit(RequestQueued(request.request_id, len(request.tokens), now_s))

    def fork(self, request_id: str, new_id: str, params: SamplingParams | None = None) -> None:
        """A second request goes on from where a running one stands, sharing its KV: whole blocks as they are,
        the last one as a copy. Its prompt is all that the first has so far."""
        parent = self._states.get(request_id)
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
        state = self._states.get(request_id)
        if state is None:
            return False
        self._end(state, FinishReason.ABORT)
        if not self._states:  # no step will follow to tell of it
            self._emit_step(ExecutionPlan(self._num_steps), self.clock.now())
        return True

    def has_work(self) -> bool:
        return bool(self._states or self._outputs)

    def stats(self) -> EngineStats:
        states, metrics = self.kv.block_states(), self.kv.metrics
        reuse = metrics.snapshot() if metrics is not None else None
        misses = self.kv.misses.snapshot() if self.kv.misses is not None else None
        waiting = len(self._waiting)
        preemptions, steps = self._num_preemptions, self._num_steps
        return EngineStats(len(self._running), waiting, *states, preemptions, steps, reuse, misses)

    def capability(self) -> CapabilityDescriptor:
        return self._capability

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

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
        moves = plan_compaction(self.kv.pool.block_info, self.kv.pool.total_blocks, max_copies)
        if not moves:
            return 0
        self.kv.remap(moves)
        tables = [(state.row, self.kv.block_table(state.request_id)) for state in self._running]
        plan = ExecutionPlan(
            step=self._num_steps,
            grown=tuple(Growth(row, 0, tuple(table)) for row, table in tables),
            copies=tuple(as_copies(moves)),
        )
        try:
            self.backend.execute(plan)
        except Exception:
            self.kv.remap({target: source for source, target in moves.items()})
            raise
        return len(moves)

    def close(self) -> None:
        for request_id in list(self._states):
            self.abort(request_id)
        self.backend.close()

    # -- the loop

    def step(self) -> Sequence[RequestOutput]:
        if not self._states:
            return self._take_outputs()
        began_s = self.clock.now()
        draft = self._draft()
        plan = self._plan(draft)
        if not plan.is_empty:
            result = self._execute(draft, plan)
            if result is not None:
                self._commit(draft, plan, result)
        else:
            self._recover_budget()
        self._num_steps += 1
        self._emit_step(plan, began_s)
        return self._take_outputs()

    def _draft(self) -> Draft:
        build = self.scheduler.builder.build
        waiting = list(self._waiting.values())
        return build(self._num_steps, self.clock.now(), self._token_budget, self._running, waiting)

    def _plan(self, draft: Draft) -> ExecutionPlan:
        self.scheduler.run(draft, self)
        if len(draft.running) != len(self._running):
            raise PlanError(
                f"a pass lost running requests: {len(draft.running)} of {len(self._running)} are left"
            )
        self._running[:] = draft.running
        self._isolate(draft)
        for state in draft.preempted:
            self._preempt(state)
        for request_id, reason in draft.rejected.items():
            self._end(self._states[request_id], FinishReason.ERROR, reason)
        self._bind(draft)
        try:
            verify_bound(draft)
            self._enter(draft)
        except SageError:
            self.kv.rollback(draft)
            raise
        plan = self.last_plan = freeze(draft, tuple(self._left), self.kv)
        return plan

    def _bind(self, draft: Draft) -> None:
        """Bind what can be bound: who counted on blocks that others got first waits for the next step."""
        for chunk in list(draft.admitted()):
            if chunk.hit is not None and not self.kv.is_current(chunk.hit):
                self._put_off(draft, chunk, "the request whose last block it would copy has left")
        short: list[tuple[RequestState, str]] = []
        while draft.chunks:
            try:
                self.kv.bind(draft)
                return
            except CapacityError as error:
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
        if len(self._running) > 1:
            self._preempt(self._running[-1])
        elif not self._running or self._running[0] is state:
            self._end(state, FinishReason.ERROR, f"out of KV memory: {reason}")

    def _put_off(self, draft: Draft, chunk: Chunk, reason: str) -> None:
        del draft.chunks[chunk.state.request_id]
        draft.say("bind", chunk.state, "wait", reason)

    def _enter(self, draft: Draft) -> None:
        """Admitted requests get rows; their state becomes that of a running one."""
        for chunk in draft.admitted():
            state = chunk.state
            state.row = self._free_rows.pop()
            state.status = RequestStatus.RUNNING
            state.num_computed = chunk.start
            self.kv.admitted(chunk, again=state.scheduled_s is not None)
            if state.scheduled_s is None:
                state.scheduled_s, state.num_cached = draft.now_s, chunk.start
                self.events.emit(RequestScheduled(state.request_id, chunk.start, draft.now_s))
            self._running.append(state)
            del self._waiting[state.request_id]

    def _isolate(self, draft: Draft) -> None:
        """After a step that failed for no known reason, its requests run one at a time, so that the one that
        makes it fail fails alone."""
        while self._suspects and self._suspects[-1] not in draft.chunks:
            self._suspects.pop()
        if self._suspects:
            suspect = self._suspects[-1]
            draft.chunks = {suspect: draft.chunks[suspect]}
            draft.preempted.clear()

    def _execute(self, draft: Draft, plan: ExecutionPlan) -> StepResult | None:
        """The backend's answer, or None after a failure that was dealt with."""
        try:
            result = self.backend.execute(plan)
        except CapacityError as error:
            self._undo(draft)
            self._shrink_budget(draft, error)
            return None
        except Exception as error:
            log.exception("step %d with %d requests failed", plan.step, len(draft.chunks))
            self._undo(draft)
            self._blame(draft, error)
            return None
        self._left.clear()
        self._num_capacity_failures = 0
        self._recover_budget()
        if self._suspects:
            self._suspects.pop()
        return result

    def _recover_budget(self) -> None:
        more = self._token_budget + self.max_batched_tokens // 8 + 1
        self._token_budget = min(self.max_batched_tokens, more)

    def _blame(self, draft: Draft, error: Exception) -> None:
        """A failing request that was alone ends with an error; several are suspects."""
        if len(draft.chunks) > 1:
            self._suspects = list(reversed(draft.chunks))
            return
        for request_id in draft.chunks:
            self._end(self._states[request_id], FinishReason.ERROR, f"the backend failed: {error}")

    def _undo(self, draft: Draft) -> None:
        """After a failed execute: the books are as before the bind, admitted requests wait again."""
        self.kv.rollback(draft)
        for chunk in reversed(list(draft.admitted())):
            self._leave_row(chunk.state)
            self._running.remove(chunk.state)
            self._wait_again(chunk.state)

    def _shrink_budget(self, draft: Draft, error: CapacityError) -> None:
        """Try again with half the tokens; the requests of a step that keeps failing with one token end."""
        if draft.num_tokens == 1:
            self._num_capacity_failures += 1
        self._token_budget = max(1, draft.num_tokens // 2)
        log.warning(
            "device memory is short, next step computes %d tokens at most: %s", self._token_budget, error
        )
        if self._num_capacity_failures < MAX_CAPACITY_FAILURES:
            return
        self._num_capacity_failures = 0
        for request_id in draft.chunks:
            self._end(self._states[request_id], FinishReason.ERROR, str(error))

    def _commit(self, draft: Draft, plan: ExecutionPlan, result: StepResult) -> None:
        drawn = dict(zip(plan.sample_rows, result.token_ids, strict=True))
        now_s = self.clock.now()
        for chunk in draft.chunks.values():
            state = chunk.state
            if state.status is RequestStatus.FINISHED:
                continue
            token_id = drawn.get(state.row)
            if token_id is not None and not 0 <= token_id < self._capability.vocab_size:
                reason = "no token could be drawn: the model's logits are not finite"
                self._end(state, FinishReason.ERROR, reason, keep=False)
                continue
            state.num_computed = chunk.end
            self.kv.commit(state)
            if token_id is not None:
                self._append(state, token_id, result.logprobs.get(state.row), now_s)

    def _append(self, state: RequestState, token_id: int, logprob: TokenLogprob | None, now_s: float) -> None:
        state.tokens.append(token_id)
        if state.first_token_s is None:
            state.first_token_s = now_s
        reason = stop_reason(state, token_id, self.max_model_len)
        logprobs = () if logprob is None else (logprob,)
        if reason is None:
            self._outputs.append(output_of(state, (token_id,), logprobs))
        else:
            self._end(state, reason, token=(token_id,), logprobs=logprobs)

    # -- leaving the batch

    def _preempt(self, state: RequestState) -> None:
        self.events.emit(RequestPreempted(state.request_id, state.num_computed, self.clock.now()))
        self.kv.release(state, ended=False)
        self._leave_row(state)
        self._running.remove(state)
        state.num_preemptions += 1
        self._num_preemptions += 1
        self._wait_again(state)

    def _wait_again(self, state: RequestState) -> None:
        state.status = RequestStatus.WAITING
        state.num_computed = 0
        self._waiting = {state.request_id: state, **self._waiting}

    def _leave_row(self, state: RequestState) -> None:
        self._left.append(state.row)
        self._free_rows.append(state.row)
        state.row = NO_ROW

    def _end(
        self,
        state: RequestState,
        reason: FinishReason,
        error: str | None = None,
        token: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        *,
        keep: bool = True,
    ) -> None:
        """`keep`: whether what it computed may serve others."""
        if state.status is RequestStatus.RUNNING:
            self.kv.release(state, keep=keep)
            self._leave_row(state)
            self._running.remove(state)
        else:
            del self._waiting[state.request_id]
        state.status = RequestStatus.FINISHED
        del self._states[state.request_id]
        if reason is not FinishReason.ABORT:
            self._outputs.append(output_of(state, token, logprobs, reason, error))
        self._emit_finished(state, reason)

    def _take_outputs(self) -> list[RequestOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def _emit_finished(self, state: RequestState, reason: FinishReason) -> None:
        self.events.emit(
            RequestFinished(
                state.request_id,
                reason.value,
                state.num_prompt_tokens,
                state.num_cached,
                state.num_output_tokens,
                state.request.arrival_s,
                state.scheduled_s,
                state.first_token_s,
                self.clock.now(),
            )
        )

    def _emit_step(self, plan: ExecutionPlan, began_s: float) -> None:
        if self.events.wants(StepDone):
            self.events.emit(
                StepDone(
                    plan.step,
                    plan.num_prefill_tokens,
                    len(plan.decode_rows),
                    len(self._running),
                    len(self._waiting),
                    self.clock.now() - began_s,
                )
            )
