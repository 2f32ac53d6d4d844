"""Contract of overlap: which communication runs behind which computation.

    schedule = manager.schedule(compute_tasks, comm_tasks)      plans, runs nothing
    run = executor.run(schedule, work)                          `work`: a callable for each task

A lane (a stream, a link, a thread) runs one task at a time, in the order of the schedule. The slow exact twin
of any manager is the serial order, and no schedule may be longer than that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of work on one lane. `duration_s` is an estimate; the order stays right where it is wrong."""

    name: str
    lane: str
    duration_s: float
    after: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not 0 <= self.duration_s < math.inf:
            raise ValueError(f"task {self.name!r}: duration_s must be >= 0 and finite, got {self.duration_s}")
        if self.name in self.after:
            raise ValueError(f"task {self.name!r} waits for itself")


@dataclass(frozen=True, slots=True)
class Slot:
    """A task with its place in time, from the start of the schedule."""

    task: Task
    start_s: float

    @property
    def end_s(self) -> float:
        return self.start_s + self.task.duration_s


@dataclass(frozen=True, slots=True)
class OverlapSchedule:
    """Slots in order of start, as planned or as measured. `comm` names the tasks that communicate.

    In a measured one the tasks have their measured durations.
    """

    slots: tuple[Slot, ...]
    comm: frozenset[str] = field(default_factory=frozenset)

    @property
    def makespan_s(self) -> float:
        return max((slot.end_s for slot in self.slots), default=0.0)

    @property
    def serial_s(self) -> float:
        """The sum of all durations: what it takes without any overlap."""
        return math.fsum(slot.task.duration_s for slot in self.slots)

    @property
    def hidden_fraction(self) -> float:
        """Overlapped time / min(compute time, communication time), 0 to 1.

        The times are those in which at least one task of the kind runs; the overlapped time has tasks of both
        kinds. 1 where a kind takes no time: there is nothing to hide.
        """
        compute = _merge(slot for slot in self.slots if slot.task.name not in self.comm)
        comm = _merge(slot for slot in self.slots if slot.task.name in self.comm)
        shorter_s = min(_total_s(compute), _total_s(comm))
        return _common_s(compute, comm) / shorter_s if shorter_s else 1.0

    @property
    def idle_shares(self) -> dict[str, float]:
        """By lane, the share of the makespan in which it runs nothing. 0 where that is 0."""
        busy_s: dict[str, float] = {}
        for slot in self.slots:
            busy_s[slot.task.lane] = busy_s.get(slot.task.lane, 0.0) + slot.task.duration_s
        whole_s = self.makespan_s
        return {lane: max(0.0, 1 - own_s / whole_s) if whole_s else 0.0 for lane, own_s in busy_s.items()}

    def check(self, tolerance_s: float = 0.0) -> None:
        """Raise `ValueError` for a schedule that breaks a rule.

        The rules: slots are in order of start, a task runs once, a lane runs one task at a time, and a task
        starts when all that it waits for has ended. `tolerance_s` is for measured times.
        """
        ends_s: dict[str, float] = {}
        free_s: dict[str, float] = {}
        last_s = 0.0
        for slot in self.slots:
            task = slot.task
            missing = sorted(name for name in task.after if name not in ends_s)
            if missing:
                raise ValueError(f"task {task.name!r} is in front of {missing[0]!r}, which it waits for")
            if task.name in ends_s:
                raise ValueError(f"task {task.name!r} runs twice")
            earliest_s = max((ends_s[name] for name in task.after), default=0.0)
            earliest_s = max(last_s, earliest_s, free_s.get(task.lane, 0.0)) - tolerance_s
            if slot.start_s < earliest_s:
                raise ValueError(f"task {task.name!r} starts at {slot.start_s} s, it can at {earliest_s} s")
            ends_s[task.name] = free_s[task.lane] = slot.end_s
            last_s = slot.start_s
        unknown = sorted(self.comm - ends_s.keys())
        if unknown:
            raise ValueError(f"no slot has the communication task {unknown[0]!r}")


def _merge(slots: Iterable[Slot]) -> list[Interval]:
    """The times in which a slot runs, in order, without gaps of no length."""
    merged: list[Interval] = []
    for start_s, end_s in sorted((slot.start_s, slot.end_s) for slot in slots):
        if merged and start_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_s))
        else:
            merged.append((start_s, end_s))
    return merged


def _total_s(intervals: Sequence[Interval]) -> float:
    return math.fsum(end_s - start_s for start_s, end_s in intervals)


def _common_s(some: Sequence[Interval], others: Sequence[Interval]) -> float:
    """Seconds that lie in intervals of both; each is in order."""
    common_s, i, j = 0.0, 0, 0
    while i < len(some) and j < len(others):
        end_s = min(some[i][1], others[j][1])
        common_s += max(0.0, end_s - max(some[i][0], others[j][0]))
        if some[i][1] == end_s:
            i += 1
        else:
            j += 1
    return common_s


class OverlapManager(Protocol):
    """Puts tasks into lanes and time."""

    def schedule(self, compute_tasks: Sequence[Task], comm_tasks: Sequence[Task]) -> OverlapSchedule:
        """Place the tasks in time. Raises `ValueError`, naming the tasks, for a cycle, a duplicate name, or a
        dependency on a task in neither list."""


Work = Mapping[str, Callable[[], object]]
"""What to call for each task, by its name."""


@dataclass(frozen=True, slots=True)
class OverlapRun:
    """What ran and when. `skipped`: tasks that did not, in the order of the schedule."""

    timeline: OverlapSchedule
    skipped: tuple[str, ...] = ()


class OverlapExecutor(Protocol):
    """Runs schedules, one at a time."""

    def run(self, schedule: OverlapSchedule, work: Work) -> OverlapRun:
        """Run every task once, and return when all have ended.

        A task runs in the order of its lane, after all that it waits for.

        Raises `ValueError` for a schedule that fails `check` and for `work` that does not have exactly its
        tasks. A task that raises is skipped with all that wait for it, directly or not; the others run, then
        `TaskFailedError` names the first to fail.
        """

    def cancel(self) -> None:
        """Skip the tasks that have not begun; from any thread, or a task. Without a run it does nothing."""
