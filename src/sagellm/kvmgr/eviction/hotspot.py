"""Hot-spot protection: what many share is out of reach while it is hot; below that, LRU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

from sagellm.core.errors import ConfigError
from sagellm.core.protocols.eviction import Extent
from sagellm.kvmgr.eviction._queue import Entry, ExtentQueue, recency
from sagellm.kvmgr.eviction._queued import Note, QueuedPolicy

MAX_LOG2_HEAT = 60.0


class HotspotEvictionPolicy(QueuedPolicy):
    """Each use adds 1 to an extent's heat, which halves every `half_life_s`; a parent has the uses of all the
    children that went. From `threshold` on an extent is hot, and the cold go first. Hot extents keep at most
    `max_share` of the capacity, the coldest of them giving way.

    Heat h at time t is kept as the time t + half_life x log2(h) at which it has cooled down to 1: that number
    does not change while time passes, so the order of the hot is a queue. Time is the latest `used_s` seen.
    """

    def __init__(
        self,
        *,
        capacity: int | None = None,
        half_life_s: float = 300.0,
        threshold: float = 4.0,
        max_share: float = 0.5,
    ) -> None:
        super().__init__(capacity)
        if not half_life_s > 0 or threshold <= 1 or not 0 <= max_share <= 1:
            raise ConfigError(
                f"half_life_s {half_life_s} must be positive, threshold {threshold} above 1, "
                f"max_share {max_share} in 0..1"
            )
        self._half_life_s, self._threshold, self._max_share = half_life_s, threshold, max_share
        self._margin_s = half_life_s * math.log2(threshold)
        self._hot, self._cold = ExtentQueue(), ExtentQueue()
        self._cools_s: dict[int, float] = {}
        self._now_s = 0.0

    def _admit(self, extent: Extent, note: Note | None) -> None:
        when_s, half_life_s = extent.used_s, self._half_life_s
        if note is None:
            cools_s = when_s + half_life_s * math.log2(max(1, extent.num_uses))
        else:
            _, _, used, cools_s, before = note
            uses = max(used, extent.num_uses - before)
            if uses > 0:
                heat = 2.0 ** min(MAX_LOG2_HEAT, (cools_s - when_s) / half_life_s) + uses
                cools_s = when_s + half_life_s * math.log2(heat)
        self._place(extent, cools_s)

    def _place(self, extent: Extent, cools_s: float) -> None:
        self._now_s = max(self._now_s, extent.used_s)
        self._cools_s[extent.key] = cools_s
        if cools_s >= self._now_s + self._margin_s:
            self._put(extent, self._hot, (cools_s,))
        else:
            self._put(extent, self._cold, recency(extent))

    def _choose(self) -> ExtentQueue | None:
        hot, cold = self._hot, self._cold
        room = self._max_share * self._capacity
        while hot.live:
            entry = hot.first()
            if hot.num_blocks <= room and entry[0][0] >= self._now_s + self._margin_s:
                break
            self._requeue_first(entry, hot, cold, recency(entry[2]))
        if cold.live:
            return cold
        return hot if hot.live else None

    def _note(self, key: int, entry: Entry, queue: ExtentQueue, used: int) -> Note:
        return (queue, entry[0], used, self._cools_s.pop(key), entry[2].num_uses)

    def _evicted(self, entry: Entry, queue: ExtentQueue) -> None:
        del self._cools_s[entry[2].key]

    def _follow(self, parent: Extent, entry: Entry, queue: ExtentQueue) -> None:
        self._admit(parent, None)

    def fresh(self) -> Self:
        return type(self)(
            capacity=self._given_capacity,
            half_life_s=self._half_life_s,
            threshold=self._threshold,
            max_share=self._max_share,
        )

    def _queues(self) -> Sequence[ExtentQueue]:
        return (self._hot, self._cold)


PLUGIN = HotspotEvictionPolicy
