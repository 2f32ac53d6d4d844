"""LFU with dynamic ageing (LFU-DA): the least often used extent goes first.

Source: Arlitt, Cherkasova, Dilley, Friedrich and Jin, "Evaluating Content Management Techniques for Web Proxy
Caches" (1999). The age is that of GreedyDual: Young, "On-line caching as cache size varies" (1991).
"""

from __future__ import annotations

from sagellm.core.protocols.eviction import Extent
from sagellm.kvmgr.eviction._base import ExtentQueue, QueuedPolicy, QueueEntry, recency


class LFUPolicy(QueuedPolicy):
    """One queue by cache age at the last use + number of uses. Ties go by LRU.

    The cache's age is the value of the last extent that was evicted, so that new extents overtake those that
    were popular once. `ageing=False` keeps it at 0: plain LFU. Uses are those that the extent counts or those
    that the policy saw, whichever are more.
    """

    def __init__(self, *, capacity: int | None = None, ageing: bool = True) -> None:
        super().__init__(capacity)
        self._ageing = ageing
        self._age = 0.0
        self._queue = ExtentQueue()
        self._uses: dict[int, int] = {}

    def _enqueue(self, extent: Extent, former: QueueEntry | None) -> None:
        num_uses, age = extent.num_uses, self._age
        if former is not None:
            num_uses = max(num_uses, former.state + former.num_uses)
            if num_uses == former.state:
                *_, age = former.rank
        self._push_used(extent, num_uses, age)

    def _enqueue_parent(self, parent: Extent, child: QueueEntry) -> None:
        """The parent takes the age of the child's last use: it was used too."""
        *_, age = child.rank
        self._push_used(parent, parent.num_uses, age)

    def _push_used(self, extent: Extent, num_uses: int, age: float) -> None:
        self._uses[extent.key] = num_uses
        value = age + self._worth(extent, num_uses)
        self._push(extent, self._queue, (value, *recency(extent), age))

    def _worth(self, extent: Extent, num_uses: int) -> float:
        """What keeping the extent is worth after so many uses, per block of memory."""
        return num_uses

    def _next_queue(self) -> ExtentQueue | None:
        return self._queue if self._queue.live else None

    def _remember(self, key: int, extent: Extent) -> int:
        return self._uses.pop(key)

    def _evicted(self, entry: QueueEntry) -> None:
        del self._uses[entry.extent.key]
        value, *_ = entry.rank
        if self._ageing and value > self._age:
            self._age = value


PLUGIN = LFUPolicy
