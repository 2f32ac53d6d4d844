"""`Comparison`: what the host reuses, and what other caches of its size would.

The other caches are `ShadowCache`s: one with LRU, one with our policy, one with the policy for each kind of
hint that the settings name, and one with all of these kinds, if there are several. A report compares them.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, Protocol

from sagellm.core.clock import Clock
from sagellm.core.protocols.eviction import NO_USE, EvictionPolicy, Use
from sagellm.core.protocols.prefix_cache import MissCounts
from sagellm.core.types import Namespace, Tokens
from sagellm.engines.build_kv import make_policy
from sagellm.engines.guests.request_hints import NO_HINTS, RequestHints
from sagellm.engines.guests.settings import GuestSettings
from sagellm.engines.guests.shadow_cache import ReuseCount, ShadowCache

JUDGED_TOKENS = 160_000
"""From so many tokens of prompts on, the guard judges at each request."""
MAX_LOSS = 0.01
"""Share of all blocks of prompts by which the policy's shadow may be behind LRU's."""


class Guide(Protocol):
    """Decides what the host evicts, until `give_back`."""

    @property
    def is_guided(self) -> bool: ...

    def give_back(self, reason: str) -> None:
        """Give the host its own order back, for good; the log has the reason."""


class Comparison:
    """Counts reuse in one cache of the host, and guards its `guide`.

    `guide` is None where the host decides. `capacity` in blocks of `block_size` tokens of the host;
    `block_tokens`: int32s that name a block in a path. `shadows` by name; `decider` names the one with the
    policy and all hints of the settings. `misses`: why blocks of prompts were computed, by the shadow whose
    order was in force.
    """

    def __init__(
        self,
        host: str,
        capacity: int,
        block_size: int,
        block_tokens: int,
        settings: GuestSettings,
        clock: Clock,
        logger: logging.Logger,
    ) -> None:
        self._logger = logger
        self.host, self.settings, self._capacity, self._clock = host, settings, capacity, clock
        self._block_size, self._reported_s = block_size, clock.now()
        self.reuse, self.misses = ReuseCount(), MissCounts()
        self.guide: Guide | None = None
        made = partial(
            ShadowCache, capacity, clock=clock, block_tokens=block_tokens, num_open=int(block_size > 1)
        )
        name, kinds = settings.policy, settings.hints
        arms: dict[str, tuple[str, ...]] = {name: ()} | {f"{name} with {kind}": (kind,) for kind in kinds}
        if len(kinds) > 1:
            arms[f"{name} with all hints"] = kinds
        self.decider = list(arms)[-1]
        self.shadows = {"lru": made(lambda: self._make("lru"), attributes_misses=True)}
        for arm, heeded in arms.items():
            attributes = arm in ("lru", self.decider)
            self.shadows[arm] = made(self.policy, hint_kinds=heeded, attributes_misses=attributes)

    def policy(self) -> EvictionPolicy:
        """The policy of the settings, as large as the host's cache."""
        return self._make(self.settings.policy, **self.settings.options)

    def _make(self, name: str, **options: Any) -> EvictionPolicy:
        return make_policy(name, capacity=self._capacity, clock=self._clock, **options)

    def began(
        self,
        request_id: str,
        prompt: Tokens,
        num_found: int,
        num_tokens: int,
        space: Namespace,
        *,
        reads_cache: bool = True,
    ) -> None:
        """A request begins.

        It reuses `num_found` blocks of a prompt of `num_tokens`; `prompt` has the whole blocks. With
        `reads_cache=False` it computes the whole prompt whatever is cached, so shadows count no hits either.
        """
        most = (num_tokens - 1) // self._block_size if reads_cache else 0
        self.reuse.add(num_tokens // self._block_size, num_found)
        for shadow in self.shadows.values():
            shadow.admit(request_id, prompt, most, space)
        in_force = self.shadows[self.decider if self._is_guided else "lru"]
        self.misses = self.misses.plus(in_force.last_misses)
        self._judge()

    def ended(self, request_id: str, path: Tokens, use: Use = NO_USE, said: RequestHints = NO_HINTS) -> None:
        """The request ends; `path`: the cached blocks of its prompt and output. `said`: its hints."""
        for shadow in self.shadows.values():
            shadow.finish(request_id, path, use, said)
        if self.settings.report_s and self._clock.now() - self._reported_s >= self.settings.report_s:
            self.report()

    def cleared(self) -> None:
        """The host has emptied its cache."""
        for shadow in self.shadows.values():
            shadow.clear()

    def _judge(self) -> None:
        """Give the host its own order back if the policy loses to LRU.

        Compares two shadows, since the host counts blocks of running requests at other moments.
        """
        lru, ours = self.shadows["lru"].reuse, self.shadows[self.decider].reuse
        num_blocks, behind = ours.num_blocks, lru.num_hits - ours.num_hits
        if num_blocks * self._block_size < JUDGED_TOKENS or behind <= MAX_LOSS * num_blocks:
            return
        if self._is_guided:
            assert self.guide is not None
            self.guide.give_back(
                f"{self.decider} reuses {behind} of {num_blocks} blocks fewer than LRU would"
            )

    @property
    def _is_guided(self) -> bool:
        return self.guide is not None and self.guide.is_guided

    def report(self) -> None:
        """Write the report, one line, into the log."""
        self._reported_s, misses = self._clock.now(), self.misses
        shadows = ", ".join(
            f"{name} {shadow.reuse.ratio:.2%} ({shadow.reuse.num_hits - self.reuse.num_hits:+d} blocks)"
            for name, shadow in self.shadows.items()
        )
        self._logger.info(
            "sageLLM: order of eviction: %s; %.2f %% of %d blocks of prompts were reused; a cache of this"
            " size would have reused with %s; of the blocks computed %d were new, %d evicted before, and"
            " %d evicted less than a minute before",
            self.decider if self._is_guided else f"{self.host}'s own",
            100 * self.reuse.ratio, self.reuse.num_blocks, shadows,
            misses.cold, misses.capacity, misses.premature,
        )  # fmt: skip
