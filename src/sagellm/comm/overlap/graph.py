"""`TaskGraph`: checked tasks with their successors, and the longest path behind each."""

from __future__ import annotations

from collections.abc import Sequence

from sagellm.core.protocols.overlap import OverlapSchedule, Slot, Task


class TaskGraph:
    """Tasks by index, in the order given: computation, then communication.

    Takes linear time in tasks and dependencies. Raises `ValueError` as `OverlapManager.schedule` does.
    """

    def __init__(self, compute_tasks: Sequence[Task], comm_tasks: Sequence[Task]) -> None:
        self.tasks = (*compute_tasks, *comm_tasks)
        self.comm = frozenset(task.name for task in comm_tasks)
        index_of = {task.name: index for index, task in enumerate(self.tasks)}
        if len(index_of) < len(self.tasks):
            twice = next(task for index, task in enumerate(self.tasks) if index_of[task.name] != index)
            raise ValueError(f"two tasks are named {twice.name!r}: give each a name of its own")
        self.before: list[list[int]] = []
        self.successors: list[list[int]] = [[] for _ in self.tasks]
        for index, task in enumerate(self.tasks):
            unknown = sorted(task.after - index_of.keys())
            if unknown:
                raise ValueError(f"task {task.name!r} waits for {unknown[0]!r}, which is no task")
            self.before.append([index_of[name] for name in task.after])
            for name in task.after:
                self.successors[index_of[name]].append(index)
        self.order = self._sorted()

    def _sorted(self) -> list[int]:
        """Topological order (Kahn 1962); tasks that wait for nothing come in the order given."""
        waits = list(map(len, self.before))
        order = [index for index, number in enumerate(waits) if not number]
        for index in order:  # grows
            for successor in self.successors[index]:
                waits[successor] -= 1
                if not waits[successor]:
                    order.append(successor)
        if len(order) < len(self.tasks):
            raise ValueError(f"these tasks wait for each other: {' -> '.join(self._cycle(waits))}")
        return order

    def _cycle(self, waits: Sequence[int]) -> list[str]:
        """Names along one cycle, each waiting for the next. `waits`: what was left of each task's number."""
        index = next(index for index, number in enumerate(waits) if number)
        place: dict[int, int] = {}
        while index not in place:
            place[index] = len(place)
            index = next(before for before in self.before[index] if waits[before])
        return [self.tasks[i].name for i in (*list(place)[place[index] :], index)]

    def tails_s(self) -> list[float]:
        """By task, the longest path from its start to the end of the graph."""
        tails_s = [0.0] * len(self.tasks)
        for index in reversed(self.order):
            behind_s = max((tails_s[after] for after in self.successors[index]), default=0.0)
            tails_s[index] = self.tasks[index].duration_s + behind_s
        return tails_s

    def reversed(self) -> TaskGraph:
        """The same tasks with every dependency turned round."""
        turned = [
            Task(task.name, task.lane, task.duration_s, frozenset(self.tasks[i].name for i in successors))
            for task, successors in zip(self.tasks, self.successors, strict=True)
        ]
        return TaskGraph(turned, ())

    def placed(self, order: Sequence[int]) -> OverlapSchedule:
        """Start each task as early as its lane and what it waits for allow.

        `order`: all indices, each task behind those that it waits for.
        """
        free_s: dict[str, float] = {}
        starts_s, ends_s = [0.0] * len(self.tasks), [0.0] * len(self.tasks)
        for index in order:
            task = self.tasks[index]
            ready_s = max((ends_s[before] for before in self.before[index]), default=0.0)
            starts_s[index] = max(ready_s, free_s.get(task.lane, 0.0))
            ends_s[index] = free_s[task.lane] = Slot(task, starts_s[index]).end_s
        by_start = sorted(order, key=starts_s.__getitem__)  # stable: tasks of no length stay in order
        return OverlapSchedule(tuple(Slot(self.tasks[i], starts_s[i]) for i in by_start), self.comm)
