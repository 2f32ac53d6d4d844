"""Streams and events of no device: each stream has a time of its own, which `spend` moves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class SimulatedStream:
    def __init__(self) -> None:
        self.now_s = 0.0

    def wait_event(self, event: SimulatedEvent) -> None:
        assert event.at_s is not None, "an event that was not recorded orders nothing"
        self.now_s = max(self.now_s, event.at_s)


class SimulatedEvent:
    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at_s: float | None = None

    def record(self, stream: SimulatedStream) -> None:
        self.at_s = stream.now_s

    def elapsed_time(self, other: SimulatedEvent) -> float:
        assert self.at_s is not None
        assert other.at_s is not None
        return (other.at_s - self.at_s) * 1e3


class SimulatedStreams:
    """Implements `StreamModule`. `fault`: what the device reports when it is waited for."""

    Stream, Event = SimulatedStream, SimulatedEvent

    def __init__(self, fault: str = "") -> None:
        self._default = self._current = SimulatedStream()
        self.fault = fault
        self.num_waits = 0

    @contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def current_stream(self) -> SimulatedStream:
        return self._current

    def spend(self, seconds: float) -> None:
        """What a task's kernels do."""
        assert self._current is not self._default, "a task's work must not run on the caller's stream"
        self._current.now_s += seconds

    def synchronize(self) -> None:
        self.num_waits += 1
        if self.fault:
            raise RuntimeError(f"{self.fault}\nmore lines")
