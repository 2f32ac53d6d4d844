"""SIEVE: a hand sweeps the queue and evicts extents unused since its last pass.

Source: Zhang, Yang, Yue, Vigfusson and Rashmi, "SIEVE is Simpler than LRU" (NSDI 2024).
"""

from __future__ import annotations

import itertools

from sagellm.core.protocols.eviction import Extent
from sagellm.kvmgr.eviction._base import ExtentQueue, QueuedPolicy, QueueEntry


class SievePolicy(QueuedPolicy):
    """The paper's one queue, cut at the hand into `_ahead` and `_passed`.

    A use moves nothing. An extent that was pinned returns to its old place, on whichever side of the hand
    that is by now.
    """

    def __init__(self, *, capacity: int | None = None) -> None:
        super().__init__(capacity)
        self._ahead, self._passed = ExtentQueue(), ExtentQueue()
        self._visited: set[int] = set()
        self._arrivals = itertools.count()
        self._hand = -1

    def _enqueue(self, extent: Extent, former: QueueEntry | None) -> None:
        if former is None:
            if not self._ahead.live:
                self._start_sweep()
            self._push(extent, self._ahead, next(self._arrivals))
            return
        if former.num_uses or former.state:
            self._visited.add(extent.key)
        self._push(extent, self._ahead if former.rank > self._hand else self._passed, former.rank)

    def _next_queue(self) -> ExtentQueue | None:
        while True:
            if not self._ahead.live:
                if not self._passed.live:
                    return None
                self._start_sweep()
            entry = self._ahead.first()
            key = entry.extent.key
            if key not in self._visited:
                return self._ahead
            self._visited.discard(key)
            self._requeue_first(entry, self._ahead, self._passed, entry.rank)
            self._hand = entry.rank

    def _start_sweep(self) -> None:
        """The hand has passed the youngest extent and goes on at the oldest."""
        self._ahead, self._passed = self._passed, self._ahead
        self._hand = -1

    def _remember(self, key: int, extent: Extent) -> bool:
        was_visited = key in self._visited
        self._visited.discard(key)
        return was_visited

    def _evicted(self, entry: QueueEntry) -> None:
        self._visited.discard(entry.extent.key)
        if entry.queue is self._ahead:
            self._hand = entry.rank


PLUGIN = SievePolicy
