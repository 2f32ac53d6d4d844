"""Value plus age: the policy of the GreedyDual family, whose members differ in what a use is worth.

Sources: Young, "On-line caching as cache size varies" (1991), for the age; Arlitt, Cherkasova, Dilley,
Friedrich and Jin, "Evaluating Content Management Techniques for Web Proxy Caches" (1999), for LFU-DA.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from sagellm.core.protocols.eviction import Extent
from sagellm.kvmgr.eviction._queue import Entry, ExtentQueue, recency
from sagellm.kvmgr.eviction._queued import Note, QueuedPolicy


class AgeingPolicy(QueuedPolicy):
    """One queue by age at the last use + worth of the uses so far; ties by LRU.

    The age is the value of the last extent that went: what is not used any more is overtaken by what comes.
    `ageing=False` keeps it at 0. Uses are those that the extent itself tells, or those heard of, whichever
    are more.
    """

    def __init__(self, capacity: int | None, *, ageing: bool) -> None:
        super().__init__(capacity)
        self._ageing = ageing
        self._age = 0.0
        self._queue = ExtentQueue()
        self._uses: dict[int, int] = {}

    @abstractmethod
    def _worth(self, extent: Extent, uses: int) -> float:
        """What keeping the extent is worth after so many uses, per block of memory."""

    def _admit(self, extent: Extent, note: Note | None) -> None:
        uses, age = extent.num_uses, self._age
        if note is not None:
            _, rank, used, before = note
            uses = max(uses, before + used)
            if uses == before:
                age = rank[-1]
        self._uses[extent.key] = uses
        self._put(extent, self._queue, self._rank(extent, uses, age))

    def _rank(self, extent: Extent, uses: int, age: float) -> tuple[float, ...]:
        return (age + self._worth(extent, uses), *recency(extent), age)

    def _choose(self) -> ExtentQueue | None:
        return self._queue if self._queue.live else None

    def _note(self, key: int, entry: Entry, queue: ExtentQueue, used: int) -> Note:
        return (queue, entry[0], used, self._uses.pop(key))

    def _evicted(self, entry: Entry, queue: ExtentQueue) -> None:
        del self._uses[entry[2].key]
        if self._ageing and entry[0][0] > self._age:
            self._age = entry[0][0]

    def _follow(self, parent: Extent, entry: Entry, queue: ExtentQueue) -> None:
        """The child's last use was the parent's too: the age is that of then, not of now."""
        uses = self._uses[parent.key] = parent.num_uses
        self._put(parent, queue, self._rank(parent, uses, entry[0][-1]))

    def _queues(self) -> Sequence[ExtentQueue]:
        return (self._queue,)
