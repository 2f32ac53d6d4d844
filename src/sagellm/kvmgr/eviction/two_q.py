"""2Q: a short FIFO for new extents, an LRU queue for those that return.

##

Source: Johnson and Shasha, "2Q: A Low Overhead High Performance Buffer Management Replacement Algorithm"
(VLDB 1994), the full version.
"""

from __future__ import annotations

import itertools

from sagellm.core.errors import ConfigError
from sagellm.core.protocols.eviction import Extent
from sagellm.kvmgr.eviction._base import (
    ExtentQueue,
    GhostQueue,
    QueuedPolicy,
    QueueEntry,
    recency,
)

MAX_OUT_SHARE = 1000


class TwoQPolicy(QueuedPolicy):
    """A1in, Am and A1out of the paper are `_new`, `_main` and `_ghosts`.

    `in_share` and `out_share`: the sizes of A1in and A1out as shares of the capacity. A use within A1in
    changes nothing: it is correlated with the first one.
    """

    def __init__(
        self, *, capacity: int | None = None, in_share: float = 0.25, out_share: float = 0.5
    ) -> None:
        super().__init__(capacity)
        if not 0 <= in_share <= 1 or not 0 <= out_share <= MAX_OUT_SHARE:
            in_range = f"in_share {in_share} must be in 0..1, out_share {out_share}"
            raise ConfigError(f"{in_range} in 0..{MAX_OUT_SHARE}")
        self._in_share, self._out_share = in_share, out_share
        self._new, self._main = ExtentQueue(), ExtentQueue()
        self._ghosts = GhostQueue()
        self._arrivals = itertools.count()

    def _enqueue(self, extent: Extent, former: QueueEntry | None) -> None:
        if former is not None:
            queue, rank = former.queue, former.rank
        else:
            queue = self._main if self._ghosts.pop(extent.key) else self._new
            rank = next(self._arrivals)
        self._push(extent, queue, recency(extent) if queue is self._main else rank)
        self._ghosts.trim(int(self._out_share * self._capacity))

    def _enqueue_parent(self, parent: Extent, child: QueueEntry) -> None:
        self._push(parent, child.queue, recency(parent) if child.queue is self._main else child.rank)

    def _next_queue(self) -> ExtentQueue | None:
        if self._new.live:
            if not self._main.live or self._new.num_blocks > int(self._in_share * self._capacity):
                return self._new
        elif not self._main.live:
            return None
        return self._main

    def _evicted(self, entry: QueueEntry) -> None:
        if entry.queue is self._new:
            self._ghosts.add(entry.extent.key, entry.size)
            self._ghosts.trim(self._max_ghosts)

    @property
    def _max_ghosts(self) -> float:
        return (1 + self._out_share) * self._capacity

    def check(self) -> None:
        super().check()
        self._ghosts.check(self._max_ghosts)


PLUGIN = TwoQPolicy
