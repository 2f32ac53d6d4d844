"""Predictive eviction: what a predictor gives the least chance of being used soon goes first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from sagellm.core.clock import Clock
from sagellm.core.protocols.eviction import Extent, GiveUp
from sagellm.core.protocols.lifetime import LifetimePredictor, ReusePredictor
from sagellm.kvmgr.eviction._predicted_ranks import ReadOnly, below_values, predicts_reuse, ranks_by
from sagellm.kvmgr.eviction._queue import Entry, ExtentQueue
from sagellm.kvmgr.eviction._queued import Note, QueuedPolicy
from sagellm.kvmgr.eviction._rests import Rests

SWEEP = 2
"""Extents looked at again for each that is evicted, in turn: values fall and rise while time passes."""
CHANGED = 1.05
"""An extent whose value has changed by this factor since it was ranked takes another place."""
MAX_RESTS = 16_384


class PredictiveEvictionPolicy(QueuedPolicy):
    """Asks a predictor, and teaches it what became of extents: those evicted too, for they come back or not.

    With a `ReusePredictor`, extents go in order of uses expected per second of memory, from now to the best
    moment to give them up; in order of last use while the predictor abstains. With a `LifetimePredictor`, a
    conversation is a sequence, its turns included, that grows by blocks (that is the unit of the lengths; the
    predictor should be its own): the one whose predicted end is nearest goes first, and one that the
    predictor abstains from counts as ended with its last use. Without a predictor this is LRU. Of at most
    `MAX_RESTS` extents it is known how they rest; those forgotten have rested longest, and go first.

    Of candidates, `estimated_lifetime` is taken for the predicted seconds to the end, except by a
    `ReusePredictor`. Time is the clock's, or without one the latest use heard of.
    """

    def __init__(
        self,
        *,
        predictor: ReusePredictor | LifetimePredictor | None = None,
        capacity: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(capacity)
        self._predictor, self._clock = predictor, clock
        self._now_s = 0.0
        self._queue = ExtentQueue()
        self._ranks = ranks_by(predictor)
        self._rests = Rests(self._ranks, self._ranks.watched_s, MAX_RESTS)
        self._hand: list[int] = []
        self._num_gone = 0
        self._by_value = False

    # -- events

    def pin(self, key: int) -> None:
        if key in self._held:
            self._rests.use(key, self._now())
        super().pin(key)

    def split(self, old: int, head: Extent, tail: Extent) -> None:
        if old in self._held:
            self._rests.split(head, tail, self._now())
        super().split(old, head, tail)

    def evict(self, num_blocks: int, give_up: GiveUp) -> int:
        self._rests.tell(self._now())
        if self._ranks.by_value != self._by_value:
            self._by_value = self._ranks.by_value
            self._rank_all()
        if self._by_value:
            self._sweep(SWEEP * (1 + self._num_gone))
        self._num_gone = 0
        return super().evict(num_blocks, give_up)

    def check(self) -> None:
        super().check()
        self._rests.check()

    # -- what QueuedPolicy asks

    def _admit(self, extent: Extent, note: Note | None) -> None:
        if extent.used_s > self._now_s:
            self._now_s = extent.used_s
        now_s = self._now()
        self._put(extent, self._queue, self._ranks.rank(extent, self._rests.of(extent, now_s), now_s))

    def _choose(self) -> ExtentQueue | None:
        queue = self._queue
        while queue.live:
            if not (self._by_value and self._rerank(queue.first())):
                return queue
        return None

    def _evicted(self, entry: Entry, queue: ExtentQueue) -> None:
        self._num_gone += 1

    def _follow(self, parent: Extent, entry: Entry, queue: ExtentQueue) -> None:
        self._admit(parent, None)

    def _succeed(self, parent: Extent, entry: Entry, queue: ExtentQueue) -> None:
        self._rests.succeed(parent, entry[2].key, self._now())
        super()._succeed(parent, entry, queue)

    def _queues(self) -> Sequence[ExtentQueue]:
        return (self._queue,)

    def fresh(self) -> Self:
        """Another that asks the same predictor about reuse, and teaches it nothing; of lengths, it knows what
        candidates bring."""
        asked = ReadOnly(self._predictor) if predicts_reuse(self._predictor) else None
        return type(self)(predictor=asked, capacity=self._given_capacity, clock=self._clock)

    # -- ranks

    def _now(self) -> float:
        return self._clock.now() if self._clock is not None else self._now_s

    def _rank_all(self) -> None:
        for entry in list(self._queue.live.values()):
            rest = self._rests.get(entry[2].key)
            if rest is not None:
                rest.due_s = self._now()
            self._rerank(entry)

    def _sweep(self, count: int) -> None:
        """Look at the next few again, so that all are within one round of evictions."""
        live, hand, get, now_s = self._queue.live, self._hand, self._rests.get, self._now()
        for _ in range(min(count, len(live))):
            if not hand:
                hand.extend(live)
            key = hand.pop()
            rest = get(key)
            if (rest is None or rest.due_s <= now_s) and key in live:
                self._rerank(live[key])

    def _rerank(self, entry: Entry) -> bool:
        """Give an extent another place if its value is another by now; answers whether it has one."""
        extent, now_s = entry[2], self._now()
        rest = self._rests.get(extent.key)
        if rest is not None and rest.due_s > now_s:
            return False
        rank = self._ranks.rank(extent, rest, now_s) if rest is not None else below_values(extent)
        old = entry[0][0]
        if old / CHANGED <= rank[0] <= old * CHANGED or rank[0] == old:
            return False
        self._requeue(extent, self._queue, self._queue, rank)
        return True


PLUGIN = PredictiveEvictionPolicy
