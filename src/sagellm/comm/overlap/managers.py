"""List scheduling by the critical path, and its slow twin, the serial order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from heapq import heappop, heappush

from sagellm.comm.overlap.graph import TaskGraph
from sagellm.core.protocols.overlap import OverlapSchedule, Slot, Task


class CriticalPathManager:
    """A free lane takes the ready task with the longest path behind it.

    This is list scheduling with the rule of Hu 1961 and Adam, Chandy and Dickson 1974 (highest level first).
    As lanes are given, the problem is a job shop, for which no algorithm is known that is exact and fast. The
    rule is applied to the graph and to the reversed graph, and the shorter schedule counts. No lane waits
    while it has a ready task, so at any time some lane works, and no schedule is longer than the serial
    order. O(n log n) for n tasks and dependencies.
    """

    def schedule(self, compute_tasks: Sequence[Task], comm_tasks: Sequence[Task]) -> OverlapSchedule:
        graph = TaskGraph.of(compute_tasks, comm_tasks)
        forward = graph.placed(_dispatch(graph))
        backward = graph.placed(_dispatch(graph.reversed())[::-1])
        return min(forward, backward, key=lambda schedule: schedule.makespan_s)


class SerialManager:
    """One task after the other: what the same tasks take without overlap."""

    def schedule(self, compute_tasks: Sequence[Task], comm_tasks: Sequence[Task]) -> OverlapSchedule:
        graph = TaskGraph.of(compute_tasks, comm_tasks)
        slots, now_s = [], 0.0
        for index in graph.order:
            slots.append(Slot(graph.tasks[index], now_s))
            now_s = slots[-1].end_s
        return OverlapSchedule(tuple(slots), graph.comm)


def _dispatch(graph: TaskGraph) -> list[int]:
    """The indices in the order in which lanes take them."""
    tails_s, waits = graph.tails_s(), list(map(len, graph.before))
    ready: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
    running: list[tuple[float, int]] = []
    busy: set[str] = set()
    taken: list[int] = []

    def enqueue(index: int) -> None:
        heappush(ready[graph.tasks[index].lane], (-tails_s[index], index))

    def take(lane: str, now_s: float) -> None:
        if ready[lane] and lane not in busy:
            _, index = heappop(ready[lane])
            busy.add(lane)
            taken.append(index)
            heappush(running, (now_s + graph.tasks[index].duration_s, index))

    for index, number in enumerate(waits):
        if not number:
            enqueue(index)
    for lane in list(ready):
        take(lane, 0.0)
    while running:
        now_s, lanes = running[0][0], dict[str, None]()
        while running and running[0][0] == now_s:
            _, index = heappop(running)
            busy.discard(graph.tasks[index].lane)
            lanes[graph.tasks[index].lane] = None
            for successor in graph.successors[index]:
                waits[successor] -= 1
                if not waits[successor]:
                    enqueue(successor)
                    lanes[graph.tasks[successor].lane] = None
        for lane in lanes:
            take(lane, now_s)
    return taken
