"""Extents in order of a rank: the queue that the policies are made of."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from typing import Any

from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.eviction import Extent

Entry = tuple[Any, int, Extent, int]
"""Rank, serial number, extent, and its blocks when it came."""
FEW = 64
MAX_STALE = 3
MAX_ROWS = 4


class ExtentQueue:
    """The extent of the lowest rank is first; of equal ranks, the one that came first.

    Ranks of one queue must be comparable with each other. What comes in order of rank, as nearly all does,
    stands in a row, or in one of a few rows beside it (old ranks that return, counts of uses); what fits none
    (a parent below all others) in a heap. Entries are deleted lazily. `live` maps keys to entries; only this
    class changes it.
    """

    __slots__ = ("_heap", "_num_stale", "_rows", "_serial", "live", "num_blocks")

    def __init__(self) -> None:
        self.live: dict[int, Entry] = {}
        self.num_blocks = 0
        self._rows: list[deque[Entry]] = []
        self._heap: list[Entry] = []
        self._num_stale = 0  # at most so many entries are stale: those that came to the front are gone
        self._serial = itertools.count()

    def push(self, rank: Any, extent: Extent, num_blocks: int, size: int) -> None:
        """`size`: its blocks when it came to the policy, for the ghost that it may leave."""
        entry = (rank, next(self._serial), extent, size)
        self.live[extent.key] = entry
        self.num_blocks += num_blocks
        for row in self._rows:
            if not row or rank >= row[-1][0]:
                row.append(entry)
                return
        if len(self._rows) < MAX_ROWS:
            self._rows.append(deque((entry,)))
        else:
            heapq.heappush(self._heap, entry)

    def first(self) -> Entry:
        """The next to go; the queue must not be empty."""
        rows, heap, live = self._rows, self._heap, self.live
        if len(rows) == 1 and not heap:  # nearly always: a use or an insertion in order of time
            row = rows[0]
            while live.get((entry := row[0])[2].key) is not entry:
                row.popleft()
            return entry
        while heap and live.get(heap[0][2].key) is not heap[0]:
            heapq.heappop(heap)
        first = heap[0] if heap else None
        for row in rows:
            while row:
                entry = row[0]
                if live.get(entry[2].key) is entry:
                    if first is None or entry < first:
                        first = entry
                    break
                row.popleft()
        assert first is not None
        return first

    def drop_first(self, entry: Entry, num_blocks: int) -> None:
        """Take out what `first` just answered, and its blocks."""
        for row in self._rows:
            if row and row[0] is entry:
                row.popleft()
                break
        else:
            heapq.heappop(self._heap)
        del self.live[entry[2].key]
        self.num_blocks -= num_blocks

    def take(self, key: int, num_blocks: int) -> Entry:
        """Take an extent out that counted as `num_blocks` here."""
        entry = self.live.pop(key)
        self.num_blocks -= num_blocks
        self._num_stale += 1
        if self._num_stale > FEW and self._num_stale > MAX_STALE * len(self.live):
            self._rows = [deque(sorted(self.live.values()))]
            self._heap = []
            self._num_stale = 0
        return entry

    def check(self) -> None:
        """Raise `BookkeepingError` where counts, keys and the heap do not fit."""
        blocks = sum(entry[2].num_blocks for entry in self.live.values())
        if blocks != self.num_blocks:
            raise BookkeepingError(f"a queue counts {self.num_blocks} blocks, its extents hold {blocks}")
        queued = {id(entry) for entry in itertools.chain(self._heap, *self._rows)}
        for key, entry in self.live.items():
            if id(entry) not in queued or entry[2].key != key:
                raise BookkeepingError(f"extent {key:x} is not in its queue")


def recency(extent: Extent) -> tuple[float, int, int]:
    """The rank of LRU: time of the last use with soft retention, count of uses, deeper ones first."""
    return (extent.used_s + extent.bonus_s, extent.last_use, -extent.first_position)
