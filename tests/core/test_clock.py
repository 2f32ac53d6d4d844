"""Time as a dependency."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.core.clock import ManualClock, MonotonicClock


def test_the_monotonic_clock_does_not_go_back() -> None:
    clock = MonotonicClock()
    readings = [clock.now() for _ in range(100)]
    assert readings == sorted(readings)


@given(st.lists(st.floats(0, 1e6), max_size=20))
def test_a_manual_clock_is_where_it_was_moved_to(steps: list[float]) -> None:
    clock = ManualClock(start_s=1.0)
    for step in steps:
        clock.advance(step)
    assert clock.now() == pytest.approx(1.0 + sum(steps))


def test_a_manual_clock_refuses_to_go_back() -> None:
    clock = ManualClock()
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance(-0.1)
    assert clock.now() == 0.0
