"""One instance: the real engine with a clock of its own, and what is noted of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from sagellm.benchmarks.simulate.course import Course, TokenTimes
from sagellm.core.clock import ManualClock
from sagellm.core.config import Config
from sagellm.core.events import EventBus, RequestFinished, RequestScheduled
from sagellm.core.protocols.engine import InferenceBackend
from sagellm.core.protocols.router import InstanceLoad
from sagellm.core.types import Request, RequestOutput
from sagellm.engines.build import build_engine
from sagellm.engines.simulator.fast_forward import SimulatedEngine

Role = Literal["both", "prefill", "decode"]
BackendFactory = Callable[["InstanceClock", Config], InferenceBackend]
"""Makes the backend of an instance; it advances that clock by what each step takes."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 1.0
PATIENCE_S = 120.0
"""Simulated seconds after which an engine that has work and computes nothing counts as stalled."""


class InstanceClock(ManualClock):
    """A manual clock that can also be set, so that an arrival meets its moment exactly."""

    def advance_to(self, moment_s: float) -> None:
        """Forward to that moment; where it has passed, nothing."""
        self._now_s = max(self._now_s, moment_s)


class Instance:
    """An engine, its role, and what it did. `ended`: events of requests that ended, until they are taken."""

    def __init__(self, name: str, config: Config, backend: BackendFactory, role: Role = "both") -> None:
        self.name = name
        self.role = role
        self.clock = InstanceClock()
        events = EventBus()
        self.engine = build_engine(config, backend(self.clock, config), clock=self.clock, events=events)
        self.course = Course(events, self.clock, self.engine.kv)
        self.token_times = TokenTimes()
        self.scheduled: dict[str, RequestScheduled] = {}
        self.ended: list[RequestFinished] = []
        self.outputs: Sequence[RequestOutput] = ()
        self.stalled = False
        self._idle_s = 0.0
        self._pause_s = FIRST_PAUSE_S
        events.subscribe(RequestScheduled, self._on_scheduled)
        events.subscribe(RequestFinished, self.ended.append)

    def _on_scheduled(self, event: RequestScheduled) -> None:
        self.scheduled[event.request_id] = event

    @property
    def busy(self) -> bool:
        """Whether a step could do something."""
        return not self.stalled and self.engine.has_work()

    def submit(self, request: Request, now_s: float) -> None:
        """Hand a request to the engine; raises what the engine raises for one that it can never serve."""
        if not self.engine.has_work():
            self.clock.advance_to(now_s)
        self.wake()
        self.engine.add(request)

    def wake(self) -> None:
        """Something outside changed: whoever could not go on may now."""
        self.stalled, self._idle_s, self._pause_s = False, 0.0, FIRST_PAUSE_S

    def advance(self, until_s: float, next_event_s: float) -> None:
        """Steps of the engine, those that begin before `until_s`, until a request ends or there is no work.

        Where a step computes nothing, time passes all the same: a moment, but not beyond the next event,
        since only time or an event can change the engine's mind.
        """
        engine, ended, now = self.engine, self.ended, self.clock.now
        while True:
            steps = None
            if self.token_times.steady and isinstance(engine, SimulatedEngine):
                steps = engine.fast_forward(until_s)
            if steps is not None:
                self.course.add_equal_steps(steps)
            else:
                self._step(next_event_s)
            if ended or now() >= until_s or self.stalled or not engine.has_work():
                break
        for event in ended:
            self.token_times.ended(event.request_id, len(self.course))

    def _step(self, next_event_s: float) -> None:
        engine, course, number = self.engine, self.course, len(self.course)
        self.outputs = engine.step()
        if len(course) > number:
            plan = engine.last_plan
            assert plan is not None
            course.observe(plan.prefills)
            self.token_times.observe(number, plan)
            if self._idle_s:
                self.wake()
        elif not self.outputs:
            self._pause(next_event_s)

    def _pause(self, next_event_s: float) -> None:
        now_s = self.clock.now()
        until_s = min(now_s + self._pause_s, next_event_s)
        self._idle_s += until_s - now_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self.clock.advance_to(until_s)
        self.stalled = self._idle_s > PATIENCE_S

    def take_ended(self) -> list[RequestFinished]:
        """Those that ended since the last call."""
        taken = self.ended[:]
        self.ended.clear()
        return taken

    def error_of(self, request_id: str) -> str:
        """Why a request failed in the last step."""
        errors = [one.error for one in self.outputs if one.request_id == request_id and one.error]
        return errors[-1] if errors else "the engine gave no reason"

    def load(self, request: Request | None = None) -> InstanceLoad:
        """For a router; with a request, how many of its blocks are cached here."""
        stats, cached = self.engine.stats(), 0
        if request is not None:
            kv = self.engine.kv
            namespace = kv.namespace_of(request.namespace)
            cached = kv.index.lookup(request.tokens, namespace).num_blocks
        free = stats.blocks_free + stats.blocks_cached
        return InstanceLoad(self.name, stats.num_waiting, stats.num_running, free, cached)
