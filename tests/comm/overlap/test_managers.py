"""Managers keep every dependency, are never longer than the serial order, and come near the best."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings

from sagellm.comm.overlap.graph import TaskGraph
from sagellm.comm.overlap.managers import CriticalPathManager, SerialManager, _dispatch
from sagellm.core.protocols.overlap import OverlapManager, OverlapSchedule, Task
from tests.comm.overlap.task_graphs import COMM_LANES, COMPUTE_LANES, Tasks, shortest_s, task_graphs

MANAGERS = [CriticalPathManager, SerialManager]


def tasks(*given: tuple[str, str, float, str]) -> list[Task]:
    return [Task(name, lane, duration_s, frozenset(after.split())) for name, lane, duration_s, after in given]


@pytest.mark.parametrize("manager", MANAGERS)
@given(graph=task_graphs())
def test_schedules_are_right_and_no_longer_than_the_serial_order(
    manager: type[OverlapManager], graph: Tasks
) -> None:
    compute, comm = graph
    schedule = manager().schedule(compute, comm)
    schedule.check()
    assert {slot.task for slot in schedule.slots} == {*compute, *comm}
    assert schedule.comm == {task.name for task in comm}
    assert schedule.makespan_s <= schedule.serial_s * (1 + 1e-12)
    assert 0.0 <= schedule.hidden_fraction <= 1.0 + 1e-9
    assert all(0.0 <= share <= 1.0 for share in schedule.idle_shares.values())


@given(graph=task_graphs())
def test_the_serial_manager_overlaps_nothing(graph: Tasks) -> None:
    schedule = SerialManager().schedule(*graph)
    assert schedule.makespan_s == pytest.approx(schedule.serial_s)
    ends_s = [slot.end_s for slot in schedule.slots]
    assert all(slot.start_s == end_s for slot, end_s in zip(schedule.slots[1:], ends_s, strict=False))


@settings(max_examples=30)
@given(graph=task_graphs(most=6))
def test_no_schedule_of_a_tiny_graph_beats_the_shortest(graph: Tasks) -> None:
    found_s = CriticalPathManager().schedule(*graph).makespan_s
    assert shortest_s([*graph[0], *graph[1]]) <= found_s * (1 + 1e-12)


def test_schedules_of_tiny_graphs_are_nearly_the_shortest() -> None:
    """300 random graphs of 7 tasks. The bounds are the figures found: they may only become better."""
    draw = random.Random(0)
    ratios = []
    for _ in range(300):
        made = [_random_task(draw, number) for number in range(7)]
        compute = [task for task in made if task.lane in COMPUTE_LANES]
        comm = [task for task in made if task.lane in COMM_LANES]
        ratios.append(CriticalPathManager().schedule(compute, comm).makespan_s / shortest_s(made))
    assert sum(ratio < 1 + 1e-9 for ratio in ratios) >= 290  # forward alone: 255
    assert sum(ratios) / len(ratios) < 1.005  # forward alone: 1.021
    assert max(ratios) < 1.35


def _random_task(draw: random.Random, number: int) -> Task:
    after = frozenset(f"t{before}" for before in range(number) if draw.random() < 0.3)
    return Task(f"t{number}", draw.choice((*COMPUTE_LANES, *COMM_LANES)), draw.uniform(0.1, 2.0), after)


def test_the_reversed_graph_finds_what_the_longest_path_misses() -> None:
    found = [
        (forward, CriticalPathManager().schedule(*graph).makespan_s)
        for graph in map(_random_graph, range(200))
        for forward in [_forward_s(graph)]
    ]
    assert all(best_s <= forward for forward, best_s in found)
    assert any(best_s < forward for forward, best_s in found)


def _random_graph(seed: int) -> Tasks:
    draw = random.Random(seed)
    made = [_random_task(draw, number) for number in range(12)]
    return [t for t in made if t.lane in COMPUTE_LANES], [t for t in made if t.lane in COMM_LANES]


def _forward_s(graph: Tasks) -> float:
    checked = TaskGraph.of(*graph)
    return checked.placed(_dispatch(checked)).makespan_s


def test_the_same_tasks_give_the_same_schedule() -> None:
    graph = _random_graph(3)
    assert CriticalPathManager().schedule(*graph) == CriticalPathManager().schedule(*graph)


def test_the_longest_path_goes_first() -> None:
    compute = tasks(("short", "gpu", 1.0, ""), ("long", "gpu", 1.0, ""))
    comm = tasks(("send", "net", 5.0, "long"))
    schedule = CriticalPathManager().schedule(compute, comm)
    assert [slot.task.name for slot in schedule.slots] == ["long", "short", "send"]
    assert schedule.makespan_s == 6.0
    assert schedule.hidden_fraction == 0.5
    assert schedule.idle_shares == {"gpu": pytest.approx(4 / 6), "net": pytest.approx(1 / 6)}


@pytest.mark.parametrize("manager", MANAGERS)
def test_no_tasks_take_no_time(manager: type[OverlapManager]) -> None:
    schedule = manager().schedule([], [])
    assert schedule == OverlapSchedule(())
    assert (schedule.makespan_s, schedule.serial_s, schedule.hidden_fraction) == (0.0, 0.0, 1.0)
    assert schedule.idle_shares == {}


@pytest.mark.parametrize("manager", MANAGERS)
@pytest.mark.parametrize(
    ("given_tasks", "message"),
    [
        (tasks(("a", "x", 1, "b"), ("b", "x", 1, "c"), ("c", "y", 1, "b")), "each other: b -> c -> b"),
        (tasks(("a", "x", 1, ""), ("b", "x", 1, ""), ("a", "y", 1, "")), "two tasks are named 'a'"),
        (tasks(("a", "x", 1, "z")), "'a' waits for 'z', which is no task"),
    ],
)
def test_what_cannot_be_scheduled_is_refused_by_name(
    manager: type[OverlapManager], given_tasks: list[Task], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        manager().schedule(given_tasks[:1], given_tasks[1:])


@pytest.mark.parametrize("manager", MANAGERS)
def test_tasks_of_no_length_keep_their_order(manager: type[OverlapManager]) -> None:
    chain = tasks(("c", "x", 0, "b"), ("b", "y", 0, "a"), ("a", "x", 0, ""), ("d", "y", 1, "c"))
    schedule = manager().schedule(chain, [])
    schedule.check()
    assert [slot.task.name for slot in schedule.slots] == ["a", "b", "c", "d"]


def test_a_long_chain_needs_no_deep_stack() -> None:
    chain = [
        Task(f"t{i}", ("x", "y")[i % 2], 1.0, frozenset({f"t{i - 1}"} if i else ())) for i in range(5000)
    ]
    assert CriticalPathManager().schedule(chain, []).makespan_s == 5000.0
