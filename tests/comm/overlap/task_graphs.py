"""Random task graphs, and the shortest schedule of a tiny one."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from sagellm.core.protocols.overlap import Task

COMPUTE_LANES, COMM_LANES = ("gpu:0", "gpu:1"), ("link:0", "link:1")
DURATIONS = st.one_of(st.just(0.0), st.integers(1, 5).map(float), st.floats(0.001, 3.0))
Tasks = tuple[list[Task], list[Task]]


@st.composite
def task_graphs(draw: st.DrawFn, most: int = 12) -> Tasks:
    """Computation and communication on up to two lanes each, given in any order."""
    compute: list[Task] = []
    comm: list[Task] = []
    names: list[str] = []
    for number in range(draw(st.integers(0, most))):
        after = draw(st.frozensets(st.sampled_from(names), max_size=3)) if names else frozenset()
        is_comm = draw(st.booleans())
        lane = draw(st.sampled_from(COMM_LANES if is_comm else COMPUTE_LANES))
        (comm if is_comm else compute).append(Task(f"t{number}", lane, draw(DURATIONS), after))
        names.append(f"t{number}")
    return draw(st.permutations(compute)), draw(st.permutations(comm))


def shortest_s(tasks: Sequence[Task]) -> float:
    """The least makespan, by trying every order in which lanes may take the tasks. For up to 8 tasks."""
    best_s = sum(task.duration_s for task in tasks)

    def extend(ends_s: dict[str, float], free_s: dict[str, float], makespan_s: float) -> None:
        nonlocal best_s
        if makespan_s >= best_s and ends_s:
            return
        if len(ends_s) == len(tasks):
            best_s = makespan_s
        for task in tasks:
            if task.name not in ends_s and task.after <= ends_s.keys():
                ready_s = max((ends_s[name] for name in task.after), default=0.0)
                end_s = max(ready_s, free_s.get(task.lane, 0.0)) + task.duration_s
                extend({**ends_s, task.name: end_s}, {**free_s, task.lane: end_s}, max(makespan_s, end_s))

    extend({}, {}, 0.0)
    return best_s
