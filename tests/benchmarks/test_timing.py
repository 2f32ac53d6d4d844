"""The stopwatch on clocks that only move when told to: what is timed, what is not, and in which batches."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field

import pytest

from sagellm.benchmarks.micro.cases import CALLS_OF_SHORT, Spread, Stopwatch, TimedOperation

READING_NS = 100


@dataclass
class Work:
    """A clock, and an operation that takes `run_ns`; setups and teardowns take far longer."""

    run_ns: int
    now_ns: int = 0
    prepared: list[int] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def read(self) -> int:
        self.now_ns += READING_NS
        return self.now_ns

    def spend(self, what: str, ns: int) -> None:
        self.now_ns += ns
        self.log.append(what)

    def prepare(self, calls: int) -> TimedOperation:
        self.prepared.append(calls)
        self.log.append("prepare")
        return TimedOperation(
            run=lambda context: self.spend("run", self.run_ns),
            setup=lambda: self.spend("setup", 10**6),
            teardown=lambda context, result: self.spend("teardown", 10**6),
        )


def stopwatch(work: Work, repeats: int = 4) -> Stopwatch:
    return Stopwatch(repeats, work.read, work.read)


def test_what_reading_the_clocks_costs_is_taken_off() -> None:
    work = Work(run_ns=50_000)
    timing = stopwatch(work).time(work.prepare)
    assert timing.cpu == timing.wall == Spread(50.0, 50.0, 50.0, 0.0)
    assert (timing.samples, timing.calls_per_sample, timing.single) == (4, 1, 50.0)
    assert work.prepared == [1]


def test_a_short_operation_is_timed_in_batches() -> None:
    work = Work(run_ns=2_000)
    timing = stopwatch(work).time(work.prepare)
    assert (timing.calls_per_sample, timing.cpu.median, timing.single) == (CALLS_OF_SHORT, 2.0, 2.0)
    assert work.prepared == [1, CALLS_OF_SHORT]


def test_all_setups_come_before_a_batch_and_all_teardowns_after_it() -> None:
    work = Work(run_ns=2_000)
    stopwatch(work, repeats=1).time(work.prepare)
    batch = work.log[-3 * CALLS_OF_SHORT :]
    assert batch == [what for what in ("setup", "run", "teardown") for _ in range(CALLS_OF_SHORT)]


def test_an_operation_that_is_not_short_in_a_batch_is_timed_alone() -> None:
    work = Work(run_ns=7_000)
    assert stopwatch(work).time(work.prepare).calls_per_sample == 1


def test_an_operation_cheaper_than_the_clock_takes_no_negative_time() -> None:
    work = Work(run_ns=-30)
    assert stopwatch(work).time(work.prepare).cpu.min == 0.0


def test_what_is_alive_is_frozen_while_it_is_timed() -> None:
    frozen = []
    work = Work(run_ns=50_000)

    def look(context: object) -> None:
        frozen.append(gc.get_freeze_count() > 0)
        work.spend("run", work.run_ns)

    stopwatch(work, repeats=3).time(lambda calls: TimedOperation(run=look))
    assert frozen == [False, False, True, True, True]  # two calls to warm up
    assert gc.get_freeze_count() == 0


def test_spread() -> None:
    assert Spread.of([float(value) for value in range(1, 101)]) == Spread(50.5, 100.0, 1.0, 50.0)
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0, 0.0)


def test_no_repeats_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Stopwatch(0)
