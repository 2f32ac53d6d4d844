"""Bandwidths as nccl-tests defines them, and the share of a step spent communicating.

The algorithm bandwidth is size / time. The bus bandwidth multiplies it by the share of the size that crosses
the slowest link in the best algorithm, so that it can be compared with the link's own, whatever the operation
and the number of ranks (NVIDIA/nccl-tests, doc/PERFORMANCE.md).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from sagellm.core.clock import Clock
from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.collectives import Work, WorkStatus


class CollectiveKind(str, Enum):
    """Kinds of operations."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    BROADCAST = "broadcast"
    ALL_TO_ALL = "all_to_all"
    SEND = "send"
    RECV = "recv"
    BARRIER = "barrier"

    __hash__ = str.__hash__  # that of Enum is Python code


def bus_factor(kind: CollectiveKind, world_size: int) -> float:
    """Bus bandwidth / algorithm bandwidth.

    The size of all_gather, reduce_scatter and all_to_all is that of the whole buffer, not of a rank's part.
    """
    others = (world_size - 1) / world_size
    if kind is CollectiveKind.ALL_REDUCE:
        return 2 * others
    if kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL):
        return others
    return 1.0


@dataclass(slots=True)
class CollectiveCount:
    """Sums over the calls of one kind."""

    num_calls: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    def algorithm_bytes_per_s(self) -> float:
        """0 before the first call."""
        return self.num_bytes / self.seconds if self.seconds else 0.0


class DeviceWork(Work, Protocol):
    """A work on a device with streams, between two events of the device's time."""

    begun: Any
    ended: Any


@dataclass(slots=True)
class CommMeter:
    """Counts of one rank. The seconds are those in which the calling thread submits or waits.

    An operation in a stream of a device counts when the device has done it, with the device's seconds from
    its submission until the current stream has waited for it; what two have in common counts once.
    """

    clock: Clock
    world_size: int
    counts: dict[CollectiveKind, CollectiveCount] = field(default_factory=dict)
    step_s: float = 0.0
    step_comm_s: float = 0.0
    _in_flight: deque[tuple[CollectiveKind, int, DeviceWork]] = field(default_factory=deque)
    _last: DeviceWork | None = None

    def add(self, kind: CollectiveKind, num_bytes: int, seconds: float, *, num_calls: int = 1) -> None:
        count = self.counts.get(kind)
        if count is None:
            count = self.counts[kind] = CollectiveCount()
        count.num_calls += num_calls
        count.num_bytes += num_bytes
        count.seconds += seconds

    def follow(self, kind: CollectiveKind, num_bytes: int, work: DeviceWork) -> None:
        """Count the work when its device has done it. Works end in the order of their submission."""
        self._in_flight.append((kind, num_bytes, work))
        self.settle()

    def settle(self, *, wait: bool = False) -> None:
        """Count what devices have done; with `wait` after they have done all. Failed works do not count."""
        while self._in_flight:
            kind, num_bytes, work = self._in_flight[0]
            if wait and work.poll() is WorkStatus.PENDING:
                work.wait(math.inf)
            status = work.poll()
            if status is WorkStatus.PENDING:
                return
            self._in_flight.popleft()
            if status is WorkStatus.DONE:
                ms = work.begun.elapsed_time(work.ended)
                if self._last is not None:
                    ms = max(0.0, min(ms, self._last.ended.elapsed_time(work.ended)))
                self.add(kind, num_bytes, ms / 1e3)
                self._last = work

    def bus_bytes_per_s(self, kind: CollectiveKind) -> float:
        """Mean bus bandwidth of all calls of a kind; 0 before the first."""
        self.settle()
        count = self.counts.get(kind, CollectiveCount())
        return count.algorithm_bytes_per_s() * bus_factor(kind, self.world_size)

    @property
    def seconds(self) -> float:
        """Seconds in all operations."""
        return sum(count.seconds for count in self.counts.values())

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count what happens inside as part of a step. On a device with streams it waits at both ends."""
        self.settle(wait=True)
        began_s, before_s = self.clock.now(), self.seconds
        try:
            yield
            self.settle(wait=True)
        finally:
            step_s = self.clock.now() - began_s
            self.step_s += step_s
            self.step_comm_s += min(step_s, self.seconds - before_s)  # a device has a clock of its own

    @property
    def step_share(self) -> float:
        """Share of the steps' time spent communicating, 0 to 1. 0 before the first step."""
        return self.step_comm_s / self.step_s if self.step_s else 0.0

    def check(self) -> None:
        """Raise `BookkeepingError` where counts contradict each other."""
        for kind, count in self.counts.items():
            if count.num_calls < 0 or count.num_bytes < 0 or count.seconds < 0:
                raise BookkeepingError(f"{kind.value}: {count} cannot be")
        if not 0 <= self.step_comm_s <= self.step_s:
            raise BookkeepingError(f"{self.step_comm_s} s of communication in {self.step_s} s of steps")
