from __future__ import annotations

import pytest

from sagellm.comm.overlap.gantt import gantt_text
from sagellm.comm.overlap.managers import CriticalPathManager
from sagellm.comm.overlap.patterns import double_buffered, sent_by_layer
from sagellm.core.protocols.overlap import OverlapSchedule


def test_lanes_tasks_and_idle_time() -> None:
    schedule = CriticalPathManager().schedule(*double_buffered([0.001] * 3, [0.001] * 3))
    assert gantt_text(schedule, 16).splitlines() == [
        "network |####====####    | idle 25.0%",
        "compute |    ####====####| idle 25.0%",
        "         0           4 ms",
        "66.7% hidden",
    ]


def test_more_tasks_than_columns() -> None:
    schedule = CriticalPathManager().schedule(*double_buffered([0.001] * 500, [0.001] * 500))
    assert [len(line) for line in gantt_text(schedule, 3).splitlines()[:2]] == [23, 23]


def test_a_lane_that_works_now_and_then_does_not_look_busy() -> None:
    schedule = CriticalPathManager().schedule(*sent_by_layer([0.004] * 64, [0.001] * 64))
    compute, network, *_ = gantt_text(schedule, 8).splitlines()
    assert set(compute.split("|")[1]) <= set("#=")
    assert compute.endswith("| idle 0.4%")
    assert network == "network |........| idle 75.1%"


def test_nothing_to_draw() -> None:
    assert gantt_text(OverlapSchedule(())) == "nothing takes time"
    with pytest.raises(ValueError, match="width"):
        gantt_text(OverlapSchedule(()), 0)
