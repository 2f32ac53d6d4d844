"""S3-FIFO: a small queue that most extents leave soon, a main queue for what was used again, and ghosts.

Source: Yang, Zhang, Qiu, Yue and Vigfusson, "FIFO Queues are All You Need for Cache Eviction" (SOSP 2023).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Self

from sagellm.core.errors import ConfigError
from sagellm.core.protocols.eviction import Extent
from sagellm.kvmgr.eviction._ghosts import GhostQueue
from sagellm.kvmgr.eviction._queue import Entry, ExtentQueue
from sagellm.kvmgr.eviction._queued import Note, QueuedPolicy

MAX_USES = 3
USES_TO_MOVE = 2


class S3FIFOEvictionPolicy(QueuedPolicy):
    """S, M and G of the paper are `_small`, `_main` and `_ghosts`. `small_share` is S as a part of the
    capacity; G remembers as many blocks as M has. Uses are counted up to 3, and from 0 again in M.
    """

    def __init__(self, *, capacity: int | None = None, small_share: float = 0.1) -> None:
        super().__init__(capacity)
        if not 0 < small_share < 1:
            raise ConfigError(f"small_share must be between 0 and 1, not {small_share}")
        self._small_share = small_share
        self._small, self._main = ExtentQueue(), ExtentQueue()
        self._ghosts = GhostQueue()
        self._uses: dict[int, int] = {}
        self._arrivals = itertools.count()

    def _admit(self, extent: Extent, note: Note | None) -> None:
        if note is not None:
            queue, rank, uses = note
            if uses:
                self._uses[extent.key] = uses
        else:
            queue = self._main if self._ghosts.pop(extent.key) else self._small
            rank = next(self._arrivals)
        self._put(extent, queue, rank)
        self._ghosts.trim(self._main_size)

    def _choose(self) -> ExtentQueue | None:
        """The paper's loop: who was used moves on or goes round, with fewer uses each time, so it ends."""
        small, main, uses_of, main_size = self._small, self._main, self._uses, self._main_size
        small_size = self._capacity - main_size
        while small.live or main.live:
            if small.live and (not main.live or small.num_blocks >= small_size):
                entry = small.first()
                key = entry[2].key
                if uses_of.get(key, 0) < USES_TO_MOVE:
                    return small
                del uses_of[key]
                self._requeue_first(entry, small, main, next(self._arrivals))
                if main.num_blocks <= main_size:
                    continue
            entry = main.first()
            key = entry[2].key
            uses = uses_of.pop(key, 0)
            if not uses:
                return main
            if uses > 1:
                uses_of[key] = uses - 1
            self._requeue_first(entry, main, main, next(self._arrivals))
        return None

    @property
    def _main_size(self) -> int:
        return self._capacity - (int(self._small_share * self._capacity) or 1)

    def _note(self, key: int, entry: Entry, queue: ExtentQueue, used: int) -> Note:
        uses = self._uses.pop(key, 0) if self._uses else 0
        return (queue, entry[0], min(MAX_USES, uses + used))

    def _evicted(self, entry: Entry, queue: ExtentQueue) -> None:
        key = entry[2].key
        self._uses.pop(key, None)
        if queue is self._small:
            ghosts = self._ghosts
            ghosts.add(key, entry[3])
            if ghosts.num_blocks > 2 * self._capacity:
                ghosts.trim(2 * self._capacity)

    def check(self) -> None:
        super().check()
        self._ghosts.check(2 * self._capacity)

    def fresh(self) -> Self:
        return type(self)(capacity=self._given_capacity, small_share=self._small_share)

    def _queues(self) -> Sequence[ExtentQueue]:
        return (self._small, self._main)


PLUGIN = S3FIFOEvictionPolicy
