"""Least recently used: the leaf whose last user went longest ago goes first."""

from __future__ import annotations

import heapq
import itertools
import math

from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.eviction import Extent, GiveUp, Hint

Entry = tuple[float, int, int, int, Extent]


class LRUPolicy:
    """A heap of (time of last use plus retention, count of uses, depth), entries deleted lazily.

    A parent that became a leaf may be older than others, so a plain queue would not do. Among extents that
    one request used, the deeper goes first.
    """

    def __init__(self) -> None:
        self._live: dict[int, Entry] = {}
        self._heap: list[Entry] = []
        self._num_blocks = 0
        self._serial = itertools.count()

    @property
    def num_evictable(self) -> int:
        return self._num_blocks

    def insert(self, extent: Extent) -> None:
        self._enter(extent)

    def pin(self, key: int) -> None:
        self.remove(key)

    def unpin(self, extent: Extent) -> None:
        self._enter(extent)

    def remove(self, key: int) -> None:
        entry = self._live.pop(key, None)
        if entry is not None:
            self._num_blocks -= entry[4].num_blocks
            if len(self._heap) > 64 and len(self._heap) > 4 * len(self._live):
                self._heap = list(self._live.values())
                heapq.heapify(self._heap)

    def evict(self, num_blocks: int, give_up: GiveUp) -> int:
        if num_blocks < 0:
            raise BookkeepingError(f"cannot evict {num_blocks} blocks")
        live, heap, missing = self._live, self._heap, num_blocks
        while missing and heap:
            entry = heap[0]
            extent = entry[4]
            if live.get(extent.key) is not entry:
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
        entry = self._live.pop(old, None)
        if entry is not None:
            self._num_blocks -= head.num_blocks + tail.num_blocks
            self._place(tail, entry[0])

    def hint(self, key: int, hint: Hint) -> None:
        """What has ended goes first, what is wanted last; LRU knows nothing else."""
        entry = self._live.get(key)
        if entry is not None:
            self._place(entry[4], _when_s(entry[4], hint))

    def check(self) -> None:
        blocks = sum(entry[4].num_blocks for entry in self._live.values())
        if blocks != self._num_blocks:
            raise BookkeepingError(
                f"LRU counts {self._num_blocks} evictable blocks, its extents hold {blocks}"
            )
        queued = {id(entry) for entry in self._heap}
        for key, entry in self._live.items():
            if id(entry) not in queued or entry[4].key != key:
                raise BookkeepingError(f"extent {key:x} is not in the queue")

    def _enter(self, extent: Extent) -> None:
        hint = extent.hint
        self._place(extent, extent.used_s + extent.bonus_s if hint is None else _when_s(extent, hint))

    def _place(self, extent: Extent, when_s: float) -> None:
        key = extent.key
        if key in self._live:
            self.remove(key)
        entry = (when_s, extent.last_use, -extent.first_position, next(self._serial), extent)
        self._live[key] = entry
        self._num_blocks += extent.num_blocks
        heapq.heappush(self._heap, entry)


def _when_s(extent: Extent, hint: Hint) -> float:
    """The time by which an extent that something is known of takes its place."""
    if hint.wanted:
        return math.inf
    return -math.inf if hint.ended or hint.superseded else extent.used_s + extent.bonus_s


PLUGIN = LRUPolicy
