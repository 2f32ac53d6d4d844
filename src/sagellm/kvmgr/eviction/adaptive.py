"""The default: learned eviction on a budget of regret against LRU."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Self

from sagellm.core.clock import Clock
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.eviction import Extent, GiveUp, Hint, UseListener
from sagellm.kvmgr.eviction._lru_shadow import FEW, LRUShadow
from sagellm.kvmgr.eviction._queue import Entry, ExtentQueue
from sagellm.kvmgr.eviction.learned import CHANGED, LearnedEvictionPolicy

RANKS_PER_LOOK = 2
"""So many spared extents are ranked anew each time one of them may be evicted."""


class AdaptiveEvictionPolicy(LearnedEvictionPolicy, UseListener):
    """Evicts as `learned` does, as far as a budget of regret against LRU allows.

    Beside the cache runs a shadow: what LRU would hold in a cache of the same size. `lead` counts the blocks
    that this policy hit and the shadow did not, less the reverse. `regret` is `-lead`, plus the blocks that
    the shadow holds and the cache does not, as each of these may be a lost hit. `budget` is `max_regret` of
    all blocks looked up so far, plus `stake - 1` times the lead while that is positive. A block that the
    shadow does not hold may always be evicted. One that it holds is evicted only where it is worth less than
    the least of those, and `regret <= budget` holds afterwards. Without a budget the order is that of LRU.

    For requests served one after the other, without retention bonuses and hints, the shadow is exactly LRU.
    With `stake` 1, `regret <= budget + d` then holds between requests, where d is the number of blocks of one
    request that LRU held and the cache did not, and so

        hits of LRU - hits of this policy <= max_regret * blocks looked up + d

    With a larger stake, `stake - 1` times the best lead so far may be lost in addition. Proof, by event:

    * A request brings back what the cache lacks of it: each of these blocks was part of `regret` as a loss
      that was possible, and still is, as one that happened. What else a use changes lowers `regret`.
    * When the shadow gives a block up, `regret` does not rise.
    * Before the cache evicts n blocks for a request, the shadow marks the n blocks that LRU would evict for
      it. At least n cached blocks are then marked or not in the shadow, so that no other block has to go.
    * Where LRU holds d more blocks of that request, it evicts d fewer. Only this takes `regret` above the
      budget. As long as it is there, the shadow leaves as many blocks unmarked as the cache lacks; d is at
      most that number, so that `regret` does not rise again.

    While several requests run, the shadow does not know what LRU would have kept for each of them: `lead` is
    an estimate then, and the bound holds for the estimate. It knows no retention, and drops at once what a
    hint says has ended; extents with a retention are evicted last, whatever the budget. With quotas each
    account has a policy of its own, which counts a shared prefix as its own; nothing is bounded for accounts
    that share prefixes. What was measured is in docs/decisions/0006-retention.md.

    Raises `ConfigError` for a `max_regret` outside 0..1 or a `stake` below 1.
    """

    def __init__(
        self,
        *,
        capacity: int | None = None,
        clock: Clock | None = None,
        max_lives: int = 16_384,
        max_regret: float = 0.002,
        stake: float = 2.0,
    ) -> None:
        super().__init__(capacity=capacity, clock=clock, max_lives=max_lives)
        if not (_is_number(max_regret) and 0 <= max_regret <= 1):
            raise ConfigError(f"max_regret must be a number from 0 to 1, got {max_regret!r}")
        if not (_is_number(stake) and 1 <= stake < math.inf):
            raise ConfigError(f"stake must be a number of at least 1, got {stake!r}")
        self._max_regret, self._stake = max_regret, stake
        self._shadow = LRUShadow(self._lapsed)
        self._spared, self._forced = ExtentQueue(), ExtentQueue()
        self._spared_hand: list[int] = []
        self._retained: list[tuple[float, int]] = []  # a heap: until when, which key
        self._num_cached = self._most_cached = self._num_leaving = 0
        self._num_looked_up = self.lead = 0

    @property
    def regret(self) -> int:
        """Blocks of hits lost to LRU so far, net, and those that may still be lost."""
        return self._shadow.num_firm_missing + self._num_leaving - self.lead

    @property
    def budget(self) -> float:
        """What `regret` may be by now, in blocks."""
        return self._max_regret * self._num_looked_up + (self._stake - 1) * max(0, self.lead)

    # -- events

    def found(self, extent: Extent, num_held: int) -> None:
        end = extent.first_position + extent.num_blocks
        self.lead += end - max(num_held, self._shadow.use(extent))

    def added(self, extent: Extent, num_new: int, num_cached: int) -> None:
        own = extent.first_position + extent.num_blocks - num_new
        self.lead -= max(0, self._shadow.use(extent) - own)
        self._shrink_shadow(num_cached)

    def used(self, extent: Extent) -> None:
        end = extent.first_position + extent.num_blocks
        self._num_looked_up += extent.use.num_prompt_blocks or end
        self._shadow.use(extent)
        self._shrink_shadow(self._num_cached)

    def cleared(self, num_cached: int) -> None:
        self._most_cached = 0
        self._shrink_shadow(num_cached)

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
        if self._held.get(key) is self._lanes.ended:
            self._shadow.forget(self._lanes.ended.live[key][2])

    def evict(self, num_blocks: int, give_up: GiveUp) -> int:
        self._end_retentions()
        shadow, room = self._shadow, self._num_cached
        self._most_cached = room
        self._shrink_shadow(room)
        reserve = shadow.num_missing if self.regret > self.budget else 0
        shadow.shrink(room, min(room, max(0, room - num_blocks + reserve)))
        self._num_leaving = shadow.num_missing - shadow.num_firm_missing

        def book(extent: Extent, num_given: int) -> Extent | None:
            shadow.cut(extent, num_given)
            return give_up(extent, num_given)

        given = super().evict(num_blocks, book)
        self._num_cached = max(0, room - given)
        return given

    def check(self) -> None:
        super().check()
        self._shadow.check()

    # -- what LearnedEvictionPolicy asks

    def _choose(self) -> ExtentQueue | None:
        """A free extent, or one of lower value that the budget allows; where neither is, the one that LRU
        would take."""
        spared = self._spared
        for entry in list(self._forced.live.values()):
            self._settle(entry)
        free = self._first_free()
        if not spared.live:
            return free
        if free is None:
            return self._force()
        if self._allowance > 0:
            self._refresh()
            least = free.first()[0][0] if free is self._own else self._by_value.least
            if spared.first()[0][0] < least:
                return spared
        return free

    def _portion(self, queue: ExtentQueue, extent: Extent, wanted: int) -> int:
        if queue is self._spared:
            most = self._allowance
        elif queue is self._own or queue is self._by_value:
            most = 0
        else:
            return wanted
        return min(wanted, self._shadow.num_free(extent) + most)

    def _queues(self) -> Sequence[ExtentQueue]:
        return (self._own, self._by_value, self._spared, self._forced)

    def fresh(self) -> Self:
        return type(self)(
            capacity=self._given_capacity,
            clock=self._clock,
            max_lives=self._max_lives,
            max_regret=self._max_regret,
            stake=self._stake,
        )

    # -- inside

    @property
    def _allowance(self) -> int:
        """Blocks that the shadow holds and that may be evicted now."""
        return int(self.budget - self.regret)

    def _shrink_shadow(self, num_cached: int) -> None:
        """To what the cache holds, or did when it last made room."""
        self._num_cached = num_cached
        room = max(num_cached, self._most_cached)
        self._shadow.shrink(room, room)
        self._num_leaving = self._shadow.num_missing - self._shadow.num_firm_missing

    def _lapsed(self, key: int) -> None:
        """A spared extent may be chosen now."""
        entry = self._spared.live.get(key)
        if entry is not None:
            self._settle(entry)

    def _first_free(self) -> ExtentQueue | None:
        """The queue whose first extent has a block that the shadow does not hold, and no retention; others on
        the way are spared until that has changed."""
        shadow = self._shadow
        while (queue := super()._choose()) is not None:
            entry = queue.first()
            extent = entry[2]
            until_s = extent.used_s + extent.bonus_s
            if extent.bonus_s and until_s > self._now():
                self._retain(until_s, extent.key)
            elif shadow.num_free(extent):
                return queue
            else:
                shadow.wait(extent.key)
            self._requeue_first(entry, queue, self._spared, self._worth(extent))
        return None

    def _end_retentions(self) -> None:
        """Extents whose retention is over may be chosen."""
        now_s = self._now()
        while self._retained and self._retained[0][0] <= now_s:
            self._lapsed(heapq.heappop(self._retained)[1])

    def _retain(self, until_s: float, key: int) -> None:
        """Note a retention. One that its extent outlived, by a use or an eviction, is forgotten in time."""
        heapq.heappush(self._retained, (until_s, key))
        if len(self._retained) > FEW + 2 * len(self._spared.live):
            current = {one for one in self._retained if self._is_retained(one)}
            self._retained = sorted(current | {(until_s, key)})

    def _is_retained(self, one: tuple[float, int]) -> bool:
        until_s, key = one
        entry = self._spared.live.get(key)
        return entry is not None and entry[2].used_s + entry[2].bonus_s == until_s

    def _force(self) -> ExtentQueue:
        """The spared extent that LRU would take, in a queue of its own; one with a retention last."""
        spared, retained = self._spared.live, self._retained
        key = self._shadow.first_awaited(spared)
        if key is None:
            while retained and not self._is_retained(retained[0]):
                heapq.heappop(retained)
            key = retained[0][1] if retained else next(iter(spared))
        self._requeue(spared[key][2], self._spared, self._forced, ())
        return self._forced

    def _refresh(self) -> None:
        """The first of the spared has the rank that it should have, and some others."""
        spared, hand = self._spared, self._spared_hand
        for _ in range(RANKS_PER_LOOK):
            if not hand:
                hand.extend(spared.live)
            entry = spared.live.get(hand.pop())
            if entry is not None:
                self._rerank_spared(entry)
        while self._rerank_spared(spared.first()):
            pass

    def _rerank_spared(self, entry: Entry) -> bool:
        """Give a spared extent another rank if its value is another by now; answers whether."""
        extent, old = entry[2], entry[0][0]
        rank = self._worth(extent)
        if old / CHANGED <= rank[0] <= old * CHANGED:
            return False
        self._requeue(extent, self._spared, self._spared, rank)
        return True

    def _worth(self, extent: Extent) -> tuple[float, int]:
        """Value and last use of an extent, in whichever queue it stands."""
        queue, rank = self._place(extent, self._lives.get(extent.key))
        if queue is self._by_value:
            return (self._model.value(rank.kind, self._now() - rank.born_s), extent.last_use)
        value, last_use = rank
        return (value, last_use)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


PLUGIN = AdaptiveEvictionPolicy
