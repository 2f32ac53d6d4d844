"""S3-FIFO: a small queue that most extents leave soon, a main queue, and ghosts.

Source: Yang, Zhang, Qiu, Yue and Vigfusson, "FIFO Queues are All You Need for Cache Eviction" (SOSP 2023).
"""

from __future__ import annotations

import itertools

from sagellm.core.errors import ConfigError
from sagellm.core.protocols.eviction import Extent
from sagellm.kvmgr.eviction._base import ExtentQueue, GhostQueue, QueuedPolicy, QueueEntry

MAX_USES = 3
USES_TO_MOVE = 2


class S3FIFOPolicy(QueuedPolicy):
    """S, M and G of the paper are `_small`, `_main` and `_ghosts`.

    `small_share`: S as a share of the capacity. G remembers as many blocks as M has. Uses are counted up to
    3, and from 0 again in M.
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

    def _enqueue(self, extent: Extent, former: QueueEntry | None) -> None:
        if former is not None:
            queue, rank = former.queue, former.rank
            num_uses = min(MAX_USES, former.state + former.num_uses)
            if num_uses:
                self._uses[extent.key] = num_uses
        else:
            queue = self._main if self._ghosts.pop(extent.key) else self._small
            rank = next(self._arrivals)
        self._push(extent, queue, rank)
        self._ghosts.trim(self._main_size)

    def _next_queue(self) -> ExtentQueue | None:
        """The paper's EVICT. Used extents move on or go round, losing a use each time, so the loop ends."""
        small, main, uses_of, main_size = self._small, self._main, self._uses, self._main_size
        small_size = self._capacity - main_size
        while small.live or main.live:
            if small.live and (not main.live or small.num_blocks >= small_size):
                entry = small.first()
                key = entry.extent.key
                if uses_of.get(key, 0) < USES_TO_MOVE:
                    return small
                del uses_of[key]
                self._requeue_first(entry, small, main, next(self._arrivals))
                if main.num_blocks <= main_size:
                    continue
            entry = main.first()
            key = entry.extent.key
            num_uses = uses_of.pop(key, 0)
            if not num_uses:
                return main
            if num_uses > 1:
                uses_of[key] = num_uses - 1
            self._requeue_first(entry, main, main, next(self._arrivals))
        return None

    def _remember(self, key: int, extent: Extent) -> int:
        return self._uses.pop(key, 0)

    def _evicted(self, entry: QueueEntry) -> None:
        key = entry.extent.key
        self._uses.pop(key, None)
        if entry.queue is self._small:
            self._ghosts.add(key, entry.size)
            self._ghosts.trim(2 * self._capacity)

    @property
    def _main_size(self) -> int:
        return self._capacity - (int(self._small_share * self._capacity) or 1)

    def check(self) -> None:
        super().check()
        self._ghosts.check(2 * self._capacity)


PLUGIN = S3FIFOPolicy
