"""SLO-aware: what many wait for, what matters more, and what would cost a deadline stays longest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.eviction import CostBenefitModel, Extent, Hint
from sagellm.kvmgr.eviction._cost import PrefillCostModel
from sagellm.kvmgr.eviction._queue import Entry, ExtentQueue, recency
from sagellm.kvmgr.eviction._queued import Note, QueuedPolicy

Wish = tuple[int, float]
"""Priority, and until when to keep (clock seconds; minus infinity: no such wish)."""
NO_WISH: Wish = (0, -math.inf)


class SLOEvictionPolicy(QueuedPolicy):
    """Lower priorities go first; within one, LRU in which an extent looks younger by what its loss risks.

    The priority and the goal for the first token are those of the request that used the extent last; one
    without a goal has `ttft_slo_s`. Recomputing an extent takes part of that time: the larger the part, the
    younger the extent looks, by `patience_s` where all of it would be gone.
    `hint(priority=..., duration_s=...)` sets the priority, and lets the extent look as if used when the
    duration ends; `wanted_by` keeps it until nothing else is left. The clock must be that of `used_s`.
    """

    def __init__(
        self,
        *,
        capacity: int | None = None,
        clock: Clock | None = None,
        model: CostBenefitModel | None = None,
        ttft_slo_s: float = 1.0,
        patience_s: float = 60.0,
    ) -> None:
        super().__init__(capacity)
        if not ttft_slo_s > 0 or patience_s < 0:
            raise ConfigError(f"ttft_slo_s {ttft_slo_s} must be positive, patience_s {patience_s} at least 0")
        self._clock = MonotonicClock() if clock is None else clock
        self._model: CostBenefitModel = PrefillCostModel() if model is None else model
        self._ttft_slo_s, self._patience_s = ttft_slo_s, patience_s
        self._queue = ExtentQueue()
        self._wishes: dict[int, Wish] = {}

    def hint(self, key: int, hint: Hint) -> None:
        if hint.priority is not None or hint.duration_s is not None:
            self._wish(key, hint)
        super().hint(key, hint)

    def _wish(self, key: int, hint: Hint) -> None:
        queue, note = self._held.get(key), self._away.get(key)
        priority, until_s = note[3] if note is not None else self._wishes.get(key, NO_WISH)
        if hint.priority is not None:
            priority = hint.priority
        if hint.duration_s is not None:
            until_s = self._clock.now() + hint.duration_s
        if note is not None:
            self._away[key] = (*note[:3], (priority, until_s))
        elif queue is not None:
            extent = queue.live[key][2]
            self._depart(key, 0)
            self._away.pop(key)
            self._admit(extent, (self._queue, None, 0, (priority, until_s)))

    def _admit(self, extent: Extent, note: Note | None) -> None:
        wish = self._own_wish(extent) if note is None else note[3]
        if wish != NO_WISH:
            self._wishes[extent.key] = wish
        self._put(extent, self._queue, self._rank(extent, wish))

    def _own_wish(self, extent: Extent) -> Wish:
        """The last request's priority; a candidate brings one of its own."""
        priority = extent.use.priority or getattr(extent, "priority", 0)
        return (priority, -math.inf) if priority else NO_WISH

    def _rank(self, extent: Extent, wish: Wish) -> tuple[float, ...]:
        when_s, last_use, depth = recency(extent)
        risk = min(1.0, self._model.recompute_s(extent) / (extent.use.ttft_slo_s or self._ttft_slo_s))
        when_s = max(when_s + risk * self._patience_s, wish[1])
        return (wish[0], when_s, last_use, depth)

    def _choose(self) -> ExtentQueue | None:
        return self._queue if self._queue.live else None

    def _note(self, key: int, entry: Entry, queue: ExtentQueue, used: int) -> Note:
        return (queue, entry[0], used, self._wishes.pop(key, NO_WISH) if self._wishes else NO_WISH)

    def _evicted(self, entry: Entry, queue: ExtentQueue) -> None:
        if self._wishes:
            self._wishes.pop(entry[2].key, None)

    def _follow(self, parent: Extent, entry: Entry, queue: ExtentQueue) -> None:
        """Who cared for the child cares for what stands in front of it: the priority is the child's."""
        self._admit(parent, (queue, None, 0, (entry[0][0], -math.inf)))

    def fresh(self) -> Self:
        return type(self)(
            capacity=self._given_capacity,
            clock=self._clock,
            model=self._model,
            ttft_slo_s=self._ttft_slo_s,
            patience_s=self._patience_s,
        )

    def _queues(self) -> Sequence[ExtentQueue]:
        return (self._queue,)


PLUGIN = SLOEvictionPolicy
