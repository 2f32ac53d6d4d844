"""The default policy: learned eviction with a budget of regret against LRU."""

from __future__ import annotations

import heapq
import math

from sagellm.core.clock import Clock
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.eviction import Extent, GiveUp, Hint, UseListener
from sagellm.kvmgr.eviction._base import FEW, ExtentQueue, QueueEntry
from sagellm.kvmgr.eviction.adaptive.learned import CHANGED, LearnedPolicy
from sagellm.kvmgr.eviction.adaptive.lru_shadow import LRUShadow

MAX_ADVANCE = 0.05
"""Share of the cache that the advance on the budget of later requests may be."""
RERANKS_PER_CHOICE = 2
"""Spared extents that are ranked anew each time one of them may be evicted."""


class AdaptivePolicy(LearnedPolicy, UseListener):
    """Evicts as `learned` does, as far as a budget of regret against LRU allows.

    Each choice is one of three, in this order: the extent of least value that LRU has dropped at least in
    part; an extent of less value still that LRU would keep, if the budget pays for it; or, where LRU would
    keep everything, what LRU would evict next. README.md walks through a decision.

    `LRUShadow` models what LRU would hold in a cache of the same size. All of these are in blocks:

    * `lead`: hits of this policy less hits of the shadow so far.
    * `regret`: `-lead`, plus the blocks that the shadow holds and the cache does not (each may be a lost
      hit).
    * `budget`: `max_regret` x blocks looked up so far, plus `stake - 1` times the lead while that is
      positive. The first `advance` requests have in addition what the rest of so many would bring, up to
      `MAX_ADVANCE` of the cache: their own budget is a few blocks, of which one wrong choice takes all.

    A block that the shadow does not hold is free: it may always be evicted. A block that the shadow holds is
    evicted only where its value is less than that of every free block, and `regret <= budget` holds
    afterwards. With `max_regret` 0 the order is that of LRU.

    Extents wait in four queues. Those of `learned` (`_ranked`, `_by_value`) have blocks that may be free.
    `_spared` has extents of which the shadow holds all blocks, or that have a retention. `_forced` has the
    one extent that LRU would evict, where no other choice is left.

    **The bound.** For requests served one after the other, without retention and hints, the shadow is exactly
    LRU. With `stake` 1 and `advance` 0, `regret <= budget + d` holds between requests, where d is the number
    of blocks of one request that LRU held and the cache did not. So

        hits of LRU - hits of this policy <= max_regret * blocks looked up + d

    With a larger stake, `stake - 1` times the best lead so far may be lost in addition; with an advance, as
    much as it was at most. Proof, by event:

    * A request brings back what the cache lacks of its path. Each of these blocks was in `regret` as a
      possible loss, and stays there as a loss. All other effects of a use lower `regret`.
    * When the shadow drops a block, `regret` does not rise.
    * Before the cache evicts n blocks for a request, the shadow marks the n blocks that LRU would evict for
      it. At least n cached blocks are then marked or not in the shadow, so no other block has to go.
    * Where LRU holds d more blocks of that request, it evicts d fewer. Only this takes `regret` above the
      budget. While it is above, the shadow leaves as many blocks unmarked as the cache lacks. d is at most
      that number, so `regret` does not rise again.

    **Limits.** While several requests run, the shadow does not know what LRU would have kept for each of
    them: `lead` is an estimate, and the bound holds for the estimate. The shadow knows no retention, and
    drops at once what a hint says has ended; extents with a retention are evicted last, whatever the budget.
    With quotas each account has a policy of its own, which counts a shared prefix as its own; there is no
    bound for accounts that share prefixes. Measurements: docs/decisions/0006-retention.md.

    Raises `ConfigError` for a `max_regret` outside 0..1, a `stake` below 1 or a negative `advance`.
    """

    def __init__(
        self,
        *,
        capacity: int | None = None,
        clock: Clock | None = None,
        max_records: int = 16_384,
        max_regret: float = 0.002,
        stake: float = 2.0,
        advance: int = 500,
    ) -> None:
        super().__init__(capacity=capacity, clock=clock, max_records=max_records)
        if not (_is_number(max_regret) and 0 <= max_regret <= 1):
            raise ConfigError(f"max_regret must be a number from 0 to 1, got {max_regret!r}")
        if not (_is_number(stake) and 1 <= stake < math.inf):
            raise ConfigError(f"stake must be a number of at least 1, got {stake!r}")
        if type(advance) is not int or advance < 0:
            raise ConfigError(f"advance must be a number of requests, 0 or more, got {advance!r}")
        self._max_regret, self._stake, self._advance = max_regret, stake, advance
        self._shadow = LRUShadow(self._release_spared)
        self._spared, self._forced = ExtentQueue(), ExtentQueue()
        self._retained: list[tuple[float, int]] = []  # a heap: until when an extent is retained, and its key
        self._num_cached = 0
        self._room = 0  # the cache's size when it last made room
        self._num_leaving = 0  # missing blocks that the shadow is about to drop
        self._num_requests = self._num_looked_up = self.lead = 0

    @property
    def regret(self) -> int:
        """Hits lost to LRU so far, and those that may still be lost."""
        return self._shadow.num_firm_missing + self._num_leaving - self.lead

    @property
    def budget(self) -> float:
        """The largest `regret` that is allowed by now, in blocks."""
        own = self._max_regret * self._num_looked_up
        advance = 0.0
        if 0 < self._num_requests < self._advance:
            of_later = own * (self._advance / self._num_requests - 1)
            advance = min(of_later, MAX_ADVANCE * max(self._num_cached, self._room))
        return own + advance + (self._stake - 1) * max(0, self.lead)

    # -- events of UseListener

    def found(self, extent: Extent, num_held: int) -> None:
        end = extent.first_position + extent.num_blocks
        # Blocks that other requests hold are no gain: LRU could not have evicted them either.
        self.lead += end - max(num_held, self._shadow.use(extent))

    def added(self, extent: Extent, num_new: int, num_cached: int) -> None:
        num_found = extent.first_position + extent.num_blocks - num_new
        self.lead -= max(0, self._shadow.use(extent) - num_found)
        self._shrink_shadow(num_cached)

    def used(self, extent: Extent) -> None:
        end = extent.first_position + extent.num_blocks
        self._num_requests += 1
        self._num_looked_up += extent.use.num_prompt_blocks or end
        self._shadow.use(extent)
        self._shrink_shadow(self._num_cached)

    def cleared(self, num_cached: int) -> None:
        self._room = 0
        self._shrink_shadow(num_cached)

    # -- events of EvictionPolicy

    def insert(self, extent: Extent) -> None:
        key = extent.key
        if key not in self._shadow and key not in self._away and key not in self._held:
            self._shadow.use(extent)
            self._shrink_shadow(self._num_cached + extent.num_blocks)
        super().insert(extent)

    def split(self, old: int, head: Extent, tail: Extent) -> None:
        self._shadow.split(head, tail)
        super().split(old, head, tail)

    def hint(self, key: int, hint: Hint) -> None:
        super().hint(key, hint)
        if self._held.get(key) is self._ended:
            self._shadow.forget(self._ended.live[key].extent)

    def evict(self, num_blocks: int, give_up: GiveUp) -> int:
        now_s = self._now()
        while self._retained and self._retained[0][0] <= now_s:
            self._release_spared(heapq.heappop(self._retained)[1])
        shadow, room = self._shadow, self._num_cached
        self._room = room
        self._shrink_shadow(room)
        # Above the budget the shadow keeps as many blocks as the cache lacks (see the proof).
        reserve = shadow.num_missing if self.regret > self.budget else 0
        shadow.shrink(room, min(room, max(0, room - num_blocks + reserve)))
        self._num_leaving = shadow.num_missing - shadow.num_firm_missing

        def give_up_in_both(extent: Extent, num_given: int) -> Extent | None:
            shadow.cut(extent, num_given)
            return give_up(extent, num_given)

        num_evicted = super().evict(num_blocks, give_up_in_both)
        self._num_cached = max(0, room - num_evicted)
        return num_evicted

    # -- what a policy decides

    def _next_queue(self) -> ExtentQueue | None:
        """The first free extent, a spared one of lower value, or that of LRU."""
        spared = self._spared
        if self._forced.live:
            for entry in list(self._forced.live.values()):
                self._replace(entry.extent)
        free = self._first_free()
        if not spared.live:
            return free
        if free is None:
            return self._force()
        if self._allowance > 0:
            self._rerank_spared()
            least = free.first().rank[0] if free is self._ranked else self._by_value.least
            if spared.first().rank[0] < least:
                return spared
        return free

    def _max_blocks(self, queue: ExtentQueue, extent: Extent, wanted: int) -> int:
        if queue is self._spared:
            num_not_free = self._allowance
        elif queue is self._ranked or queue is self._by_value:
            num_not_free = 0
        else:
            return wanted
        return min(wanted, self._shadow.num_free(extent) + num_not_free)

    def _first_free(self) -> ExtentQueue | None:
        """The queue whose first extent is free. Extents before it are spared."""
        shadow = self._shadow
        while (queue := super()._next_queue()) is not None:
            entry = queue.first()
            extent = entry.extent
            if extent.bonus_s and extent.used_s + extent.bonus_s > self._now():
                self._retain(extent.used_s + extent.bonus_s, extent.key)
            elif shadow.num_free(extent):
                return queue
            else:
                shadow.wait(extent.key)
            self._requeue_first(entry, queue, self._spared, self._value_rank(extent))
        return None

    def _force(self) -> ExtentQueue:
        """Move the spared extent that LRU would evict to `_forced`. Retained ones go last."""
        spared, retained = self._spared.live, self._retained
        key = self._shadow.first_awaited(spared)
        if key is None:
            while retained and not self._is_retained(*retained[0]):
                heapq.heappop(retained)
            key = retained[0][1] if retained else next(iter(spared))
        self._requeue(spared[key].extent, self._spared, self._forced, ())
        return self._forced

    # -- the budget

    @property
    def _allowance(self) -> int:
        """Blocks that the shadow holds and that may be evicted now."""
        return int(self.budget - self.regret)

    def _shrink_shadow(self, num_cached: int) -> None:
        """Shrink the shadow to the cache's size, now or when it last made room."""
        self._num_cached = num_cached
        room = max(num_cached, self._room)
        self._shadow.shrink(room, room)
        self._num_leaving = self._shadow.num_missing - self._shadow.num_firm_missing

    # -- spared extents

    def _release_spared(self, key: int) -> None:
        """Let a spared extent be chosen. It has a free block, or its retention is over."""
        entry = self._spared.live.get(key)
        if entry is not None:
            self._replace(entry.extent)

    def _retain(self, until_s: float, key: int) -> None:
        """Note a retention. Notes of extents used or evicted since are dropped in time."""
        heapq.heappush(self._retained, (until_s, key))
        if len(self._retained) > FEW + 2 * len(self._spared.live):
            current = {item for item in self._retained if self._is_retained(*item)}
            self._retained = sorted(current | {(until_s, key)})

    def _is_retained(self, until_s: float, key: int) -> bool:
        entry = self._spared.live.get(key)
        return entry is not None and entry.extent.used_s + entry.extent.bonus_s == until_s

    def _rerank_spared(self) -> None:
        """Rank a few spared extents anew, and the first until its rank is right."""
        for entry in self._spared.in_turn(RERANKS_PER_CHOICE):
            self._rerank_spared_entry(entry)
        while self._rerank_spared_entry(self._spared.first()):
            pass

    def _rerank_spared_entry(self, entry: QueueEntry) -> bool:
        """Move a spared extent if its value has changed; returns whether it moved."""
        extent, old = entry.extent, entry.rank[0]
        rank = self._value_rank(extent)
        if old / CHANGED <= rank[0] <= old * CHANGED:
            return False
        self._requeue(extent, self._spared, self._spared, rank)
        return True

    def _value_rank(self, extent: Extent) -> tuple[float, int]:
        """An extent's value and last use, whatever queue `learned` would put it into."""
        queue, rank = self._place(extent, self._history.get(extent.key))
        if queue is self._by_value:
            return (self._model.value(rank.kind, self._now() - rank.used_s), extent.last_use)
        value, last_use = rank
        return (value, last_use)

    def check(self) -> None:
        super().check()
        self._shadow.check()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
