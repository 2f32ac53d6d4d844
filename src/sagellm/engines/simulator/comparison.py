"""Measured and simulated latencies of the same requests, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from sagellm.engines.simulator.drive import Timing
from sagellm.engines.simulator.measured import Measured

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Compared:
    """One statistic of one latency, in seconds."""

    latency: str
    statistic: str
    measured_s: float
    simulated_s: float

    @property
    def error(self) -> float:
        """Relative, of the simulated value; 0 where both are nothing."""
        if self.measured_s == 0.0:
            return 0.0 if self.simulated_s == 0.0 else float("inf")
        return self.simulated_s / self.measured_s - 1


_LATENCIES: Mapping[str, Callable[[Measured | Timing], float]] = MappingProxyType(
    {"TTFT": lambda one: one.ttft_s, "TPOT": lambda one: one.tpot_s}
)


def compare(measured: Sequence[Measured], simulated: Sequence[Timing]) -> list[Compared]:
    """Mean and percentiles of TTFT and TPOT; raises `ValueError` unless both are of as many requests."""
    if len(measured) != len(simulated) or not measured:
        raise ValueError(f"{len(measured)} measured requests, {len(simulated)} simulated ones: pairs needed")
    rows = []
    for name, latency in _LATENCIES.items():
        true_s = np.array([latency(one) for one in measured])
        other_s = np.array([latency(one) for one in simulated])
        rows.append(Compared(name, "mean", float(true_s.mean()), float(other_s.mean())))
        for percent in PERCENTILES:
            pair = (float(np.percentile(values, percent)) for values in (true_s, other_s))
            rows.append(Compared(name, f"p{percent}", *pair))
    return rows
