"""`CircuitBreaker` and `ByteBudget`, on a clock that moves on request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.core.clock import ManualClock
from sagellm.kvmgr.kv_pool.tiers.circuit_breaker import NUM_SLOTS, ByteBudget, CircuitBreaker


def breaker_on(clock: ManualClock) -> CircuitBreaker:
    return CircuitBreaker("it", clock, max_failures=3, first_backoff_s=1.0, max_backoff_s=4.0)


def opened(clock: ManualClock) -> CircuitBreaker:
    breaker = breaker_on(clock)
    for _ in range(3):
        assert breaker.allows()
        breaker.failed("broken")
        breaker.check()
    return breaker


def test_it_opens_after_failures_in_a_row() -> None:
    breaker = breaker_on(ManualClock())
    for reason in ("1", "2"):
        breaker.failed(reason)
    breaker.worked()
    for reason in ("3", "4"):
        breaker.failed(reason)
    assert breaker.allows()
    breaker.check()
    breaker.failed("5")
    assert breaker.fault == "5"
    assert not breaker.allows()


def test_one_probe_closes_it() -> None:
    clock = ManualClock()
    breaker = opened(clock)
    clock.advance(0.99)
    assert not breaker.allows()
    clock.advance(0.02)
    assert breaker.allows()
    assert not breaker.allows()
    breaker.worked()
    breaker.check()
    assert breaker.fault is None
    assert breaker.allows()


def test_each_failed_probe_doubles_the_pause() -> None:
    clock = ManualClock()
    breaker = opened(clock)
    for pause_s in (1.0, 2.0, 4.0, 4.0):
        clock.advance(pause_s - 0.01)
        assert not breaker.allows()
        clock.advance(0.02)
        assert breaker.allows()
        breaker.failed("still")
        breaker.check()
    assert breaker.fault == "still"


def test_calls_that_end_late_do_not_lengthen_the_pause() -> None:
    clock = ManualClock()
    breaker = opened(clock)
    for _ in range(5):
        breaker.failed("late")
    clock.advance(1.01)
    assert breaker.allows()


def test_a_lost_probe_is_repeated() -> None:
    clock = ManualClock()
    breaker = opened(clock)
    clock.advance(1.01)
    assert breaker.allows()
    clock.advance(1.01)
    assert breaker.allows()


def test_what_is_logged_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    clock = ManualClock()
    breaker = opened(clock)
    clock.advance(1.01)
    breaker.allows()
    breaker.failed("still")
    clock.advance(2.01)
    breaker.allows()
    breaker.worked()
    breaker.worked()
    assert caplog.messages == ["it is not used until it works again: broken", "it works again"]


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 60)), max_size=60))
def test_no_window_has_more_than_the_budget(steps: list[tuple[float, int]]) -> None:
    """The slow twin remembers every byte. What is refused would not have fitted, or is a slot too early."""
    clock, window_s, limit = ManualClock(), 4.0, 100
    budget = ByteBudget(limit, window_s, clock)
    taken: list[tuple[float, int]] = []
    for pause_s, num_bytes in steps:
        clock.advance(pause_s)
        took = budget.take(num_bytes)
        budget.check()

        def recent(longer_s: float) -> int:
            return sum(n for at_s, n in taken if clock.now() - at_s < window_s + longer_s)

        if took:
            assert recent(0.0) + num_bytes <= limit
            taken.append((clock.now(), num_bytes))
        else:
            assert recent(2 * window_s / NUM_SLOTS) + num_bytes > limit
