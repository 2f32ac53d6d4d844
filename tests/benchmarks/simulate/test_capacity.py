"""The search for the highest rate at which the queue does not grow."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from sagellm.benchmarks.simulate.capacity import GROWTH, PRECISION, find_capacity, growth
from sagellm.benchmarks.simulate.cluster import ServedRequest
from sagellm.benchmarks.simulate.workload import Arrivals, WorkloadSpec
from sagellm.core.errors import ConfigError
from tests.benchmarks.simulate.stand_in import request, served, trace


def fluid(rate: float, capacity: float, count: int = 100) -> list[ServedRequest]:
    """Requests at a rate that are served in order, so many per second."""
    free_s, made = 0.0, []
    for number in range(count):
        arrival_s = number / rate
        free_s = max(free_s, arrival_s)
        made.append(ServedRequest(number, arrival_s=arrival_s, scheduled_s=free_s))
        free_s += 1 / capacity
    return made


def test_growth_equals_the_fluid_limit() -> None:
    assert growth(fluid(3.0, 2.0)) == pytest.approx(0.5)
    assert growth(fluid(2.0, 3.0)) == pytest.approx(0.0)
    late = [*fluid(3.0, 2.0), ServedRequest(100), ServedRequest(101, arrival_s=99.0)]
    assert growth(late) == pytest.approx(0.5), "who was never scheduled does not count"


@pytest.mark.parametrize("start", [0.01, 1.9, 2.0, 5.0, 500.0])
@pytest.mark.parametrize("capacity", [2.0, 0.37])
def test_the_search_ends_at_the_capacity(start: float, capacity: float) -> None:
    found = find_capacity(lambda rate: fluid(rate, capacity), start)
    assert found.rate == pytest.approx(capacity * (1 + GROWTH), rel=PRECISION + 0.001)
    assert found.rate == max(one.rate for one in found.probes if one.sustained)
    assert len(found.probes) < 16


def test_a_workload_that_never_keeps_up_is_an_error() -> None:
    def hopeless(rate: float) -> Sequence[ServedRequest]:
        return fluid(rate, rate / 2)

    with pytest.raises(ConfigError, match="was sustained in 16 runs"):
        find_capacity(hopeless, 1.0)


def test_too_few_and_too_sudden() -> None:
    with pytest.raises(ConfigError, match="at least 20 requests"):
        growth(fluid(1.0, 1.0, 19))
    with pytest.raises(ConfigError, match="at one moment"):
        growth([ServedRequest(at, arrival_s=1.0, scheduled_s=1.0) for at in range(30)])


def test_the_capacity_of_an_engine() -> None:
    """Each request is one step of 16 tokens, 10 ms: 100 a second."""
    made = trace(*(request(at * 1.0, 16, 1) for at in range(300)))

    def run(rate: float) -> Sequence[ServedRequest]:
        return served(made, spec=WorkloadSpec(Arrivals(rate=rate))).served

    assert find_capacity(run, 1.0).rate == pytest.approx(100 * (1 + GROWTH), rel=PRECISION + 0.01)
