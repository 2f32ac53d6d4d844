"""Learned eviction: what is least likely to be used soon, per second of memory, goes first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

from sagellm.core.clock import Clock
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.eviction import Extent, GiveUp
from sagellm.kvmgr.eviction._lives import NUM_FEATURES, Life, Lives
from sagellm.kvmgr.eviction._queue import Entry, ExtentQueue
from sagellm.kvmgr.eviction._queued import Note, QueuedPolicy
from sagellm.kvmgr.eviction._reuse_model import ReuseModel

LONG_AGO_S = 1e12
"""Makes ranks by time of use smaller than any value."""
CHANGED = 1.05
"""An extent whose value has changed by this factor since it was ranked takes another place."""
SWEEP = 4
"""Extents looked at again for each that is evicted, in turn: values fall and rise while time passes."""


class LearnedEvictionPolicy(QueuedPolicy):
    """Ranks extents by the value that a `ReuseModel` gives them at their age; LRU until it has seen enough.

    It learns from every use and from every second without one, of extents that were evicted too: what it
    would have cost or gained to keep them is known without having kept them. `max_lives` bounds that memory.
    Time is the clock's, or without one the latest use heard of.
    """

    def __init__(
        self, *, capacity: int | None = None, clock: Clock | None = None, max_lives: int = 16_384
    ) -> None:
        super().__init__(capacity)
        if type(max_lives) is not int or max_lives < 1:
            raise ConfigError(f"max_lives must be a whole number from 1 on, got {max_lives!r}")
        self._clock = clock
        self._now_s = 0.0
        self._max_lives = max_lives
        self._queue = ExtentQueue()
        self._model = ReuseModel(NUM_FEATURES)
        self._lives = Lives(self._model, max_lives)
        self._hand: list[int] = []
        self._num_gone = self._num_fits = 0

    # -- events

    def pin(self, key: int) -> None:
        if key in self._held:
            self._lives.use(key, self._now())
        super().pin(key)

    def split(self, old: int, head: Extent, tail: Extent) -> None:
        if old in self._held:
            self._lives.split(old, head, tail, self._now())
        super().split(old, head, tail)

    def evict(self, num_blocks: int, give_up: GiveUp) -> int:
        if self._lives.learn(self._now()):
            self._num_fits += 1
            if self._num_fits == 1:
                self._rank_all()
        self._sweep(SWEEP * (1 + self._num_gone))
        self._num_gone = 0
        return super().evict(num_blocks, give_up)

    # -- what QueuedPolicy asks

    def _admit(self, extent: Extent, note: Note | None) -> None:
        if extent.used_s > self._now_s:
            self._now_s = extent.used_s
        life, is_new = self._lives.of(extent, self._now())
        if is_new:
            self._begun(extent, life)
        self._put(extent, self._queue, self._rank(extent, life))

    def _begun(self, extent: Extent, life: Life) -> None:
        """A hook: a request used the extent, and went."""

    def _choose(self) -> ExtentQueue | None:
        queue = self._queue
        while queue.live:
            if not self._rerank(queue.first()):
                return queue
        return None

    def _evicted(self, entry: Entry, queue: ExtentQueue) -> None:
        self._num_gone += 1

    def _follow(self, parent: Extent, entry: Entry, queue: ExtentQueue) -> None:
        self._admit(parent, None)

    def _succeed(self, parent: Extent, entry: Entry, queue: ExtentQueue) -> None:
        self._lives.succeed(parent, entry[2].key)
        super()._succeed(parent, entry, queue)

    def _queues(self) -> Sequence[ExtentQueue]:
        return (self._queue,)

    def _fresh(self) -> Self:
        return type(self)(capacity=self._given_capacity, clock=self._clock, max_lives=self._max_lives)

    # -- ranks

    def _now(self) -> float:
        return self._clock.now() if self._clock is not None else self._now_s

    def _rank(self, extent: Extent, life: Life) -> tuple[float, int]:
        """Positive values from the model; before there is one, negative numbers in order of use."""
        if not self._num_fits:
            return self._recency(extent, life)
        now_s = self._now()
        value = self._lives.value(life, now_s)
        life.ranked_by = self._num_fits
        if extent.bonus_s:
            age_s = now_s - life.born_s
            life.ranked_until_s = now_s
            value *= 1.0 + max(0.0, extent.bonus_s - age_s) / (1.0 + age_s)
        return (value, extent.last_use)

    def _recency(self, extent: Extent, life: Life) -> tuple[float, int]:
        life.ranked_by, life.ranked_until_s = self._num_fits, math.inf
        return (extent.used_s + extent.bonus_s - LONG_AGO_S, extent.last_use)

    def _rank_all(self) -> None:
        for entry in list(self._queue.live.values()):
            life = self._lives.get(entry[2].key)
            if life is not None:
                life.ranked_until_s = 0.0
                self._rerank(entry)

    def _sweep(self, count: int) -> None:
        """Look at the next few again, so that all are within one round of evictions."""
        live, hand = self._queue.live, self._hand
        for _ in range(min(count, len(live))):
            if not hand:
                hand.extend(live)
            entry = live.get(hand.pop())
            if entry is not None:
                self._rerank(entry)

    def _rerank(self, entry: Entry) -> bool:
        """Give an extent another place if its value is another by now; answers whether it has one."""
        extent = entry[2]
        life = self._lives.get(extent.key)
        old = entry[0][0]
        if life is None:  # forgotten: too many others came since
            rank: tuple[float, int] = (extent.used_s - LONG_AGO_S, extent.last_use)
        elif life.ranked_until_s > self._now() and life.ranked_by == self._num_fits:
            return False
        else:
            rank = self._rank(extent, life)
        if old / CHANGED <= rank[0] <= old * CHANGED or rank[0] == old:
            return False
        self._requeue(extent, self._queue, self._queue, rank)
        return True


PLUGIN = LearnedEvictionPolicy
