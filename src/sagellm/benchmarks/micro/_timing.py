"""Time of short operations: of the thread's CPU, which other processes hardly touch, and of the wall."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

SHORT_US = 5.0
CALLS_OF_SHORT = 100
_MAYBE_SHORT_US = 4 * SHORT_US  # alone, between setups, a short call takes longer
_WARM_UP = 2


def _nothing() -> None:
    return None


def _ignore(context: Any, result: Any) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Operation:
    """`run(context)` is timed; `setup() -> context` before it and `teardown(context, result)` after it are
    not."""

    run: Callable[[Any], Any]
    setup: Callable[[], Any] = _nothing
    teardown: Callable[[Any, Any], None] = _ignore


Prepare = Callable[[int], Operation]
"""`prepare(calls)` makes an operation that may run `calls` times between its setups and its teardowns."""


@dataclass(frozen=True, slots=True)
class Spread:
    """µs per call over the samples: median, 99th percentile, least, first to third quartile (`iqr`)."""

    median: float
    p99: float
    min: float
    iqr: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        ordered = sorted(samples)
        quartiles = _at(ordered, 0.25), _at(ordered, 0.75)
        figures = statistics.median(ordered), _at(ordered, 0.99), ordered[0], quartiles[1] - quartiles[0]
        return cls(*(round(figure, 3) for figure in figures))


@dataclass(frozen=True, slots=True)
class Timing:
    """`samples` samples, each the mean of `calls_per_sample` calls in a row.

    `single` is the median CPU time in µs of one call at a time, each after its own setup: what a caller meets
    whose caches hold something else, and how the peers' harness measures.
    """

    samples: int
    calls_per_sample: int
    cpu: Spread
    wall: Spread
    single: float


class Stopwatch:
    """Times operations; `cpu_ns` and `wall_ns` are its two clocks, in nanoseconds.

    What reading them and entering the loop costs is measured beside every sample, since the speed of a
    machine changes, and its median is taken off; the call of the operation itself is not. Operations shorter
    than `SHORT_US` are timed `CALLS_OF_SHORT` at once, since one alone would be lost in the resolution of the
    clocks; but not those that so many contexts make longer.
    """

    def __init__(
        self,
        repeats: int,
        cpu_ns: Callable[[], int] = time.thread_time_ns,
        wall_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        if repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {repeats}")
        self.repeats = repeats
        self._cpu_ns = cpu_ns
        self._wall_ns = wall_ns

    def time(self, prepare: Prepare, *, in_a_row: bool = False) -> Timing:
        """The operation's times over `repeats` samples; `in_a_row`: always many calls to a sample."""
        if in_a_row:
            cpu, wall = self._spreads(prepare, CALLS_OF_SHORT)
            return Timing(self.repeats, CALLS_OF_SHORT, cpu, wall, cpu.median)
        single_cpu, single_wall = self._spreads(prepare, 1)
        single = single_cpu.median
        if single < _MAYBE_SHORT_US:
            cpu, wall = self._spreads(prepare, CALLS_OF_SHORT)
            if cpu.median < SHORT_US:
                return Timing(self.repeats, CALLS_OF_SHORT, cpu, wall, single)
        return Timing(self.repeats, 1, single_cpu, single_wall, single)

    def _spreads(self, prepare: Prepare, calls: int) -> tuple[Spread, Spread]:
        """CPU and wall time per call; what is alive by then is no work for the garbage collector."""
        operation = prepare(calls)
        for _ in range(_WARM_UP):
            self._sample(operation, calls)
        with _collected():
            samples = [self._sample(operation, calls) for _ in range(self.repeats)]
        cpu, wall = (_spread(clock, calls) for clock in zip(*samples, strict=True))
        return cpu, wall

    def _sample(self, operation: Operation, calls: int) -> list[tuple[int, int]]:
        """By clock: ns of `calls` calls in a row, and of none."""
        contexts = [operation.setup() for _ in range(calls)]
        none = self._read(operation, [])
        return list(zip(self._read(operation, contexts), none, strict=True))

    def _read(self, operation: Operation, contexts: list[Any]) -> tuple[int, int]:
        cpu_ns, wall_ns, run = self._cpu_ns, self._wall_ns, operation.run
        cpu_start = cpu_ns()
        wall_start = wall_ns()
        results = [run(context) for context in contexts]
        wall_end = wall_ns()
        cpu_end = cpu_ns()
        for context, result in zip(contexts, results, strict=True):
            operation.teardown(context, result)
        return cpu_end - cpu_start, wall_end - wall_start


def _spread(samples: Sequence[tuple[int, int]], calls: int) -> Spread:
    """µs per call, from samples of one clock as `_sample` returns them."""
    overhead_ns = statistics.median(none for _, none in samples)
    return Spread.of([max(0.0, spent - overhead_ns) / calls / 1000 for spent, _ in samples])


@contextmanager
def _collected() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _at(ordered: Sequence[float], share: float) -> float:
    """The value below which that share of the ordered samples lies, without interpolation."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
