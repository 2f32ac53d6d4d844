"""Limits on the use of a server: `CircuitBreaker` and `ByteBudget`.

The breaker: M. Nygard, Release It!, 2007, chapter 5.2.
"""

from __future__ import annotations

import logging
import threading
from collections import deque

from sagellm.core.clock import Clock
from sagellm.core.errors import BookkeepingError

log = logging.getLogger("sagellm.kv_tiers")

NUM_SLOTS = 64
"""Parts of a budget's window: bytes come back so late at most, in parts of the window."""


class CircuitBreaker:
    """Stops the calls of something that fails, and probes it. Thread-safe.

    It opens after `max_failures` failures in a row. Then `allows` is false for `first_backoff_s`, and true
    once, for a probe: a probe that worked closes the breaker, and each that failed doubles the time up to
    `max_backoff_s`. A probe without a result is repeated after the same time. `fault`: why it is open.
    """

    def __init__(
        self, subject: str, clock: Clock, max_failures: int, first_backoff_s: float, max_backoff_s: float
    ) -> None:
        self.fault: str | None = None
        self._subject = subject
        self._clock = clock
        self._max_failures = max_failures
        self._first_backoff_s, self._max_backoff_s = first_backoff_s, max_backoff_s
        self._lock = threading.Lock()
        self._num_failures = 0
        self._backoff_s = first_backoff_s
        self._probe_at_s = 0.0
        self._is_probing = False

    def allows(self) -> bool:
        """Whether a call may be made now. After it, `worked` or `failed` is to be called."""
        with self._lock:
            if self.fault is None:
                return True
            if self._clock.now() < self._probe_at_s:
                return False
            self._probe_at_s = self._clock.now() + self._backoff_s
            self._is_probing = True
            return True

    @property
    def is_due(self) -> bool:
        """Whether `allows` would say yes."""
        with self._lock:
            return self.fault is None or self._clock.now() >= self._probe_at_s

    def worked(self) -> None:
        with self._lock:
            was_open, self.fault = self.fault is not None, None
            self._num_failures, self._is_probing, self._backoff_s = 0, False, self._first_backoff_s
        if was_open:
            log.info("%s works again", self._subject)

    def failed(self, reason: str) -> None:
        """Calls that began before the breaker opened, and end after it, change nothing."""
        with self._lock:
            self._num_failures += 1
            opens = self.fault is None and self._num_failures >= self._max_failures
            if not opens and not self._is_probing:
                return
            if self._is_probing:
                self._backoff_s = min(2 * self._backoff_s, self._max_backoff_s)
            self.fault, self._is_probing = reason, False
            self._probe_at_s = self._clock.now() + self._backoff_s
        if opens:
            log.warning("%s is not used until it works again: %s", self._subject, reason)

    def check(self) -> None:
        """Raise `BookkeepingError` where its state is none that it can have."""
        with self._lock:
            if self.fault is None and (self._num_failures >= self._max_failures or self._is_probing):
                raise BookkeepingError(f"the breaker is closed after {self._num_failures} failures")
            if not self._first_backoff_s <= self._backoff_s <= self._max_backoff_s:
                raise BookkeepingError(f"a backoff of {self._backoff_s} s is out of range")


class ByteBudget:
    """At most `limit` bytes in any `window_s` seconds. Thread-safe."""

    def __init__(self, limit: int, window_s: float, clock: Clock) -> None:
        self.limit = limit
        self._clock = clock
        self._window_s, self._slot_s = window_s, window_s / NUM_SLOTS
        self._lock = threading.Lock()
        self._slots: deque[list[int]] = deque()
        """Number of the slot of time, and bytes taken in it; the oldest first."""
        self._num_bytes = 0

    def take(self, num_bytes: int) -> bool:
        """Whether so many bytes fit; they are taken then."""
        with self._lock:
            slot = int(self._clock.now() // self._slot_s)
            while self._slots and self._slots[0][0] < slot - NUM_SLOTS:
                self._num_bytes -= self._slots.popleft()[1]
            if self._num_bytes + num_bytes > self.limit:
                return False
            if not self._slots or self._slots[-1][0] != slot:
                self._slots.append([slot, 0])
            self._slots[-1][1] += num_bytes
            self._num_bytes += num_bytes
            return True

    def check(self) -> None:
        """Raise `BookkeepingError` where the bytes do not add up."""
        with self._lock:
            total = sum(num_bytes for _, num_bytes in self._slots)
            if total != self._num_bytes or total > self.limit or len(self._slots) > NUM_SLOTS + 1:
                raise BookkeepingError(f"budget of {self.limit}: {self._num_bytes} taken, {total} in slots")
