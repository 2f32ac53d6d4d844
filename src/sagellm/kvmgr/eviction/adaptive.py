"""The default: learned eviction, with LRU where that is estimated to hit more."""

from __future__ import annotations

import math

from sagellm.core.clock import Clock
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.eviction import Extent, GiveUp
from sagellm.kvmgr.eviction._lives import Life
from sagellm.kvmgr.eviction._lru_shadow import LRUShadow
from sagellm.kvmgr.eviction.learned import LearnedEvictionPolicy


class AdaptiveEvictionPolicy(LearnedEvictionPolicy):
    """Ranks as `learned` does, and as LRU for some time after that was estimated to hit less than LRU.

    A shadow of LRU, which keeps sizes only, estimates what LRU would hit. A trial of the learned ranking ends
    when it has hit fewer blocks than this estimate by more than the allowance: `margin` of the blocks
    looked up since the trial began, plus `slack` requests of mean length. Then the policy ranks as LRU for
    `first_rest` requests, twice as many after each further trial, and the next trial begins.

    By construction, the estimated loss in a trial exceeds the allowance by at most one request's blocks, and
    the number of trials grows with the logarithm of the number of requests. The loss to a real LRU over a
    whole run is not bounded by a fixed share of the look-ups: the shadow is an estimate, each trial has an
    allowance of its own, and after a trial the cache lacks blocks that LRU would have kept (at most as many
    as the capacity). What was measured is in docs/decisions/0006-retention.md.

    Raises `ConfigError` for a `margin` outside 0..1, a negative `slack` or a `first_rest` below 1.
    """

    def __init__(
        self,
        *,
        capacity: int | None = None,
        clock: Clock | None = None,
        max_lives: int = 16_384,
        margin: float = 0.001,
        slack: float = 4.0,
        first_rest: int = 125,
    ) -> None:
        super().__init__(capacity=capacity, clock=clock, max_lives=max_lives)
        if not (_is_number(margin) and 0 <= margin <= 1 and _is_number(slack) and 0 <= slack < math.inf):
            raise ConfigError(f"margin must be in 0..1 and slack at least 0, got {margin!r} and {slack!r}")
        if type(first_rest) is not int or first_rest < 1:
            raise ConfigError(f"first_rest must be a whole number of at least 1, got {first_rest!r}")
        self._margin, self._slack = margin, slack
        self._shadow = LRUShadow()
        self._num_cached = self._room = 0
        self._matching = 1.0
        self._lead = 0.0
        self._num_asked = self._num_requests = 0
        self._next_rest, self._rest = first_rest, 0

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
            self._rest = self._next_rest
            self._next_rest *= 2
            self._take_sides()

    def _follows_recency(self) -> bool:
        return self._rest > 0 or super()._follows_recency()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


PLUGIN = AdaptiveEvictionPolicy
