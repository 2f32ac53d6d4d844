"""First in, first out: the order of arrival, whatever was used since. The baseline without any memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Self

from sagellm.core.protocols.eviction import Extent
from sagellm.kvmgr.eviction._queue import ExtentQueue
from sagellm.kvmgr.eviction._queued import Note, QueuedPolicy


class FIFOEvictionPolicy(QueuedPolicy):
    """One queue; a use changes nothing, and an extent that was pinned returns to its old place."""

    def __init__(self, *, capacity: int | None = None) -> None:
        super().__init__(capacity)
        self._queue = ExtentQueue()
        self._arrivals = itertools.count()

    def _admit(self, extent: Extent, note: Note | None) -> None:
        self._put(extent, self._queue, next(self._arrivals) if note is None else note[1])

    def _choose(self) -> ExtentQueue | None:
        return self._queue if self._queue.live else None

    def fresh(self) -> Self:
        return type(self)(capacity=self._given_capacity)

    def _queues(self) -> Sequence[ExtentQueue]:
        return (self._queue,)


PLUGIN = FIFOEvictionPolicy
