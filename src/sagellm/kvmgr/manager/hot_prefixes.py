"""`HotPrefixes` loads what many stored prompts begin with while the engine is idle.

After a restart the disk has its KV and the device does not; nor does the device after its cache was reset. It
goes into free blocks only, so nothing is evicted for it, and any request ends the load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from sagellm.core.protocols.kv_pool import KVPool
from sagellm.core.protocols.kv_tiers import KVTiers
from sagellm.core.protocols.prefix_cache import PrefixReuseIndex, SharedPrefix
from sagellm.core.types import Account, Tokens
from sagellm.kvmgr.manager.loads import TierLoads

NAME = "kv.load_hot"
"""Stands for the id of a request in the calls of tiers."""
SEARCH_EVERY_S = 30.0
"""Tiers are searched at most so often."""
QUIET_S = 1.0
"""Nothing begins before so much time has passed since the last request."""
SLICE_S = 3e-4
"""The engine looks for requests so often while tiers are searched."""
PAUSE_S = 2e-3
"""Between two slices, so that other threads of the process run."""
MAX_PREFIXES = 128
"""Of each tier."""
MIN_FREE_SHARE = 1 / 8
"""Of the device's blocks. With fewer that are free, nothing is loaded."""
MAX_TAKEN_SHARE = 1 / 2
"""Of the free blocks, that are filled after one search."""
MAX_BLOCKS = 1024
"""Of one load, since the engine's thread takes it in at once; a longer prefix comes up in parts."""


class HotPrefixes:
    """Loads one prefix after the other while requests and moves are absent.

    The prefixes are those behind which most stored prompts part: a count that needs no record of uses, so it
    is right after a restart too. Tiers are searched again when there was a request, or the device's index
    has changed.
    """

    def __init__(
        self,
        loads: TierLoads,
        tiers: KVTiers,
        index: PrefixReuseIndex,
        pool: KVPool,
        now: Callable[[], float],
    ) -> None:
        self._loads, self._tiers, self._index, self._pool, self._now = loads, tiers, index, pool, now
        self._next_s = self._search_s = -math.inf
        """When to go on, and when tiers may be searched again."""
        has_any = any(state.cached for state in tiers.states())
        self._settled: int | None = None if has_any else index.num_cached
        """How many blocks were cached when nothing was left to do; None: there may be something."""
        self._search: Iterator[SharedPrefix | None] | None = None
        self._prefixes: list[SharedPrefix] = []
        """What was found and is not loaded yet; the best is the last."""
        self._least_free, self._keep_free = max(1.0, MIN_FREE_SHARE * pool.total_blocks), 0
        self._least_cached = 0
        """Blocks that the device must have of the best prefix: with fewer, its last load brought nothing."""
        self._num_open, self._stopped_at = 0, -1
        """Of all arrivals: `num_blocks` when the last load began, `num_changes` when one was stopped."""

    @property
    def wake_s(self) -> float:
        """Seconds until an idle engine should call `advance`; infinite while it need not."""
        is_settled = self._settled == self._index.num_cached or self._pool.num_free < self._least_free
        if is_settled or self._tiers.is_loading(NAME):
            return math.inf
        return max(0.0, self._next_s - self._now())

    @property
    def holds_blocks(self) -> bool:
        """Whether a load has blocks of the device, which a request gets soon."""
        return self._tiers.is_loading(NAME) or self._tiers.arrivals.num_changes == self._stopped_at

    def advance(self, *, is_idle: bool) -> None:
        """Go on for `SLICE_S`, or stop. Called in each step.

        `is_idle`: no request waits or runs, and no step is in flight. Call it when tiers were asked for a new
        request: a load that brings what this one lacks then goes on for it.
        """
        others_load = self._tiers.arrivals.num_blocks > self._num_open
        if not is_idle or (others_load and self._tiers.is_loading(NAME)):
            self._stop()
            self._settled = None
            self._next_s = max(self._next_s, self._now() + QUIET_S)
        elif not self.wake_s and self._tiers.is_idle:
            until_s = self._now() + SLICE_S
            if self._search is None and not self._prefixes:
                self._begin_search()
            if self._search is not None:
                self._go_on(self._search, until_s)
            if self._search is None:
                self._load_next(until_s)

    def _stop(self) -> None:
        if self._tiers.is_loading(NAME):
            self._stopped_at, self._least_cached = self._tiers.arrivals.num_changes, 0
            self._tiers.cancel(NAME)

    def _begin_search(self) -> None:
        num_free = self._pool.num_free
        self._keep_free = max(num_free - int(MAX_TAKEN_SHARE * num_free), self._loads.num_reserved)
        self._settled, self._search_s = None, self._now() + SEARCH_EVERY_S
        self._search = self._tiers.shared_prefixes(MAX_PREFIXES)

    def _go_on(self, search: Iterator[SharedPrefix | None], until_s: float) -> None:
        for found in search:
            if found is not None:
                self._prefixes.append(found)
            if self._now() >= until_s:
                self._next_s = self._now() + PAUSE_S
                return
        self._search = None
        self._prefixes.sort(key=lambda prefix: prefix.num_prompts)

    def _load_next(self, until_s: float) -> None:
        """Begin to load what is missing of the best prefix, or a part."""
        size = self._index.block_size
        while self._prefixes and self._pool.num_free > self._keep_free:
            tokens, namespace, _ = self._prefixes[-1]
            cached = self._index.lookup(tokens, namespace).num_blocks
            most = min(MAX_BLOCKS, self._pool.num_free - self._keep_free)
            stop = min(len(tokens) // size, cached + most)
            if self._least_cached <= cached < stop:
                part = Tokens(tokens.slice(0, stop * size))
                self._loads.bring_up_expected(NAME, part, namespace, Account(namespace.tenant))
                self._least_cached, self._num_open = cached + 1, self._tiers.arrivals.num_blocks
                if self._tiers.is_loading(NAME):
                    return
            self._prefixes.pop()
            self._least_cached = 0
            if self._prefixes and self._now() >= until_s:
                self._next_s = self._now() + PAUSE_S
                return
        self._prefixes.clear()
        self._settled, self._next_s = self._index.num_cached, max(self._next_s, self._search_s)
