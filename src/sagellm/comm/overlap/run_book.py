"""`RunBook`: which tasks of a run have run, failed or been skipped."""

from __future__ import annotations

from dataclasses import replace

from sagellm.core.errors import TaskFailedError
from sagellm.core.protocols.overlap import OverlapRun, OverlapSchedule, Slot, Task, Work


class RunBook:
    """One run's outcomes, from the check of its input to its result. Lanes' threads may share it."""

    def __init__(self, schedule: OverlapSchedule, work: Work) -> None:
        schedule.check()
        names = {slot.task.name for slot in schedule.slots}
        if names != work.keys():
            missing, unknown = sorted(names - work.keys()), sorted(work.keys() - names)
            problem = f"has nothing for task {missing[0]!r}" if missing else f"names no task: {unknown[0]!r}"
            raise ValueError(f"work {problem}; give one callable for each of the {len(names)} tasks")
        self._schedule = schedule
        self._ran: dict[str, Slot] = {}
        self._skipped: set[str] = set()
        self._failures: list[tuple[str, BaseException]] = []
        self._is_cancelled = False

    def cancel(self) -> None:
        self._is_cancelled = True

    def may_begin(self, task: Task) -> bool:
        """Whether to run the task; if not, it is skipped. What it waits for has ended."""
        if self._is_cancelled or not self._skipped.isdisjoint(task.after):
            self._skipped.add(task.name)
            return False
        return True

    def ran(self, task: Task, start_s: float, duration_s: float) -> None:
        """Record when the task started, since the run began, and how long it took."""
        self._ran[task.name] = Slot(replace(task, duration_s=duration_s), start_s)

    def failed(self, task: Task, error: BaseException) -> None:
        self._skipped.add(task.name)
        self._failures.append((task.name, error))

    def result(self) -> OverlapRun:
        """What ran. Raises `TaskFailedError` if a task failed, which holds it too."""
        slots = [self._ran[slot.task.name] for slot in self._schedule.slots if slot.task.name in self._ran]
        skipped = [slot.task.name for slot in self._schedule.slots if slot.task.name in self._skipped]
        slots.sort(key=lambda slot: slot.start_s)
        comm = self._schedule.comm.intersection(self._ran)
        run = OverlapRun(OverlapSchedule(tuple(slots), comm), tuple(skipped))
        if self._failures:
            name, error = self._failures[0]
            others = f", and {len(skipped) - 1} others did not run" if len(skipped) > 1 else ""
            text = f"task {name!r} failed ({type(error).__name__}: {error}){others}"
            raise TaskFailedError(text, name, run) from error
        return run
