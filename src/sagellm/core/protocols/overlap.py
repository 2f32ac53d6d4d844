"""Contract of overlap: which communication runs behind which computation.

`OverlapManager.schedule` only plans. It keeps every dependency, runs each task once and each lane (a stream,
a link, a core) one task at a time; the slow exact twin of any manager is the serial order, and no schedule
may be longer than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of work on one lane. `duration_s` is an estimate; the order stays right where it is wrong."""

    name: str
    lane: str
    duration_s: float
    after: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.duration_s < 0:
            raise ValueError(f"task {self.name!r}: duration_s must be >= 0, got {self.duration_s}")
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
    """Slots in order of start. `serial_s` is the sum of all durations, what no overlap at all would take."""

    slots: tuple[Slot, ...]
    serial_s: float

    @property
    def makespan_s(self) -> float:
        return max((slot.end_s for slot in self.slots), default=0.0)

    def hidden_fraction(self, comm_lanes: frozenset[str]) -> float:
        """Share of communication time during which computation runs, 0 to 1. 1 where there is no
        communication."""
        comm = [slot for slot in self.slots if slot.task.lane in comm_lanes]
        total_s = sum(slot.task.duration_s for slot in comm)
        if total_s == 0.0:
            return 1.0
        busy = _merge([slot for slot in self.slots if slot.task.lane not in comm_lanes])
        covered = (min(slot.end_s, end) - max(slot.start_s, start) for slot in comm for start, end in busy)
        return sum(max(0.0, seconds) for seconds in covered) / total_s


def _merge(slots: Sequence[Slot]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start_s, end_s in sorted((slot.start_s, slot.end_s) for slot in slots):
        if merged and start_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_s))
        else:
            merged.append((start_s, end_s))
    return merged


class OverlapManager(Protocol):
    """Puts tasks into lanes and time."""

    def schedule(self, compute_tasks: Sequence[Task], comm_tasks: Sequence[Task]) -> OverlapSchedule:
        """Place the tasks in time. Raises `ValueError`, naming the tasks, for a cycle, a duplicate name, or a
        dependency on a task in neither list."""
