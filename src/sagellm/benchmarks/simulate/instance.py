"""One simulated instance: the real engine, its own clock and its log."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from operator import sub
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sagellm.control_plane.fleet.load import WINDOW_S
from sagellm.core.clock import ManualClock
from sagellm.core.config import Config
from sagellm.core.events import EventBus, RequestFinished, RequestPreempted, RequestScheduled, StepDone
from sagellm.core.plan import ExecutionPlan, Prefill
from sagellm.core.protocols.engine import InferenceBackend
from sagellm.core.protocols.router import ExecutionInstance, InstanceType
from sagellm.core.types import FinishReason, Request, RequestOutput
from sagellm.engines.build import build_engine
from sagellm.engines.simulator.fast_forward import EqualSteps, SimulatedEngine
from sagellm.kvmgr.manager import KVCacheManager

KV_EVERY = 16
"""Steps between two samples of the KV pool."""
Role = Literal["both", "prefill", "decode", "hybrid"]
KINDS: Mapping[Role, InstanceType] = {
    "both": InstanceType.GENERAL,
    "prefill": InstanceType.PREFILLING,
    "decode": InstanceType.DECODING,
    "hybrid": InstanceType.HYBRID,
}
BackendFactory = Callable[[ManualClock, Config], InferenceBackend]
"""Makes the backend of an instance, which advances that clock by the duration of each step."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 1.0
LEAST_IDLE_S = 1e-6
"""Less might not advance the clock."""
PATIENCE_S = 120.0
"""Simulated seconds after which an engine that has work and computes nothing counts as stalled."""


class StepLog:
    """The steps of one engine that computed something, as columns. It outlives the engine.

    `ends_s[i]` is the end of step i; `durations_s`, `prefill_tokens`, `decode_tokens`, `running` and
    `waiting` are of the same step. `kv_steps`, `kv_active`, `kv_cached`: blocks after every `KV_EVERY` steps
    or more. `preemptions` counts by request. `num_recomputed`: prefill tokens that a preempted request had
    computed before. `decode_step_s`: of the last step without prefill; 0.0 before the first.
    """

    def __init__(self) -> None:
        self.ends_s = array("d")
        self.durations_s = array("d")
        self.prefill_tokens = array("q")
        self.decode_tokens = array("q")
        self.running = array("q")
        self.waiting = array("q")
        self.kv_steps = array("q")
        self.kv_active = array("q")
        self.kv_cached = array("q")
        self.preemptions: dict[str, int] = {}
        self.num_recomputed = 0
        self.decode_step_s = 0.0
        self._lost: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.ends_s)

    def num_tokens(self) -> NDArray[np.int64]:
        """Tokens that each step computed."""
        tokens: NDArray[np.int64] = np.add(self.prefill_tokens, self.decode_tokens)
        return tokens

    def add(self, step: StepDone, end_s: float, kv: KVCacheManager) -> None:
        """Adds a step that ends now."""
        if not step.num_prefill_tokens and not step.num_decode_tokens:
            return
        self._sample(len(self.ends_s), kv)
        self.ends_s.append(end_s)
        self.durations_s.append(step.duration_s)
        self.prefill_tokens.append(step.num_prefill_tokens)
        self.decode_tokens.append(step.num_decode_tokens)
        self.running.append(step.num_running)
        self.waiting.append(step.num_waiting)
        if not step.num_prefill_tokens:
            self.decode_step_s = step.duration_s

    def add_equal_steps(self, steps: EqualSteps, kv: KVCacheManager) -> None:
        """Adds steps that the engine skipped with fast forward."""
        ends_s = array("d", steps.times_s[1:])
        self.durations_s.extend(map(sub, ends_s, steps.times_s))
        self.ends_s.extend(ends_s)
        self._sample(len(self.ends_s) - 1, kv)
        for column, value in (
            (self.prefill_tokens, steps.num_prefill_tokens),
            (self.decode_tokens, steps.num_decodes),
            (self.running, steps.num_decodes + bool(steps.prefills)),
            (self.waiting, steps.num_waiting),
        ):
            column.extend(array("q", (value,)) * steps.num_steps)
        self.running[-1] -= steps.num_ended
        if not steps.prefills:
            self.decode_step_s = self.durations_s[-1]
        self.observe(steps.prefills)

    def _sample(self, step: int, kv: KVCacheManager) -> None:
        """Samples the KV pool after a step, at most every `KV_EVERY` steps."""
        if not self.kv_steps or step - self.kv_steps[-1] >= KV_EVERY:
            active, cached, _ = kv.block_states()
            self.kv_steps.append(step)
            self.kv_active.append(active)
            self.kv_cached.append(cached)

    def add_preemption(self, event: RequestPreempted) -> None:
        """Remembers what the request had computed."""
        name = event.request_id
        self.preemptions[name] = self.preemptions.get(name, 0) + 1
        self._lost[name] = max(self._lost.get(name, 0), event.num_computed_tokens)

    def observe(self, prefills: Sequence[Prefill]) -> None:
        """Counts tokens that are computed a second time."""
        for op in prefills if self._lost else ():
            lost = self._lost.get(op.request_id, 0)
            self.num_recomputed += max(0, min(op.start + op.num_tokens, lost) - op.start)


class TokenTimes:
    """When each request got its tokens, as runs of consecutive steps. A request in decode gets a token in
    each step, so only the beginning and the end of a run are stored: the step that completes its prompt, a
    preemption, a step that skips it, its last token. The work per step depends only on what changes."""

    def __init__(self) -> None:
        self._began: dict[str, int] = {}
        self._held: set[str] = set()
        self._names: dict[int, str] = {}
        self._runs: dict[str, list[tuple[int, int]]] = {}

    @property
    def steady(self) -> bool:
        """Whether every request in decode takes part. Then steps that only decode need not be observed."""
        return not self._held

    def observe(self, step: int, plan: ExecutionPlan) -> None:
        """Observes the plan of an executed step. Call it before `end`."""
        began, new = self._began, 0
        unchanged = not (plan.prefills or plan.preempted or plan.joined or self._held)
        if unchanged and len(plan.decode_rows) == len(began):
            return
        for name in plan.preempted:
            self.end(name, step)
        for join in plan.joined:
            self._names[join.row] = join.request_id
        for op in plan.prefills:
            if op.samples:
                began[op.request_id] = step
                self._held.discard(op.request_id)
                new += 1
        if self._held or len(plan.decode_rows) != len(began) - new:
            self._compare_rows(step, plan)

    def _compare_rows(self, step: int, plan: ExecutionPlan) -> None:
        """The slow path: some requests in decode are skipped."""
        names = self._names
        present = {names[row] for row in plan.decode_rows}
        for name in [name for name, began in self._began.items() if began < step and name not in present]:
            self.end(name, step)
            self._held.add(name)
        for name in present - self._began.keys():
            self._began[name] = step
            self._held.discard(name)

    def end(self, name: str, step: int) -> None:
        """Ends the request's run before step number `step`."""
        began = self._began.pop(name, None)
        self._held.discard(name)
        if began is not None and began < step:
            self._runs.setdefault(name, []).append((began, step))

    def of(self, name: str, ends_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """When the request got its tokens; `ends_s` are the ends of all steps."""
        parts = [ends_s[begin:end] for begin, end in self._runs.get(name, ())]
        return np.concatenate(parts) if parts else np.empty(0)


class _QueuedTokens:
    """Counts prompt tokens that wait or are being computed.

    What submitted requests lack in the cache, minus what steps have computed. A hit that is longer or
    shorter when the request is scheduled corrects it."""

    def __init__(self) -> None:
        self.total = 0
        self._uncached: dict[str, int] = {}
        self._lengths: dict[str, int] = {}

    def submit(self, request_id: str, num_tokens: int, num_cached: int) -> None:
        self._lengths[request_id] = num_tokens
        self._set(request_id, num_tokens - num_cached)

    def schedule(self, event: RequestScheduled) -> None:
        if event.request_id in self._lengths:
            self._set(event.request_id, self._lengths[event.request_id] - event.num_cached_tokens)

    def _set(self, request_id: str, uncached: int) -> None:
        self.total += uncached - self._uncached.get(request_id, 0)
        self._uncached[request_id] = uncached

    def preempt(self, event: RequestPreempted) -> None:
        """What it had computed counts again, until it is scheduled with a hit."""
        if event.request_id in self._lengths:
            self._lengths[event.request_id] = max(self._lengths[event.request_id], event.num_computed_tokens)
            self.total += event.num_computed_tokens
            self._uncached[event.request_id] = self._lengths[event.request_id]

    def compute(self, num_tokens: int) -> None:
        self.total = max(0, self.total - num_tokens)

    def end(self, event: RequestFinished) -> None:
        uncached = self._uncached.pop(event.request_id, 0)
        self._lengths.pop(event.request_id, None)
        if event.scheduled_s is None:
            self.total = max(0, self.total - uncached)


class Instance:
    """An engine, its role and its log. `ended` holds finish events until they are taken; `step_began_s`: when
    the last step began."""

    def __init__(self, name: str, config: Config, backend: BackendFactory, role: Role = "both") -> None:
        self.name = name
        self.role = role
        self.clock = ManualClock()
        self.events = events = EventBus()
        self._queued = _QueuedTokens()
        self.engine = build_engine(config, backend(self.clock, config), clock=self.clock, events=events)
        self.step_log = StepLog()
        self.token_times = TokenTimes()
        self.scheduled: dict[str, RequestScheduled] = {}
        self.ended: list[RequestFinished] = []
        self.outputs: Sequence[RequestOutput] = ()
        self.stalled = False
        self.step_began_s = 0.0
        self._idle_s = 0.0
        self._pause_s = FIRST_PAUSE_S
        events.subscribe(RequestScheduled, self._on_scheduled)
        events.subscribe(RequestPreempted, self.step_log.add_preemption)
        events.subscribe(RequestPreempted, self._queued.preempt)
        events.subscribe(RequestFinished, self.ended.append)
        events.subscribe(RequestFinished, self._queued.end)
        events.subscribe(StepDone, self._on_step)

    def _on_scheduled(self, event: RequestScheduled) -> None:
        self.scheduled[event.request_id] = event
        self._queued.schedule(event)

    def _on_step(self, event: StepDone) -> None:
        self._queued.compute(event.num_prefill_tokens)
        self.step_log.add(event, self.clock.now(), self.engine.kv)

    @property
    def busy(self) -> bool:
        """Whether a step could compute something."""
        return not self.stalled and self.engine.has_work()

    def submit(self, request: Request, now_s: float) -> None:
        """Adds a request to the engine. Raises as the engine does for a request that cannot be served."""
        self._be_idle(now_s)
        if not self.engine.has_work():
            self.clock.advance_to(now_s)
            self._queued.total = 0
        self.wake()
        self.engine.add(request)
        self._queued.submit(request.request_id, len(request.tokens), self.num_cached(request))

    def _be_idle(self, until_s: float) -> None:
        """Lets an idle engine load KV that no request waits for."""
        engine, clock = self.engine, self.clock
        while not engine.has_work() and (idle_s := engine.idle_s()) is not None:
            if clock.now() + idle_s >= until_s:
                return
            clock.advance(max(idle_s, LEAST_IDLE_S))
            while engine.has_work() and clock.now() < until_s:
                engine.step()

    def wake(self) -> None:
        """Ends a pause after an outside change, which may let a request continue."""
        self.stalled, self._idle_s, self._pause_s = False, 0.0, FIRST_PAUSE_S

    def advance(self, until_s: float, next_event_s: float) -> None:
        """Runs steps until `until_s`, the end of a request, or no work is left. If a step computes
        nothing, the clock still advances, but not beyond the next event: only time or an event can change
        the engine's decision."""
        engine, ended, now = self.engine, self.ended, self.clock.now
        while True:
            steps = None
            if self.token_times.steady and isinstance(engine, SimulatedEngine):
                steps = engine.fast_forward(until_s)
            if steps is not None:
                self.step_began_s = steps.times_s[-2]
                self.step_log.add_equal_steps(steps, engine.kv)
                self._queued.compute(steps.num_steps * steps.num_prefill_tokens)
            else:
                self._step(next_event_s)
            if ended or now() >= until_s or self.stalled or not engine.has_work():
                break
        for event in ended:
            self.token_times.end(event.request_id, len(self.step_log))

    def _step(self, next_event_s: float) -> None:
        engine, step_log, number = self.engine, self.step_log, len(self.step_log)
        began_s = self.step_began_s = self.clock.now()
        self.outputs = engine.step()
        if len(step_log) > number:
            plan = engine.last_plan
            assert plan is not None
            step_log.observe(plan.prefills)
            self.token_times.observe(number, plan)
            if self._idle_s:
                self.wake()
        elif not self.outputs and self.clock.now() == began_s:  # else it has waited for KV
            self._pause(next_event_s)

    def _pause(self, next_event_s: float) -> None:
        now_s = self.clock.now()
        until_s = min(now_s + self._pause_s, next_event_s)
        self._idle_s += until_s - now_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self.clock.advance_to(until_s)
        self.stalled = self._idle_s > PATIENCE_S

    def take_ended(self) -> list[tuple[RequestFinished, str]]:
        """Returns the requests that ended since the last call.

        With each comes why it failed, or "". Call it after each `advance`."""
        taken = [(event, self._error_of(event)) for event in self.ended]
        self.ended.clear()
        return taken

    def _error_of(self, event: RequestFinished) -> str:
        if event.reason != FinishReason.ERROR.value:
            return ""
        name = event.request_id
        errors = [output.error for output in self.outputs if output.request_id == name and output.error]
        return errors[-1] if errors else "the engine gave no reason"

    def num_cached(self, request: Request) -> int:
        """Tokens of a prompt that are cached on the device now, without its last."""
        kv, most = self.engine.kv, len(request.tokens) - 1
        return kv.index.lookup(request.tokens, kv.namespace_of(request.namespace), most).num_tokens

    def _utilization(self) -> float:
        """Share of the last `WINDOW_S` seconds in which it computed, as `LoadMeter` has it."""
        log, now_s = self.step_log, self.clock.now()
        window_s = min(WINDOW_S, now_s)
        busy_s = sum(log.durations_s[bisect_right(log.ends_s, now_s - window_s) :])
        return min(1.0, busy_s / window_s) if window_s else 0.0

    def report(self, reported_s: float, num_expected: int = 0) -> ExecutionInstance:
        """What a router learns. `num_expected`: requests whose KV is on its way here."""
        engine, kv = self.engine, self.engine.kv
        stats, capability = engine.stats(), engine.backend.capability()
        blocks = stats.blocks_active + stats.blocks_cached + stats.blocks_free
        return ExecutionInstance(
            self.name,
            KINDS[self.role],
            num_waiting=stats.num_waiting + num_expected,
            num_running=stats.num_running,
            num_queued_tokens=self._queued.total,
            num_free_blocks=stats.blocks_free + stats.blocks_cached,
            num_blocks=blocks,
            block_size=kv.block_size,
            max_num_seqs=engine.max_num_seqs,
            kv_cache_usage=stats.blocks_active / blocks,
            eviction_count=sum(kv.allocator.num_evicted.values()),
            utilization=self._utilization(),
            prefill_token_s=capability.prefill_token_s,
            prefill_token_squared_s=capability.prefill_token_squared_s,
            step_s=self.step_log.decode_step_s,
            reported_s=reported_s,
        )
