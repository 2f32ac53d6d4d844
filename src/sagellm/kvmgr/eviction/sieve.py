"""SIEVE: a hand sweeps a queue of arrivals and evicts what nobody used since it last passed.

Source: Zhang, Yang, Yue, Vigfusson and Rashmi, "SIEVE is Simpler than LRU" (NSDI 2024).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Self

from sagellm.core.protocols.eviction import Extent
from sagellm.kvmgr.eviction._queue import Entry, ExtentQueue
from sagellm.kvmgr.eviction._queued import Note, QueuedPolicy


class SieveEvictionPolicy(QueuedPolicy):
    """The paper's one queue, cut at the hand: what lies ahead of it in this sweep, and what it has passed.

    Nothing moves on a use. An extent that comes back from a pin takes its old place, on whichever side of
    the hand that is by now.
    """

    def __init__(self, *, capacity: int | None = None) -> None:
        super().__init__(capacity)
        self._ahead, self._passed = ExtentQueue(), ExtentQueue()
        self._visited: set[int] = set()
        self._arrivals = itertools.count()
        self._hand = -1

    def _admit(self, extent: Extent, note: Note | None) -> None:
        if note is None:
            if not self._ahead.live:
                self._start_sweep()
            self._put(extent, self._ahead, next(self._arrivals))
            return
        _, rank, visited = note
        if visited:
            self._visited.add(extent.key)
        self._put(extent, self._ahead if rank > self._hand else self._passed, rank)

    def _choose(self) -> ExtentQueue | None:
        while True:
            if not self._ahead.live:
                if not self._passed.live:
                    return None
                self._start_sweep()
            entry = self._ahead.first()
            key = entry[2].key
            if key not in self._visited:
                return self._ahead
            self._visited.discard(key)
            self._requeue_first(entry, self._ahead, self._passed, entry[0])
            self._hand = entry[0]

    def _start_sweep(self) -> None:
        """The hand is past the youngest: it goes on at the oldest."""
        self._ahead, self._passed = self._passed, self._ahead
        self._hand = -1

    def _note(self, key: int, entry: Entry, queue: ExtentQueue, used: int) -> Note:
        visited = used or key in self._visited
        self._visited.discard(key)
        return (queue, entry[0], visited)

    def _evicted(self, entry: Entry, queue: ExtentQueue) -> None:
        self._visited.discard(entry[2].key)
        if queue is self._ahead:
            self._hand = entry[0]

    def fresh(self) -> Self:
        return type(self)(capacity=self._given_capacity)

    def _queues(self) -> Sequence[ExtentQueue]:
        return (self._ahead, self._passed)


PLUGIN = SieveEvictionPolicy
