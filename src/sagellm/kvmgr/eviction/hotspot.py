"""Hot-spot protection: often used extents go last while they are hot."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sagellm.core.errors import ConfigError
from sagellm.core.protocols.eviction import Extent
from sagellm.kvmgr.eviction._base import ExtentQueue, QueuedPolicy, QueueEntry, recency

MAX_LOG2_HEAT = 60.0


@dataclass(slots=True, eq=False)
class Heat:
    """A pinned extent's heat: when it cools to 1, and its uses before."""

    cools_s: float
    num_uses: int


class HotspotPolicy(QueuedPolicy):
    """Evicts cold extents first, by LRU; hot ones, from `threshold` on, coldest first.

    Each use adds 1 to an extent's heat, which halves every `half_life_s`; a parent has the uses of all its
    evicted children. Hot extents keep at most `max_share` of the capacity: the coldest of them count as cold.

    Heat h at time t is stored as the time t + half_life x log2(h) at which it has cooled to 1. That number
    does not change while time passes, so hot extents can stand in a queue. Time is the latest `used_s` seen.
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

    def _enqueue(self, extent: Extent, former: QueueEntry | None) -> None:
        used_s, half_life_s = extent.used_s, self._half_life_s
        if former is None:
            cools_s = used_s + half_life_s * math.log2(max(1, extent.num_uses))
        else:
            before: Heat = former.state
            cools_s = before.cools_s
            num_uses = max(former.num_uses, extent.num_uses - before.num_uses)
            if num_uses > 0:
                heat = 2.0 ** min(MAX_LOG2_HEAT, (cools_s - used_s) / half_life_s) + num_uses
                cools_s = used_s + half_life_s * math.log2(heat)
        self._now_s = max(self._now_s, used_s)
        self._cools_s[extent.key] = cools_s
        if cools_s >= self._now_s + self._margin_s:
            self._push(extent, self._hot, cools_s)
        else:
            self._push(extent, self._cold, recency(extent))

    def _enqueue_parent(self, parent: Extent, child: QueueEntry) -> None:
        self._enqueue(parent, None)

    def _next_queue(self) -> ExtentQueue | None:
        hot, cold = self._hot, self._cold
        room = self._max_share * self._capacity
        while hot.live:
            entry = hot.first()
            if hot.num_blocks <= room and entry.rank >= self._now_s + self._margin_s:
                break
            self._requeue_first(entry, hot, cold, recency(entry.extent))
        if cold.live:
            return cold
        return hot if hot.live else None

    def _remember(self, key: int, extent: Extent) -> Heat:
        return Heat(self._cools_s.pop(key), extent.num_uses)

    def _evicted(self, entry: QueueEntry) -> None:
        del self._cools_s[entry.extent.key]


PLUGIN = HotspotPolicy
