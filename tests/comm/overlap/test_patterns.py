"""The task graphs of inference: their lengths by hand, and the targets for matched tasks."""

from __future__ import annotations

import pytest

from sagellm.comm.overlap.managers import CriticalPathManager
from sagellm.comm.overlap.patterns import Tasks, double_buffered, ping_pong, sent_by_layer

MATCHED = {
    "double buffering": double_buffered([1.0] * 16, [1.0] * 16),
    "loaded by layer": double_buffered([1.0] * 16, [1.0] * 16, num_buffers=16),
    "ping-pong": ping_pong([1.0] * 8, [1.0] * 8),
    "sent by layer": sent_by_layer([1.0] * 16, [1.0] * 16),
}


@pytest.mark.parametrize("graph", MATCHED.values(), ids=MATCHED)
def test_matched_tasks_hide_70_percent_and_leave_lanes_idle_under_10(graph: Tasks) -> None:
    schedule = CriticalPathManager().schedule(*graph)
    schedule.check()
    assert schedule.makespan_s == 17.0
    assert schedule.hidden_fraction == pytest.approx(15 / 16)
    assert max(schedule.idle_shares.values()) == pytest.approx(1 / 17)


def test_with_one_buffer_nothing_overlaps() -> None:
    schedule = CriticalPathManager().schedule(*double_buffered([1.0] * 4, [1.0] * 4, num_buffers=1))
    assert schedule.makespan_s == schedule.serial_s == 8.0
    assert schedule.hidden_fraction == 0.0


def test_a_second_buffer_is_enough_where_durations_are_constant() -> None:
    two = CriticalPathManager().schedule(*double_buffered([1.0] * 9, [2.0] * 9))
    many = CriticalPathManager().schedule(*double_buffered([1.0] * 9, [2.0] * 9, num_buffers=9))
    assert two.makespan_s == many.makespan_s == 19.0


def test_a_buffer_is_fetched_into_when_it_is_free() -> None:
    schedule = CriticalPathManager().schedule(*double_buffered([1.0] * 4, [3.0] * 4))
    start_s = {slot.task.name: slot.start_s for slot in schedule.slots}
    assert [start_s[f"fetch:{i}"] for i in range(4)] == [0.0, 1.0, 4.0, 7.0]


def test_one_micro_batch_waits_for_its_communication() -> None:
    schedule = CriticalPathManager().schedule(*ping_pong([1.0] * 3, [2.0] * 3, num_micro_batches=1))
    assert schedule.makespan_s == 9.0
    assert schedule.hidden_fraction == 0.0


def test_a_slow_network_hides_all_of_the_computation_but_its_first_layer() -> None:
    schedule = CriticalPathManager().schedule(*sent_by_layer([1.0] * 4, [3.0] * 4))
    assert schedule.makespan_s == 13.0
    assert schedule.hidden_fraction == pytest.approx(3 / 4)


def test_no_layers_are_no_tasks() -> None:
    assert double_buffered([], []) == ping_pong([], []) == sent_by_layer([], []) == ([], [])


@pytest.mark.parametrize("pattern", [double_buffered, ping_pong, sent_by_layer])
def test_each_step_needs_both_durations(pattern: object) -> None:
    with pytest.raises(ValueError, match="2 and 1 were given"):
        pattern([1.0, 1.0], [1.0])  # type: ignore[operator]


def test_counts_begin_with_one() -> None:
    with pytest.raises(ValueError, match="num_buffers must be at least 1, got 0"):
        double_buffered([], [], num_buffers=0)
    with pytest.raises(ValueError, match="num_micro_batches must be at least 1, got 0"):
        ping_pong([], [], num_micro_batches=0)
