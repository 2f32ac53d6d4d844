"""What one instance did: a row of figures per step, and which steps gave each request its tokens."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from operator import sub

import numpy as np
from numpy.typing import NDArray

from sagellm.core.clock import Clock
from sagellm.core.errors import BookkeepingError
from sagellm.core.events import EventBus, RequestPreempted, StepDone
from sagellm.core.plan import ExecutionPlan, Prefill
from sagellm.engines.simulator.fast_forward import EqualSteps
from sagellm.kvmgr.manager import KVCacheManager
from sagellm.kvmgr.manager.sequence import BlockStates

KV_EVERY = 16
"""Steps from one look at the KV pool to the next."""


class Course:
    """The steps of one engine that computed something, as columns; filled from its events.

    `ends_s[i]`: when step i ended; `durations_s`, `prefill_tokens`, `decode_tokens`, `running`, `waiting`:
    the same step. `kv_steps`, `kv_active`, `kv_cached`: blocks after every `KV_EVERY` steps or more.
    `preemptions` counts by request; `num_recomputed`: prefill tokens that a preempted one had computed
    before.
    """

    def __init__(self, events: EventBus, clock: Clock, kv: KVCacheManager) -> None:
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
        self._lost: dict[str, int] = {}
        self._now = clock.now
        self._block_states: Callable[[], BlockStates] | None = kv.block_states
        events.subscribe(StepDone, self._on_step)
        events.subscribe(RequestPreempted, self._on_preempted)

    def __len__(self) -> int:
        return len(self.ends_s)

    def _on_step(self, step: StepDone) -> None:
        if not step.num_prefill_tokens and not step.num_decode_tokens:
            return
        self._look(len(self.ends_s))
        self.ends_s.append(self._now())
        self.durations_s.append(step.duration_s)
        self.prefill_tokens.append(step.num_prefill_tokens)
        self.decode_tokens.append(step.num_decode_tokens)
        self.running.append(step.num_running)
        self.waiting.append(step.num_waiting)

    def add_equal_steps(self, steps: EqualSteps) -> None:
        """Steps that the engine took at once."""
        ends_s = array("d", steps.times_s[1:])
        self.durations_s.extend(map(sub, ends_s, steps.times_s))
        self.ends_s.extend(ends_s)
        self._look(len(self.ends_s) - 1)
        for column, value in (
            (self.prefill_tokens, steps.num_prefill_tokens),
            (self.decode_tokens, steps.num_decodes),
            (self.running, steps.num_decodes + bool(steps.prefills)),
            (self.waiting, steps.num_waiting),
        ):
            column.extend(array("q", (value,)) * steps.num_steps)
        self.running[-1] -= steps.num_ended
        self.observe(steps.prefills)

    def _look(self, step: int) -> None:
        """At the KV pool behind a step, now and then."""
        looked = self.kv_steps[-1] if self.kv_steps else -KV_EVERY
        if step - looked >= KV_EVERY and self._block_states is not None:
            active, cached, _ = self._block_states()
            self.kv_steps.append(step)
            self.kv_active.append(active)
            self.kv_cached.append(cached)

    def _on_preempted(self, event: RequestPreempted) -> None:
        name = event.request_id
        self.preemptions[name] = self.preemptions.get(name, 0) + 1
        self._lost[name] = max(self._lost.get(name, 0), event.num_computed_tokens)

    def detach(self) -> None:
        """The engine is not needed any more: what was noted stays."""
        self._block_states = None

    def observe(self, prefills: Sequence[Prefill]) -> None:
        """Count what is computed a second time."""
        for op in prefills if self._lost else ():
            lost = self._lost.get(op.request_id, 0)
            self.num_recomputed += max(0, min(op.start + op.num_tokens, lost) - op.start)


class TokenTimes:
    """When each request got its tokens, as runs of consecutive steps: work per step is by what changes.

    A request that decodes gets a token in each step, so only the beginning and the end of a run are noted:
    the step that completes its prompt, a preemption, a step that leaves it out, its last token.
    """

    def __init__(self) -> None:
        self._began: dict[str, int] = {}
        self._held: set[str] = set()
        self._names: dict[int, str] = {}
        self._runs: dict[str, list[tuple[int, int]]] = {}

    @property
    def steady(self) -> bool:
        """Whether nobody in decode is left out: then steps that only decode need not be observed."""
        return not self._held

    def observe(self, step: int, plan: ExecutionPlan) -> None:
        """The plan of a step that has been executed, before `ended` for those whose last it was."""
        began, new = self._began, 0
        quiet = not (plan.prefills or plan.preempted or plan.joined or self._held)
        if quiet and len(plan.decode_rows) == len(began):
            return
        for name in plan.preempted:
            self._stop(name, step)
        for join in plan.joined:
            self._names[join.row] = join.request_id
        for op in plan.prefills:
            if op.samples:
                began[op.request_id] = step
                self._held.discard(op.request_id)
                new += 1
        if self._held or len(plan.decode_rows) != len(began) - new:
            self._see_rows(step, plan)

    def _see_rows(self, step: int, plan: ExecutionPlan) -> None:
        """The slow path: some requests in decode are left out."""
        names = self._names
        present = {names[row] for row in plan.decode_rows}
        for name in [one for one, at in self._began.items() if at < step and one not in present]:
            self._stop(name, step)
            self._held.add(name)
        for name in present - self._began.keys():
            self._began[name] = step
            self._held.discard(name)

    def _stop(self, name: str, step: int) -> None:
        began = self._began.pop(name, None)
        self._held.discard(name)
        if began is not None and began < step:
            self._runs.setdefault(name, []).append((began, step))

    def ended(self, name: str, step: int) -> None:
        """The request ended before step number `step`."""
        self._stop(name, step)

    def of(self, name: str, ends_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """The moments of the request's tokens; `ends_s`: the ends of all steps."""
        runs = self._runs.get(name, ())
        parts = [ends_s[begin:end] for begin, end in runs]
        return np.concatenate(parts) if parts else np.empty(0)


def gaps(moments: Mapping[str, NDArray[np.float64]], expected: Mapping[str, int]) -> NDArray[np.float64]:
    """Seconds from each token to the next of its request, over all of them. Raises `BookkeepingError` where
    a request has other tokens than `expected`."""
    for name, times in moments.items():
        if len(times) != expected[name]:
            raise BookkeepingError(
                f"request {name} drew {expected[name]} tokens, the steps' plans have {len(times)} of them"
            )
    found = [np.diff(times) for times in moments.values()]
    return np.concatenate(found) if found else np.empty(0)
