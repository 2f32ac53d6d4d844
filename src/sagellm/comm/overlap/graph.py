"""`TaskGraph`: checked tasks, and their places in time once an order is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from sagellm.core.protocols.overlap import OverlapSchedule, Slot, Task

Edges = list[list[int]]
"""By task, the indices of its neighbours in one direction."""


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """Checked tasks by index: computation, then communication, in the order given.

    `before` has what each waits for, `successors` what waits for it. `order` is topological.
    """

    tasks: Sequence[Task]
    comm: frozenset[str]
    before: Edges
    successors: Edges
    order: list[int]

    @classmethod
    def of(cls, compute_tasks: Sequence[Task], comm_tasks: Sequence[Task]) -> Self:
        """Takes linear time. Raises `ValueError` as `OverlapManager.schedule` does."""
        tasks = (*compute_tasks, *comm_tasks)
        index_of = {task.name: index for index, task in enumerate(tasks)}
        if len(index_of) < len(tasks):
            twice = next(task for index, task in enumerate(tasks) if index_of[task.name] != index)
            raise ValueError(f"two tasks are named {twice.name!r}: give each a name of its own")
        before: Edges = []
        successors: Edges = [[] for _ in tasks]
        for index, task in enumerate(tasks):
            unknown = sorted(name for name in task.after if name not in index_of)
            if unknown:
                raise ValueError(f"task {task.name!r} waits for {unknown[0]!r}, which is no task")
            before.append([index_of[name] for name in task.after])
            for name in task.after:
                successors[index_of[name]].append(index)
        comm = frozenset(task.name for task in comm_tasks)
        return cls(tasks, comm, before, successors, _sorted(tasks, before, successors))

    def reversed(self) -> TaskGraph:
        """The same tasks with every dependency turned round."""
        return TaskGraph(self.tasks, self.comm, self.successors, self.before, self.order[::-1])

    def tails_s(self) -> list[float]:
        """By task, the longest path from its start to the end of the graph."""
        tails_s = [0.0] * len(self.tasks)
        for index in reversed(self.order):
            behind_s = max((tails_s[after] for after in self.successors[index]), default=0.0)
            tails_s[index] = self.tasks[index].duration_s + behind_s
        return tails_s

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


def _sorted(tasks: Sequence[Task], before: Edges, successors: Edges) -> list[int]:
    """Topological order (Kahn 1962). Tasks that wait for nothing come in the order given."""
    waits = list(map(len, before))
    order = [index for index, number in enumerate(waits) if not number]
    for index in order:  # grows
        for successor in successors[index]:
            waits[successor] -= 1
            if not waits[successor]:
                order.append(successor)
    if len(order) < len(tasks):
        names = " -> ".join(tasks[index].name for index in _cycle(before, waits))
        raise ValueError(f"these tasks wait for each other: {names}")
    return order


def _cycle(before: Edges, waits: Sequence[int]) -> list[int]:
    """A cycle of tasks, each waiting for the next. `waits`: by task, how many are never done."""
    index = next(index for index, number in enumerate(waits) if number)
    place: dict[int, int] = {}
    while index not in place:
        place[index] = len(place)
        index = next(earlier for earlier in before[index] if waits[earlier])
    return [*list(place)[place[index] :], index]
