"""LRU: the least recently used evictable extent goes first."""

from __future__ import annotations

import heapq
import itertools
import math

from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.eviction import Extent, GiveUp, Hint

HeapItem = tuple[float, int, int, int, Extent]
"""Time of last use plus retention, count of uses, minus the depth, serial number, extent."""


class LRUPolicy:
    """A heap of extents by last use.

    Not a queue: a parent that becomes a leaf may be older than others. Items are deleted lazily. Of extents
    that one request used, the deeper goes first. It stands alone, without the shared base, because it is the
    baseline of every measurement.
    """

    def __init__(self) -> None:
        self._live: dict[int, HeapItem] = {}
        self._heap: list[HeapItem] = []
        self._num_blocks = 0
        self._serial = itertools.count()

    @property
    def num_evictable(self) -> int:
        return self._num_blocks

    def insert(self, extent: Extent) -> None:
        hint = extent.hint
        self._push(extent, extent.used_s + extent.bonus_s if hint is None else _hinted_s(extent, hint))

    def pin(self, key: int) -> None:
        self.remove(key)

    def unpin(self, extent: Extent) -> None:
        self.insert(extent)

    def remove(self, key: int) -> None:
        item = self._live.pop(key, None)
        if item is not None:
            self._num_blocks -= item[-1].num_blocks
            if len(self._heap) > 64 and len(self._heap) > 4 * len(self._live):
                self._heap = list(self._live.values())
                heapq.heapify(self._heap)

    def evict(self, num_blocks: int, give_up: GiveUp) -> int:
        if num_blocks < 0:
            raise BookkeepingError(f"cannot evict {num_blocks} blocks")
        live, heap, missing = self._live, self._heap, num_blocks
        while missing and heap:
            item = heap[0]
            extent = item[-1]
            if live.get(extent.key) is not item:
                heapq.heappop(heap)
                continue
            held = extent.num_blocks
            if missing < held:
                self._num_blocks -= missing
                give_up(extent, missing)
                return num_blocks
            heapq.heappop(heap)
            del live[extent.key]
            self._num_blocks -= held
            missing -= held
            parent = give_up(extent, held)
            if parent is not None:
                self.insert(parent)
        return num_blocks - missing

    def split(self, old: int, head: Extent, tail: Extent) -> None:
        item = self._live.pop(old, None)
        if item is not None:
            when_s, *_ = item
            self._num_blocks -= head.num_blocks + tail.num_blocks
            self._push(tail, when_s)

    def hint(self, key: int, hint: Hint) -> None:
        item = self._live.get(key)
        if item is not None:
            self._push(item[-1], _hinted_s(item[-1], hint))

    def check(self) -> None:
        """Raises `BookkeepingError` where the count of blocks, the keys and the heap disagree."""
        blocks = sum(extent.num_blocks for *_, extent in self._live.values())
        if blocks != self._num_blocks:
            raise BookkeepingError(
                f"LRU counts {self._num_blocks} evictable blocks, its extents hold {blocks}"
            )
        queued = {id(item) for item in self._heap}
        for key, item in self._live.items():
            if id(item) not in queued or item[-1].key != key:
                raise BookkeepingError(f"extent {key:x} is not in the queue")

    def _push(self, extent: Extent, when_s: float) -> None:
        key = extent.key
        if key in self._live:
            self.remove(key)
        item = (when_s, extent.last_use, -extent.first_position, next(self._serial), extent)
        self._live[key] = item
        self._num_blocks += extent.num_blocks
        heapq.heappush(self._heap, item)


def _hinted_s(extent: Extent, hint: Hint) -> float:
    """The time that ranks an extent with a hint. Wanted extents go last, ended ones first."""
    if hint.wanted:
        return math.inf
    return -math.inf if hint.ended or hint.superseded else extent.used_s + extent.bonus_s


PLUGIN = LRUPolicy
