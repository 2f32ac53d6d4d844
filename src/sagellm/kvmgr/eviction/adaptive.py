"""The default: learned eviction, held to account by LRU."""

from __future__ import annotations

import math

from sagellm.core.clock import Clock
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.eviction import Extent, GiveUp
from sagellm.kvmgr.eviction._lives import Life
from sagellm.kvmgr.eviction._lru_shadow import LRUShadow
from sagellm.kvmgr.eviction.learned import LearnedEvictionPolicy

FIRST_PENALTY = 1000


class AdaptiveEvictionPolicy(LearnedEvictionPolicy):
    """Ranks as `learned` does while that hits at least what LRU would, and as LRU while it does not.

    Beside the cache runs a shadow of LRU, sizes only. When what is learned has lost more than `margin` of all
    blocks asked for since its trial began, plus `slack` requests' worth of blocks for chance, LRU takes over
    for `FIRST_PENALTY` requests, twice as many each time; then the next trial begins. So the loss to
    LRU is bounded by the margin, and by slack and one capacity (what the cache holds at that moment) for each
    of the logarithmically many trials.
    """

    def __init__(
        self,
        *,
        capacity: int | None = None,
        clock: Clock | None = None,
        max_lives: int = 16_384,
        margin: float = 0.001,
        slack: float = 16.0,
    ) -> None:
        super().__init__(capacity=capacity, clock=clock, max_lives=max_lives)
        if not (_is_number(margin) and 0 <= margin <= 1 and _is_number(slack) and 0 <= slack < math.inf):
            raise ConfigError(f"margin must be in 0..1 and slack at least 0, got {margin!r} and {slack!r}")
        self._margin, self._slack = margin, slack
        self._shadow = LRUShadow()
        self._num_cached = self._room = 0
        self._matching = 1.0
        self._lead = 0.0
        self._num_asked = self._num_requests = 0
        self._penalty, self._rest = FIRST_PENALTY, 0

    @property
    def follows_lru(self) -> bool:
        """Whether LRU has taken over."""
        return self._rest > 0

    def evict(self, num_blocks: int, give_up: GiveUp) -> int:
        self._room = min(self._num_cached, self._given_capacity or self._num_cached)
        self._shadow.shrink(self._room)
        given = super().evict(num_blocks, give_up)
        self._num_cached = max(0, self._num_cached - given)
        return given

    def _begun(self, extent: Extent, life: Life) -> None:
        reused = extent.use.num_reused_blocks
        self._num_cached += max(0, life.end - reused)
        kept = self._shadow.use(life.lineage, life.end)
        if self._room:
            self._shadow.shrink(self._room)
        found = min(reused, life.known)
        if found < life.known - 1:  # who knows how much of what is gone would have been found again?
            matching = found + self._matching * (life.known - found)
        else:
            matching = max(found, life.known - 1)
            if life.claimed:
                self._matching += 0.01 * (life.known / life.claimed - self._matching)
        self._compare(found, min(kept, matching), life.end)

    def _compare(self, found: int, found_by_lru: float, num_blocks: int) -> None:
        """Count what this policy and what LRU had of a request, and change sides where due."""
        if self._rest:
            self._rest -= 1
            if not self._rest:
                self._lead, self._num_asked, self._num_requests = 0.0, 0, 0
                self._take_sides()
            return
        self._lead += found - found_by_lru
        self._num_asked += num_blocks
        self._num_requests += 1
        typical = self._num_asked / self._num_requests
        if self._lead < -(self._margin * self._num_asked + self._slack * typical):
            self._rest = self._penalty
            self._penalty *= 2
            self._take_sides()

    def _follows_recency(self) -> bool:
        return self._rest > 0 or super()._follows_recency()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


PLUGIN = AdaptiveEvictionPolicy
