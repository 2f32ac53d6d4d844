"""Finds the highest rate that an instance keeps up with.

A queue that does not keep up grows with time: if requests come `r` times as fast as they can be served, a
request that arrives after `t` seconds waits `(r - 1) * t` seconds (the fluid limit). So the growth of a run
is the slope of a least-squares line through waiting time over arrival time, in seconds per second, and the
capacity is the highest rate whose growth is at most `GROWTH`. A run that does not keep up shows how fast it
serves, `rate / (1 + growth)`; the search continues there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sagellm.benchmarks.simulate.cluster import ServedRequest
from sagellm.core.errors import ConfigError

GROWTH = 0.02
PRECISION = 0.03
MAX_RUNS = 16
FEWEST = 20
"""The smallest number of requests for which a slope is meaningful."""


@dataclass(frozen=True, slots=True)
class RateProbe:
    """One run: its arrivals per second, and the seconds of waiting added per second."""

    rate: float
    growth: float

    @property
    def sustained(self) -> bool:
        return self.growth <= GROWTH


@dataclass(frozen=True, slots=True)
class SustainedRate:
    """The highest sustained rate in requests per second, and all `probes` in order. Some rate at most
    `PRECISION` (a ratio) above it was not sustained."""

    rate: float
    probes: tuple[RateProbe, ...]


def growth(served: Sequence[ServedRequest]) -> float:
    """Seconds by which waiting (arrival to first schedule) grows per second of arrivals. Requests that
    were never scheduled do not count. Raises `ConfigError` if fewer than `FEWEST` are left or all came at
    once."""
    times = [(request.arrival_s, request.wait_s) for request in served if request.wait_s is not None]
    if len(times) < FEWEST:
        raise ConfigError(
            f"a capacity needs at least {FEWEST} requests that were scheduled, got {len(times)}: take more "
            "of the trace"
        )
    arrival, wait = np.array(times, dtype=np.float64).T
    centred = arrival - arrival.mean()
    spread = float(centred @ centred)
    if not spread:
        raise ConfigError("all requests came at one moment: a capacity needs arrivals at a rate")
    return float(centred @ (wait - wait.mean())) / spread


def find_capacity(run: Callable[[float], Sequence[ServedRequest]], start: float) -> SustainedRate:
    """Searches for the capacity from the rate `start` on. `run(rate)` serves the workload at that mean
    rate. Raises `ConfigError` if no rate was sustained."""
    low, high, rate = 0.0, math.inf, start
    probes: list[RateProbe] = []
    for _ in range(MAX_RUNS):
        probe = RateProbe(rate, growth(run(rate)))
        probes.append(probe)
        if probe.sustained:
            low = max(low, rate)
            rate = 2 * rate if math.isinf(high) else math.sqrt(low * high)
        else:
            high = min(high, rate)
            served = rate / (1 + probe.growth)
            if low < served < high / (1 + PRECISION):
                rate = served
            else:
                rate = math.sqrt(low * high) if low else high / (1 + PRECISION) ** 2
        if low and high / low <= 1 + PRECISION:
            break
    if not low:
        raise ConfigError(
            f"no rate down to {min(probe.rate for probe in probes):.3g} requests per second was sustained in "
            f"{MAX_RUNS} runs: the workload is too short, or no request of it can be served in time"
        )
    return SustainedRate(low, tuple(probes))
