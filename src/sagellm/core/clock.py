"""Time as a dependency: sageLLM reads the time only through a `Clock`."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds on a monotonic scale; only differences mean anything."""

    def now(self) -> float: ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves on request: for tests and for every simulation."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward. A negative step is an error, since time never runs back."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back: advance({seconds})")
        self._now_s += seconds

    def advance_to(self, moment_s: float) -> None:
        """Move forward to that moment, if it has not passed."""
        self._now_s = max(self._now_s, moment_s)
