"""SLO-aware: extents of high priority, and those whose loss risks a deadline, stay longest."""

from __future__ import annotations

import math
from typing import NamedTuple

from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.eviction import CostBenefitModel, Extent, Hint
from sagellm.kvmgr.eviction._base import ExtentQueue, QueuedPolicy, QueueEntry, recency
from sagellm.kvmgr.eviction.cost_model import PrefillCostModel


class Importance(NamedTuple):
    """An extent's priority, and until when to keep it (clock seconds)."""

    priority: int = 0
    until_s: float = -math.inf


NO_IMPORTANCE = Importance()


class SLOPolicy(QueuedPolicy):
    """Lower priorities go first. Of equal priorities LRU, with a bonus for costly losses.

    The priority and the goal for the time to the first token are those of the request that used the extent
    last; `ttft_slo_s` where it has no goal. Recomputing an extent takes a part of that time. The larger the
    part, the younger the extent looks, by `patience_s` where it takes all of it. `hint(priority=...,
    duration_s=...)` sets the priority and makes the extent look as if used when the duration ends. The clock
    must be that of `used_s`.
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
        self._importance: dict[int, Importance] = {}

    def hint(self, key: int, hint: Hint) -> None:
        if hint.priority is not None or hint.duration_s is not None:
            self._set_importance(key, hint)
        super().hint(key, hint)

    def _set_importance(self, key: int, hint: Hint) -> None:
        queue, former = self._held.get(key), self._away.get(key)
        old = former.state if former is not None else self._importance.get(key, NO_IMPORTANCE)
        new = Importance(
            old.priority if hint.priority is None else hint.priority,
            old.until_s if hint.duration_s is None else self._clock.now() + hint.duration_s,
        )
        if former is not None:
            former.state = new
        elif queue is not None:
            extent = queue.live[key].extent
            self._take_out(key, 0)
            self._away.pop(key)
            self._push_important(extent, new)

    def _enqueue(self, extent: Extent, former: QueueEntry | None) -> None:
        if former is not None:
            importance = former.state
        else:  # extents of `sagellm.compat` have a priority of their own
            priority = extent.use.priority or getattr(extent, "priority", 0)
            importance = Importance(priority) if priority else NO_IMPORTANCE
        self._push_important(extent, importance)

    def _enqueue_parent(self, parent: Extent, child: QueueEntry) -> None:
        """A parent gets its child's priority: a request for the child needs the parent."""
        self._push_important(parent, Importance(child.rank[0]))

    def _push_important(self, extent: Extent, importance: Importance) -> None:
        if importance != NO_IMPORTANCE:
            self._importance[extent.key] = importance
        when_s, last_use, depth = recency(extent)
        risk = min(1.0, self._model.recompute_s(extent) / (extent.use.ttft_slo_s or self._ttft_slo_s))
        when_s = max(when_s + risk * self._patience_s, importance.until_s)
        self._push(extent, self._queue, (importance.priority, when_s, last_use, depth))

    def _next_queue(self) -> ExtentQueue | None:
        return self._queue if self._queue.live else None

    def _remember(self, key: int, extent: Extent) -> Importance:
        return self._importance.pop(key, NO_IMPORTANCE)

    def _evicted(self, entry: QueueEntry) -> None:
        self._importance.pop(entry.extent.key, None)


PLUGIN = SLOPolicy
