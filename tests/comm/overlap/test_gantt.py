from __future__ import annotations

import pytest

from sagellm.comm.overlap.gantt import gantt_text
from sagellm.comm.overlap.managers import CriticalPathManager
from sagellm.comm.overlap.patterns import double_buffered
from sagellm.core.protocols.overlap import OverlapSchedule


def test_lanes_tasks_and_idle_time() -> None:
    schedule = CriticalPathManager().schedule(*double_buffered([0.001] * 3, [0.001] * 3))
    assert gantt_text(schedule, 16).splitlines() == [
        "network |####====####    | idle 25.0%",
        "compute |    ####====####| idle 25.0%",
        "         0           4 ms",
        "66.7% hidden; 6 ms one after the other",
    ]


def test_more_tasks_than_columns() -> None:
    schedule = CriticalPathManager().schedule(*double_buffered([0.001] * 500, [0.001] * 500))
    assert [len(line) for line in gantt_text(schedule, 3).splitlines()[:2]] == [23, 23]


def test_nothing_to_draw() -> None:
    assert gantt_text(OverlapSchedule(())) == "nothing takes time"
    with pytest.raises(ValueError, match="width"):
        gantt_text(OverlapSchedule(()), 0)
