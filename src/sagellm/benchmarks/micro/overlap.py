"""`sagellm bench micro overlap`: communication that is hidden, and what planning costs.

Section h: the patterns of `comm/overlap` with as long a communication as computation, by executor. On threads
computation is SHA-256, communication is a copy in memory, each of about `task_ms`; both release the GIL. The
targets: at least 70 % hidden, lanes idle under 10 %. Section p: time to plan, by number of tasks.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from sagellm.benchmarks.micro.cases import (
    MicroBenchCell,
    MicroBenchmark,
    MicroBenchPlan,
    MicroBenchRow,
    Recipe,
    Stopwatch,
    TimedOperation,
    timed,
)
from sagellm.comm.overlap.executors import SimulatedExecutor, ThreadExecutor
from sagellm.comm.overlap.managers import CriticalPathManager
from sagellm.comm.overlap.patterns import Tasks, double_buffered, ping_pong, sent_by_layer
from sagellm.core.clock import ManualClock
from sagellm.core.errors import UnknownNameError, nearest
from sagellm.core.protocols.overlap import OverlapExecutor, OverlapSchedule, Work

PLAN = "plan sends by layer"
HIDDEN, IDLE, SAVED = "hidden", "most idle lane", "saved of the serial time"
MB = 1 << 20
_SIMULATED, _THREADS = "simulated", "threads"


def _patterns(pieces: int, piece_s: float) -> Mapping[str, Tasks]:
    """Matched tasks: `pieces` of each kind, all of one length."""
    each, half = [piece_s] * pieces, [piece_s] * (pieces // 2)
    return {
        "double buffering": double_buffered(each, each),
        "ping-pong of two micro-batches": ping_pong(half, half),
        "KV sent by layer": sent_by_layer(each, each),
        "KV loaded by layer": double_buffered(each, each, num_buffers=pieces),
    }


@dataclass(frozen=True, slots=True)
class _MatchedWork:
    """Computation and communication that take about equally long, each alone on a thread."""

    hashed: memoryview
    source: np.ndarray[tuple[int], np.dtype[np.uint8]]
    target: np.ndarray[tuple[int], np.dtype[np.uint8]]

    @classmethod
    def of(cls, seconds: float) -> _MatchedWork:
        probe = cls(memoryview(bytes(8 * MB)), np.ones(64 * MB, np.uint8), np.zeros(64 * MB, np.uint8))
        hashed = int(len(probe.hashed) * seconds / _median_s(probe.compute))
        copied = int(len(probe.source) * seconds / _median_s(probe.communicate))
        return cls(memoryview(bytes(hashed)), np.ones(copied, np.uint8), np.zeros(copied, np.uint8))

    def compute(self) -> None:
        hashlib.sha256(self.hashed).digest()

    def communicate(self) -> None:
        np.copyto(self.target, self.source)

    def work(self, schedule: OverlapSchedule) -> Work:
        comm = schedule.comm
        names = [slot.task.name for slot in schedule.slots]
        return {name: self.communicate if name in comm else self.compute for name in names}


def _median_s(run: Callable[[], None]) -> float:
    samples = []
    for _ in range(7):
        start_s = time.perf_counter()
        run()
        samples.append(time.perf_counter() - start_s)
    return statistics.median(samples)


def _hidden(plan: MicroBenchPlan, stopwatch: Stopwatch) -> Iterator[MicroBenchRow]:
    """Section h: shares in percent, medians of the rounds."""
    piece_s = plan.task_ms / 1e3
    for variant in plan.variants:
        matched = _MatchedWork.of(piece_s) if variant == _THREADS else None
        for name, tasks in _patterns(plan.pieces, piece_s).items():
            schedule = CriticalPathManager().schedule(*tasks)
            work: Work = (
                matched.work(schedule) if matched else {slot.task.name: int for slot in schedule.slots}
            )
            executor: OverlapExecutor = ThreadExecutor() if matched else SimulatedExecutor(ManualClock())
            runs = [executor.run(schedule, work).timeline for _ in range(plan.rounds)]
            shares = {
                HIDDEN: [run.hidden_fraction for run in runs],
                IDLE: [max(run.idle_shares.values()) for run in runs],
                SAVED: [1 - run.makespan_s / run.serial_s for run in runs],
            }
            for what, values in shares.items():
                share = 100 * statistics.median(values)
                yield MicroBenchRow("h", f"{name}: {what}", plan.pieces, variant, "%", share)


def _plan(cell: MicroBenchCell, calls: int) -> TimedOperation:
    half = [1e-3] * (cell.size // 2)
    compute, comm = sent_by_layer(half, half)
    return TimedOperation(run=lambda _: CriticalPathManager().schedule(compute, comm))


def _check(name: str) -> None:
    if name not in NAMES:
        raise UnknownNameError(f"no executor {name!r} to measure.{nearest(name, NAMES)}")


NAMES = (_SIMULATED, _THREADS)
BENCHMARK = MicroBenchmark(
    "overlap", lambda: NAMES, _check, {"h": _hidden, "p": timed("p", Recipe(PLAN, _plan, "tasks", calls=1))}
)
