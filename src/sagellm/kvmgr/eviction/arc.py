"""ARC: two LRU queues, whose sizes are decided by the ghosts of both.

Source: Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache" (FAST 2003).
"""

from __future__ import annotations

from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.eviction import Extent, Hint
from sagellm.kvmgr.eviction._base import (
    ExtentQueue,
    GhostQueue,
    QueuedPolicy,
    QueueEntry,
    recency,
)


class ARCPolicy(QueuedPolicy):
    """T1, T2, B1, B2 and p are `_once`, `_often`, their ghosts, and `_target`.

    Sizes are in blocks. The paper adapts p to the block that comes, before it makes room. A policy learns of
    a block after room was made, so p adapts too late for that choice, unless `hint(key, wanted_by=1)`
    announces the ghost first (the last announcement counts). With announcements the choices are the paper's.
    """

    def __init__(self, *, capacity: int | None = None) -> None:
        super().__init__(capacity)
        self._once, self._often = ExtentQueue(), ExtentQueue()
        self._once_ghosts, self._often_ghosts = GhostQueue(), GhostQueue()
        self._target = 0.0
        self._announced: int | None = None

    def hint(self, key: int, hint: Hint) -> None:
        if hint.wanted and (key in self._once_ghosts or key in self._often_ghosts):
            if self._announced != key:
                self._adapt(key)
                self._announced = key
        else:
            super().hint(key, hint)

    def _enqueue(self, extent: Extent, former: QueueEntry | None) -> None:
        key = extent.key
        if former is not None:
            queue = self._often if former.num_uses else former.queue
        elif key in self._once_ghosts or key in self._often_ghosts:
            queue = self._often
            if self._announced != key:
                self._adapt(key)
            self._once_ghosts.pop(key)
            self._often_ghosts.pop(key)
        else:
            queue = self._once
        self._announced = None
        self._push(extent, queue, recency(extent))
        # T1 and B1 have at most the capacity, all four twice that. Trimmed only here, so that an eviction
        # cannot drop the ghost for whose block it makes room.
        room = self._capacity
        self._once_ghosts.trim(max(0, room - self._once.num_blocks))
        self._often_ghosts.trim(max(0, 2 * room - self._num_blocks - self._once_ghosts.num_blocks))

    def _enqueue_parent(self, parent: Extent, child: QueueEntry) -> None:
        self._push(parent, child.queue, recency(parent))

    def _adapt(self, key: int) -> None:
        """A ghost returns: its queue should have been larger."""
        once, often = self._once_ghosts, self._often_ghosts
        if key in once:
            step = max(1.0, often.num_blocks / once.num_blocks) * once.size(key)
            self._target = min(self._capacity, self._target + step)
        else:
            step = max(1.0, once.num_blocks / often.num_blocks) * often.size(key)
            self._target = max(0.0, self._target - step)

    def _next_queue(self) -> ExtentQueue | None:
        """The paper's REPLACE. Of a T1 at its target, a coming ghost of T2 decides."""
        once, often, coming = self._once, self._often, self._announced
        is_tie = coming is not None and once.num_blocks == self._target and coming in self._often_ghosts
        if once.live and (not often.live or once.num_blocks > self._target or is_tie):
            return once
        return often if often.live else None

    def _evicted(self, entry: QueueEntry) -> None:
        ghosts = self._once_ghosts if entry.queue is self._once else self._often_ghosts
        ghosts.add(entry.extent.key, entry.size)
        ghosts.trim(self._max_ghosts)

    @property
    def _max_ghosts(self) -> int:
        return 3 * self._capacity

    def check(self) -> None:
        super().check()
        if not 0 <= self._target <= self._capacity:
            raise BookkeepingError(f"ARC's target {self._target} is not within its capacity {self._capacity}")
        for ghosts in (self._once_ghosts, self._often_ghosts):
            ghosts.check(self._max_ghosts)


PLUGIN = ARCPolicy
