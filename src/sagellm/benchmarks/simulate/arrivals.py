"""When requests come: the trace's own times, a Poisson process, or bursts, at the rate that is asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sagellm.core.errors import ConfigError, UnknownNameError, nearest

PROCESSES = ("trace", "poisson", "bursty")


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How arrivals follow each other.

    `trace` keeps the trace's gaps, compressed; `poisson` draws independent exponential gaps; `bursty` draws
    gamma gaps whose coefficient of variation is `cv` (1 is Poisson, more is burstier). `rate` is the mean in
    requests per second; without it that of the trace is multiplied by `rate_scale`.
    """

    process: str = "trace"
    rate: float | None = None
    rate_scale: float = 1.0
    cv: float = 3.0

    def __post_init__(self) -> None:
        if self.process not in PROCESSES:
            raise UnknownNameError(f"unknown arrivals {self.process!r}.{nearest(self.process, PROCESSES)}")
        for name, value in (("rate", self.rate), ("rate_scale", self.rate_scale), ("cv", self.cv)):
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be greater than 0, got {value}")
        if not math.isfinite(self.cv):
            raise ConfigError(f"cv must be a finite number, got {self.cv}")

    def scale(self, times_s: Sequence[float]) -> float:
        """How many times faster than in the trace requests come; infinite for all at once."""
        if self.rate is None:
            return self.rate_scale
        return self.rate / self._own_rate(times_s)

    def times(self, times_s: Sequence[float], seed: int) -> list[float]:
        """Arrival times, from 0 s on, of requests that the trace has at `times_s` (ascending)."""
        if self.process == "trace":
            scale, start_s = self.scale(times_s), times_s[0] if times_s else 0.0
            return [(time_s - start_s) / scale for time_s in times_s]
        rate = self.rate or self._own_rate(times_s) * self.rate_scale
        gaps = self._gaps(len(times_s), np.random.default_rng([seed, 1])) / rate
        return [float(one) for one in np.cumsum(gaps) - gaps[0]] if len(gaps) else []

    def _gaps(self, count: int, random: np.random.Generator) -> np.ndarray:
        """Gaps of mean 1."""
        if self.process == "poisson":
            return random.exponential(1.0, count)
        shape = 1.0 / self.cv**2
        return random.gamma(shape, 1.0 / shape, count)

    def _own_rate(self, times_s: Sequence[float]) -> float:
        own = mean_rate(times_s)
        if math.isinf(own):
            raise ConfigError(
                "all requests of the trace come at one moment, so it has no rate of its own: ask for "
                "arrivals 'poisson' or 'bursty' and a rate"
            )
        return own


def mean_rate(times_s: Sequence[float]) -> float:
    """Requests per second, from the first arrival to the last; infinite where that takes no time."""
    span_s = times_s[-1] - times_s[0] if times_s else 0.0
    return (len(times_s) - 1) / span_s if span_s > 0 else math.inf
