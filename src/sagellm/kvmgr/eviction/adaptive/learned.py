"""Learned eviction: the fewest expected uses per second of memory go first."""

from __future__ import annotations

from typing import Any

from sagellm.core.clock import Clock
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.eviction import Extent, GiveUp
from sagellm.kvmgr.eviction._base import ExtentQueue, QueueEntry
from sagellm.kvmgr.eviction._history import HistoryPolicy
from sagellm.kvmgr.eviction.adaptive.history import NUM_FEATURES, SHARED, ReuseHistory, ReuseRecord
from sagellm.kvmgr.eviction.adaptive.reuse_model import ReuseModel
from sagellm.kvmgr.eviction.adaptive.value_queue import ValueQueue

CHANGED = 1.05
"""An extent in `_ranked` whose value has changed by this factor takes another place."""
SWEEP = 4
"""Extents too old for their row that may be moved for each block that is asked for."""
BLOCKS_PER_RERANK = 8
"""One extent in `_ranked` is ranked anew for so many blocks that are asked for."""
FORGOTTEN = 0.0
"""The value of an extent without a record: too many newer ones replaced it."""


class LearnedPolicy(HistoryPolicy):
    """Ranks extents by the value that a `ReuseModel` gives. LRU until the first fit.

    The model learns from every use and from every second without one, of evicted extents too
    (`ReuseHistory`), so that it knows the cost of an eviction without having kept the extent. `max_records`
    bounds that memory.

    Most extents have the value of their kind at their age and stand in `_by_value`. In `_ranked` are those
    with a rank of their own (value and last use): shared prefixes, extents with a retention, extents without
    a record, and all extents while the order is that of LRU.

    Raises `ConfigError` for a `max_records` below 1.
    """

    def __init__(
        self, *, capacity: int | None = None, clock: Clock | None = None, max_records: int = 16_384
    ) -> None:
        super().__init__(capacity, clock)
        if type(max_records) is not int or max_records < 1:
            raise ConfigError(f"max_records must be a whole number from 1 on, got {max_records!r}")
        self._max_records = max_records
        self._ranked, self._by_value = ExtentQueue(), ValueQueue()
        self._by_recency = True
        self._model = ReuseModel(NUM_FEATURES)
        self._history: ReuseHistory = ReuseHistory(self._model, max_records)

    # -- events

    def evict(self, num_blocks: int, give_up: GiveUp) -> int:
        now_s = self._by_value.now_s = self._now()
        if self._history.learn(now_s):
            self._by_value.renew(self._model.values)
            if self._by_recency:
                self._rank_all_by_value()
        if not self._by_recency:
            self._by_value.sweep(SWEEP * num_blocks)
            ranked = self._ranked
            for entry in ranked.in_turn(min(1 + num_blocks // BLOCKS_PER_RERANK, len(ranked.live))):
                self._rerank(entry)
        return super().evict(num_blocks, give_up)

    # -- what a policy decides

    def _enqueue(self, extent: Extent, former: QueueEntry | None) -> None:
        if extent.used_s > self._now_s:
            self._now_s = extent.used_s
        history = self._history
        record = history.record(extent, self._now())
        if history.changed:
            self._rank_changed()
        queue, rank = self._place(extent, record)
        self._push(extent, queue, rank)

    def _next_queue(self) -> ExtentQueue | None:
        ranked, by_value = self._ranked, self._by_value
        if ranked.live and not self._by_recency:
            while ranked.live and self._rerank(ranked.first()):
                pass
            if ranked.live and by_value.live and by_value.least < ranked.first().rank[0]:
                return by_value
        if ranked.live:
            return ranked
        return by_value if by_value.live else None

    def _move_back(self, key: int) -> None:
        super()._move_back(key)
        self._replace(self._held[key].live[key].extent)  # ranks have changed since it left

    # -- ranks

    def _place(self, extent: Extent, record: ReuseRecord | None) -> tuple[ExtentQueue, Any]:
        """The extent's queue and rank: value and last use, or in `_by_value` the record."""
        if self._by_recency:
            return self._ranked, (extent.used_s + extent.bonus_s, extent.last_use)
        if record is None:
            return self._ranked, (FORGOTTEN, extent.last_use)
        now_s = self._now()
        age_s = now_s - record.used_s
        if record.kind == SHARED:
            value = 1.0 / (max(age_s, record.gap_s or 0.0) + 1e-3)
        elif extent.bonus_s > age_s:
            value = self._model.value(record.kind, age_s)
        else:
            self._by_value.now_s = now_s
            return self._by_value, record
        value *= 1.0 + max(0.0, extent.bonus_s - age_s) / (1.0 + age_s)
        return self._ranked, (value, extent.last_use)

    def _replace(self, extent: Extent) -> None:
        """Put an extent into the queue and at the rank that it has now."""
        queue, rank = self._place(extent, self._history.get(extent.key))
        self._requeue(extent, self._held[extent.key], queue, rank)

    def _rerank(self, entry: QueueEntry) -> bool:
        """Move an extent of `_ranked` if its value has changed; returns whether it moved."""
        extent, old = entry.extent, entry.rank[0]
        queue, rank = self._place(extent, self._history.get(extent.key))
        if queue is self._ranked and old / CHANGED <= rank[0] <= old * CHANGED:
            return False
        self._requeue(extent, self._ranked, queue, rank)
        return True

    def _rank_all_by_value(self) -> None:
        """After the first fit: leave the order of LRU."""
        self._by_recency = False
        entries = [*self._ranked.live.values(), *self._by_value.live.values()]
        for entry in sorted(entries, key=lambda entry: entry.extent.last_use):
            self._replace(entry.extent)

    def _rank_changed(self) -> None:
        """Rank the extents anew whose record changed without a call for them."""
        for key in self._history.changed:
            queue = self._held.get(key)
            if queue is not None and key not in self._own_place:
                self._replace(queue.live[key].extent)
        self._history.changed.clear()
