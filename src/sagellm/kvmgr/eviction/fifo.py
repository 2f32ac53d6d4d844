"""First in, first out: the order of arrival, whatever was used since."""

from __future__ import annotations

import itertools

from sagellm.core.protocols.eviction import Extent
from sagellm.kvmgr.eviction._base import ExtentQueue, QueuedPolicy, QueueEntry


class FIFOPolicy(QueuedPolicy):
    """One queue in order of arrival. An extent that was pinned returns to its old place."""

    def __init__(self, *, capacity: int | None = None) -> None:
        super().__init__(capacity)
        self._queue = ExtentQueue()
        self._arrivals = itertools.count()

    def _enqueue(self, extent: Extent, former: QueueEntry | None) -> None:
        self._push(extent, self._queue, next(self._arrivals) if former is None else former.rank)

    def _next_queue(self) -> ExtentQueue | None:
        return self._queue if self._queue.live else None


PLUGIN = FIFOPolicy
