"""Least recently used: the leaf whose last user went longest ago goes first."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.eviction import Extent, Hint, OnEmptied, Victim
from sagellm.kvmgr.eviction._candidates import EvictionCandidate, select_victims


class LRUEvictionPolicy:
    """A heap by `Extent.last_use`, entries deleted lazily; deeper extents first on ties."""

    def __init__(self) -> None:
        self._extents: dict[int, Extent] = {}
        self._heap: list[tuple[int, int, int]] = []
        self._num_blocks = 0

    @property
    def num_evictable(self) -> int:
        return self._num_blocks

    def insert(self, extent: Extent) -> None:
        self.remove(extent.key)
        self._extents[extent.key] = extent
        self._num_blocks += extent.num_blocks
        heapq.heappush(self._heap, self._entry(extent))

    def pin(self, key: int) -> None:
        self.remove(key)

    def unpin(self, extent: Extent) -> None:
        self.insert(extent)

    def remove(self, key: int) -> None:
        extent = self._extents.pop(key, None)
        if extent is not None:
            self._num_blocks -= extent.num_blocks
            if len(self._heap) > 64 and len(self._heap) > 4 * len(self._extents):
                self._heap = [self._entry(live) for live in self._extents.values()]
                heapq.heapify(self._heap)

    def evict(self, num_blocks: int, on_emptied: OnEmptied | None = None) -> list[Victim] | None:
        if num_blocks < 0:
            raise BookkeepingError(f"cannot evict {num_blocks} blocks")
        if on_emptied is None and num_blocks > self._num_blocks:
            return None
        victims: list[Victim] = []
        while num_blocks:
            extent = self._oldest()
            take = min(num_blocks, extent.num_blocks)
            num_blocks -= take
            victims.append(Victim(extent.key, take))
            self._take(extent, take, on_emptied)
        return victims

    def split(self, old: int, head: Extent, tail: Extent) -> None:
        self.remove(old)
        self.insert(tail)

    def hint(self, key: int, hint: Hint) -> None:
        """`ended` and `superseded` move an extent to the front of the queue; LRU knows nothing else."""
        extent = self._extents.get(key)
        if extent is not None and (hint.ended or hint.superseded):
            self.insert(replace(extent, last_use=-1))

    def select_victims(self, candidates: Sequence[EvictionCandidate], required_blocks: int) -> list[str]:
        return select_victims(LRUEvictionPolicy, candidates, required_blocks)

    def check(self) -> None:
        blocks = sum(extent.num_blocks for extent in self._extents.values())
        if blocks != self._num_blocks:
            raise BookkeepingError(
                f"LRU counts {self._num_blocks} evictable blocks, its extents hold {blocks}"
            )
        entries = set(self._heap)
        for extent in self._extents.values():
            if self._entry(extent) not in entries:
                raise BookkeepingError(f"extent {extent.key:x} is not in the queue")

    def _entry(self, extent: Extent) -> tuple[int, int, int]:
        return (extent.last_use, -extent.first_position, extent.key)

    def _oldest(self) -> Extent:
        while self._heap:
            entry = self._heap[0]
            extent = self._extents.get(entry[2])
            if extent is not None and self._entry(extent) == entry:
                return extent
            heapq.heappop(self._heap)
        raise BookkeepingError("evict was asked for more blocks than its leaves and their parents hold")

    def _take(self, extent: Extent, take: int, on_emptied: OnEmptied | None) -> None:
        if take < extent.num_blocks:
            self._num_blocks -= take
            self._extents[extent.key] = replace(extent, num_blocks=extent.num_blocks - take)
            return
        self.remove(extent.key)
        parent = on_emptied(extent.key) if on_emptied is not None else None
        if parent is not None:
            self.insert(parent)


PLUGIN = LRUEvictionPolicy
