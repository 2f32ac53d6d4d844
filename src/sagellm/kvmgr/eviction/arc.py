"""ARC: two LRU queues, of what was used once and more often, whose sizes the ghosts of both decide.

Source: Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache" (FAST 2003).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.eviction import Extent, Hint
from sagellm.kvmgr.eviction._ghosts import GhostQueue
from sagellm.kvmgr.eviction._queue import Entry, ExtentQueue, recency
from sagellm.kvmgr.eviction._queued import Note, QueuedPolicy


class ARCEvictionPolicy(QueuedPolicy):
    """T1, T2, B1, B2 and p of the paper are `_once`, `_often`, their ghosts, and `_target`; sizes in blocks.

    The paper adapts p to the block that is about to come before it makes room. A policy hears of a block
    only when it is there, so here p moves after the choice, unless `hint(key, wanted_by=1)` announces the
    ghost that is coming (the last one announced counts). With announcements the choices are the paper's.
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

    def _admit(self, extent: Extent, note: Note | None) -> None:
        key = extent.key
        if note is not None:
            queue = self._often if note[2] else note[0]
        elif key in self._once_ghosts or key in self._often_ghosts:
            queue = self._often
            if self._announced != key:
                self._adapt(key)
            self._once_ghosts.pop(key)
            self._often_ghosts.pop(key)
        else:
            queue = self._once
        self._announced = None
        self._put(extent, queue, recency(extent))
        self._trim_ghosts()

    def _adapt(self, key: int) -> None:
        """A ghost returns: its queue should have been larger."""
        once, often = self._once_ghosts, self._often_ghosts
        if key in once:
            step = max(1.0, often.num_blocks / once.num_blocks) * once.size(key)
            self._target = min(self._capacity, self._target + step)
        else:
            step = max(1.0, once.num_blocks / often.num_blocks) * often.size(key)
            self._target = max(0.0, self._target - step)

    def _choose(self) -> ExtentQueue | None:
        once, often = self._once, self._often
        if once.live and (not often.live or once.num_blocks > self._target or self._tie()):
            return once
        return often if often.live else None

    def _tie(self) -> bool:
        """The paper's rule where T1 has just its target and the block that comes is a ghost of T2."""
        coming = self._announced
        return coming is not None and self._once.num_blocks == self._target and coming in self._often_ghosts

    def _evicted(self, entry: Entry, queue: ExtentQueue) -> None:
        ghosts = self._once_ghosts if queue is self._once else self._often_ghosts
        ghosts.add(entry[2].key, entry[3])
        ghosts.trim(self._most_ghosts)

    def _follow(self, parent: Extent, entry: Entry, queue: ExtentQueue) -> None:
        self._put(parent, queue, recency(parent))

    def _trim_ghosts(self) -> None:
        """At most as many blocks in T1 and B1 as fit, and twice as many in all. Only here, so that a ghost
        is met before the eviction that made room for it can push it out."""
        room = self._capacity
        self._once_ghosts.trim(max(0, room - self._once.num_blocks))
        self._often_ghosts.trim(max(0, 2 * room - self._num_blocks - self._once_ghosts.num_blocks))

    def check(self) -> None:
        super().check()
        if not 0 <= self._target <= self._capacity:
            raise BookkeepingError(f"ARC's target {self._target} is not within its capacity {self._capacity}")
        for ghosts in (self._once_ghosts, self._often_ghosts):
            ghosts.check(self._most_ghosts)

    @property
    def _most_ghosts(self) -> int:
        return 3 * self._capacity

    def fresh(self) -> Self:
        return type(self)(capacity=self._given_capacity)

    def _queues(self) -> Sequence[ExtentQueue]:
        return (self._once, self._often)


PLUGIN = ARCEvictionPolicy
