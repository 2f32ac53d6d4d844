"""Learned eviction: what is least likely to be used soon, per second of memory, goes first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from sagellm.core.clock import Clock
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.eviction import Extent, GiveUp
from sagellm.kvmgr.eviction._lives import HOT, NUM_FEATURES, Life, Lives
from sagellm.kvmgr.eviction._queue import Entry, ExtentQueue
from sagellm.kvmgr.eviction._queued import Note, QueuedPolicy
from sagellm.kvmgr.eviction._reuse_model import ReuseModel
from sagellm.kvmgr.eviction._value_queue import ValueQueue

CHANGED = 1.05
"""An extent with a value of its own that has changed by this factor takes another place."""
SWEEP = 4
"""So many extents too old for their row may move on for each block that is asked for: time changes values."""
BLOCKS_PER_LOOK = 8
"""One extent with a value of its own is looked at again for so many blocks that are asked for."""
FORGOTTEN = 0.0
"""The value of what nothing is remembered of: too many others came since."""


class LearnedEvictionPolicy(QueuedPolicy):
    """Ranks extents by the value that a `ReuseModel` gives them at their age; LRU until it has seen enough.

    It learns from every use and from every second without one, of extents that were evicted too: what it
    would have cost or gained to keep them is known without having kept them. `max_lives` bounds that memory.
    Time is the clock's, or without one the latest use heard of.

    Most extents are worth what their kind is at their age, and stand in one queue. In the other one stand
    those with a rank of their own: prefixes that many share, what has a retention, and all of them while
    the order is that of LRU.
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
        self._own, self._by_value = ExtentQueue(), ValueQueue()
        self._by_recency = True
        self._model = ReuseModel(NUM_FEATURES)
        self._lives = Lives(self._model, max_lives)
        self._hand: list[int] = []

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
        now_s = self._by_value.now_s = self._now()
        if self._lives.learn(now_s):
            self._by_value.renew(self._model.values)
            self._take_sides()
        if not self._by_recency:
            self._by_value.sweep(SWEEP * num_blocks)
            self._sweep(1 + num_blocks // BLOCKS_PER_LOOK)
        return super().evict(num_blocks, give_up)

    # -- what QueuedPolicy asks

    def _admit(self, extent: Extent, note: Note | None) -> None:
        if extent.used_s > self._now_s:
            self._now_s = extent.used_s
        lives = self._lives
        life = lives.of(extent, self._now())
        if lives.changed:
            self._look_again()
        queue, rank = self._place(extent, life)
        self._put(extent, queue, rank)

    def _choose(self) -> ExtentQueue | None:
        own, by_value = self._own, self._by_value
        if own.live and not self._by_recency:
            while own.live and self._rerank(own.first()):
                pass
            if own.live and by_value.live and by_value.least < own.first()[0][0]:
                return by_value
        if own.live:
            return own
        return by_value if by_value.live else None

    def _follow(self, parent: Extent, entry: Entry, queue: ExtentQueue) -> None:
        self._admit(parent, None)

    def _succeed(self, parent: Extent, entry: Entry, queue: ExtentQueue) -> None:
        self._lives.succeed(parent, entry[2].key)
        super()._succeed(parent, entry, queue)

    def _move_home(self, key: int) -> None:
        super()._move_home(key)
        self._settle(self._held[key].live[key])  # ranks have changed since it left

    def _queues(self) -> Sequence[ExtentQueue]:
        return (self._own, self._by_value)

    def fresh(self) -> Self:
        return type(self)(capacity=self._given_capacity, clock=self._clock, max_lives=self._max_lives)

    # -- ranks

    def _now(self) -> float:
        return self._clock.now() if self._clock is not None else self._now_s

    def _follows_recency(self) -> bool:
        """Whether the order is that of LRU now."""
        return not self._model.num_fits

    def _take_sides(self) -> None:
        """Put all in the other order, if it is time to."""
        if self._by_recency == self._follows_recency():
            return
        self._by_recency = not self._by_recency
        entries = [*self._own.live.values(), *self._by_value.live.values()]
        for entry in sorted(entries, key=lambda entry: entry[2].last_use):
            self._settle(entry)

    def _place(self, extent: Extent, life: Life | None) -> tuple[ExtentQueue, Any]:
        """Queue and rank of an extent: uses per second of memory, or its life, which stands for that."""
        if self._by_recency:
            return self._own, (extent.used_s + extent.bonus_s, extent.last_use)
        if life is None:
            return self._own, (FORGOTTEN, extent.last_use)
        now_s = self._now()
        age_s = now_s - life.born_s
        if life.kind == HOT:
            value = 1.0 / (max(age_s, life.gap_s or 0.0) + 1e-3)
        elif extent.bonus_s > age_s:
            value = self._model.value(life.kind, age_s)
        else:
            self._by_value.now_s = now_s
            return self._by_value, life
        return self._own, (value * (1.0 + max(0.0, extent.bonus_s - age_s) / (1.0 + age_s)), extent.last_use)

    def _settle(self, entry: Entry) -> None:
        """Put an extent where it belongs by now."""
        extent = entry[2]
        queue, rank = self._place(extent, self._lives.get(extent.key))
        self._requeue(extent, self._held[extent.key], queue, rank)

    def _look_again(self) -> None:
        for key in self._lives.changed:
            queue = self._held.get(key)
            if queue is not None and queue in self._queues():
                self._settle(queue.live[key])
        self._lives.changed.clear()

    def _sweep(self, count: int) -> None:
        """Look at the next few again, in turn."""
        live, hand = self._own.live, self._hand
        for _ in range(min(count, len(live))):
            if not hand:
                hand.extend(live)
            entry = live.get(hand.pop())
            if entry is not None:
                self._rerank(entry)

    def _rerank(self, entry: Entry) -> bool:
        """Give an extent another rank of its own if its value is another by now; answers whether."""
        extent, old = entry[2], entry[0][0]
        queue, rank = self._place(extent, self._lives.get(extent.key))
        if queue is self._own and (old / CHANGED <= rank[0] <= old * CHANGED):
            return False
        self._requeue(extent, self._own, queue, rank)
        return True


PLUGIN = LearnedEvictionPolicy
