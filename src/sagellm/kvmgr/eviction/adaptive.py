"""The default: learned eviction on a budget of regret against LRU."""

from __future__ import annotations

from collections.abc import Sequence

from sagellm.core.clock import Clock
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.eviction import Extent, GiveUp, Hint, UseListener
from sagellm.kvmgr.eviction._lru_shadow import LRUShadow
from sagellm.kvmgr.eviction._queue import Entry, ExtentQueue
from sagellm.kvmgr.eviction.learned import CHANGED, LearnedEvictionPolicy

RANKS_PER_LOOK = 2
"""So many spared extents are ranked anew each time one of them may be evicted."""


class AdaptiveEvictionPolicy(LearnedEvictionPolicy, UseListener):
    """Evicts as `learned` does, as far as a budget of regret against LRU allows.

    Beside the cache runs a shadow of LRU, sizes only, that never holds more blocks than the cache does.
    `regret` is the number of hits lost to the shadow so far, less those won from it, plus the blocks that the
    shadow holds and the cache does not: each of these may be asked for once before the shadow gives it up
    too. `budget` is `max_regret` of all blocks looked up so far. A block that the shadow does not hold may
    always be evicted. One that it holds is evicted only if it is worth less than the best free candidate and
    `regret <= budget` still holds afterwards. With no budget left the order is LRU's, and the contents
    become LRU's.

    Theorem: `regret <= budget` whenever no request is in progress, and `regret <= budget + U` always, where U
    is the number of blocks that are pinned or wanted and that the shadow does not hold. Proof, by event:

    * A use finds more blocks in the shadow than in the cache only where the cache lacks blocks that the
      shadow holds. It brings these back, so `regret` does not rise, and `budget` grows.
    * When the shadow gives a block up, `regret` does not rise.
    * Before the cache evicts n blocks, the shadow shrinks to what the cache will hold then. So at least n
      blocks are in the cache and not in the shadow; all but U of them can go. For the at most U blocks that
      are short, the cache evicts what LRU would evict next; `regret` rises by as much, until the U blocks are
      used, which are hits that the shadow does not have.
    * What the request that eviction makes room for finds itself, LRU would not have evicted for it. So blocks
      that the shadow gives up before an eviction count in `regret` until the next use says which they were.

    Assumptions: the shadow ignores retention bonuses, and gives up at once what a hint calls ended. Of
    content that neither index nor policy holds any more only its first block is compared when it comes back:
    the rest counts as found by LRU. With quotas each class has a policy, so the theorem holds for each.
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
        if not _is_share(max_regret):
            raise ConfigError(f"max_regret must be a number from 0 to 1, got {max_regret!r}")
        self._max_regret, self._stake = max_regret, stake
        self._shadow = LRUShadow(self._lapsed)
        self._spared, self._forced = ExtentQueue(), ExtentQueue()
        self._spared_hand: list[int] = []
        self._num_cached = self._most_cached = self._num_leaving = self._num_looked_up = self._lead = 0

    @property
    def regret(self) -> int:
        """Blocks of hits lost to LRU so far, net, and those that may still be lost."""
        return self._shadow.num_firm_missing + self._num_leaving - self._lead

    @property
    def budget(self) -> float:
        """What `regret` may be by now, in blocks."""
        return self._max_regret * self._num_looked_up + (self._stake - 1) * max(0, self._lead)

    # -- events

    def found(self, extent: Extent, num_cached: int) -> None:
        self._lead += extent.first_position + extent.num_blocks - self._shadow.use(extent)
        self._shrink_shadow(num_cached)

    def added(self, extent: Extent, num_new: int, num_cached: int) -> None:
        own = extent.first_position + extent.num_blocks - num_new
        self._lead -= max(0, self._shadow.use(extent) - own)
        self._shrink_shadow(num_cached)

    def used(self, extent: Extent) -> None:
        end = extent.first_position + extent.num_blocks
        self._num_looked_up += extent.use.num_prompt_blocks or end
        self._shadow.use(extent)
        self._shrink_shadow(self._num_cached)

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
        room = self._most_cached = self._num_cached
        shadow = self._shadow
        shadow.shrink(room, room)
        self._num_leaving = shadow.num_missing - shadow.num_firm_missing
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

    def _lapsed(self, key: int) -> None:
        """The shadow gives up a block of a spared extent, which may be chosen now."""
        entry = self._spared.live.get(key)
        if entry is not None:
            self._settle(entry)

    def _first_free(self) -> ExtentQueue | None:
        """The queue whose first extent has a block that the shadow does not hold; others on the way are
        spared until it gives them up."""
        shadow = self._shadow
        while (queue := super()._choose()) is not None:
            entry = queue.first()
            extent = entry[2]
            if shadow.num_free(extent):
                return queue
            shadow.wait(extent.key)
            self._requeue_first(entry, queue, self._spared, self._worth(extent))
        return None

    def _force(self) -> ExtentQueue | None:
        """The spared extent that LRU would take, in a queue of its own."""
        key = self._shadow.first_awaited()
        spared = self._spared.live
        entry = spared.get(key) if key in spared else next(iter(spared.values()))
        self._requeue(entry[2], self._spared, self._forced, ())
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


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


PLUGIN = AdaptiveEvictionPolicy
