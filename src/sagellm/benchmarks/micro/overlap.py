"""`sagellm bench micro overlap`: communication that is hidden, and what planning costs.

Section h: the patterns of `comm/overlap` with as long a communication as computation, `task_ms` each. By
executor: the simulated clock; threads that wait, as for a device or a network; threads that work, where
computation is SHA-256 and communication a copy in memory, each of that CPU time. "saved" compares with what
all tasks take one after the other on an idle machine. The targets: at least 70 % hidden, lanes idle under
10 %. Section p: time to plan, by number of tasks.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import cycle

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
_CALL_BYTES, _MEMORY_BYTES = 1 << 18, 1 << 26
_SIMULATED, _WAITING, _WORKING = "simulated", "waiting", "working"


def _patterns(pieces: int, piece_s: float) -> Mapping[str, Tasks]:
    """Matched tasks: `pieces` of each kind, all of one length."""
    each, half = [piece_s] * pieces, [piece_s] * (pieces // 2)
    return {
        "double buffering": double_buffered(each, each),
        "ping-pong of two micro-batches": ping_pong(half, half),
        "KV sent by layer": sent_by_layer(each, each),
        "KV loaded by layer": double_buffered(each, each, num_buffers=pieces),
    }


class _MatchedWork:
    """Computation and communication that take `seconds` of a thread's CPU time each."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._source, self._target = np.ones(_MEMORY_BYTES, np.uint8), np.zeros(_MEMORY_BYTES, np.uint8)

    def compute(self) -> None:
        self._spend(lambda: hashlib.sha256(self._source[:_CALL_BYTES].data).digest())

    def communicate(self) -> None:
        starts = cycle(range(0, _MEMORY_BYTES, _CALL_BYTES))
        self._spend(lambda: self._copy(next(starts)))

    def _copy(self, start: int) -> None:
        np.copyto(self._target[start : start + _CALL_BYTES], self._source[start : start + _CALL_BYTES])

    def _spend(self, call: Callable[[], object]) -> None:
        end_s = time.thread_time() + self._seconds
        while time.thread_time() < end_s:
            call()

    def work(self, schedule: OverlapSchedule) -> Work:
        names = [slot.task.name for slot in schedule.slots]
        return {name: self.communicate if name in schedule.comm else self.compute for name in names}


def _hidden(plan: MicroBenchPlan, stopwatch: Stopwatch) -> Iterator[MicroBenchRow]:
    """Section h: shares in percent, medians of the rounds."""
    piece_s = plan.task_ms / 1e3
    for variant in plan.variants:
        matched = _MatchedWork(piece_s) if variant == _WORKING else None
        for name, tasks in _patterns(plan.pieces, piece_s).items():
            schedule = CriticalPathManager().schedule(*tasks)
            executor: OverlapExecutor = ThreadExecutor()
            work: Work = {slot.task.name: partial(time.sleep, piece_s) for slot in schedule.slots}
            if variant == _SIMULATED:
                executor, work = SimulatedExecutor(ManualClock()), dict.fromkeys(work, int)
            elif matched is not None:
                work = matched.work(schedule)
            runs = [executor.run(schedule, work).timeline for _ in range(plan.rounds)]
            shares = {
                HIDDEN: [run.hidden_fraction for run in runs],
                IDLE: [max(run.idle_shares.values()) for run in runs],
                SAVED: [1 - run.makespan_s / schedule.serial_s for run in runs],
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


NAMES = (_SIMULATED, _WAITING, _WORKING)
BENCHMARK = MicroBenchmark(
    "overlap", lambda: NAMES, _check, {"h": _hidden, "p": timed("p", Recipe(PLAN, _plan, "tasks", calls=1))}
)
