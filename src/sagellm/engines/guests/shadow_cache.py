"""`ShadowCache`: what a policy would reuse of a host's requests, without any KV.

As in `sagellm replay`: a hit is the leading run of cached blocks, a request's prompt is in the cache from its
admission on, and what a request holds is not evicted.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import dataclass

from sagellm.core.clock import Clock
from sagellm.core.errors import BookkeepingError
from sagellm.core.events import EventBus
from sagellm.core.protocols.eviction import NO_USE, PolicyFactory, Use
from sagellm.core.protocols.prefix_cache import MissCounts, PrefixHit
from sagellm.core.types import Namespace, Tokens
from sagellm.engines.guests.paths import TOKENS_PER_DIGEST, Digests, path_of
from sagellm.engines.guests.request_hints import NO_HINTS, HintedIndex, RequestHints
from sagellm.kvmgr.prefix_cache.attribution import MissAttribution
from sagellm.kvmgr.prefix_cache.radix import RadixIndex

NO_NAMESPACE = Namespace()


@dataclass(slots=True)
class ReuseCount:
    """Whole blocks of prompts, and those of them that were reused."""

    num_blocks: int = 0
    num_hits: int = 0

    def add(self, num_blocks: int, num_hits: int) -> None:
        self.num_blocks += num_blocks
        self.num_hits += num_hits

    @property
    def ratio(self) -> float:
        """Hits over blocks, 0 to 1."""
        return self.num_hits / self.num_blocks if self.num_blocks else 0.0


class ShadowCache:
    """A cache of `capacity` blocks with an eviction policy.

    Prompts are block hashes, or tokens of which `block_tokens` make a block. `num_open`: blocks of each
    request that are not full, and so not cached. `hint_kinds`: hints of clients that it heeds.
    `attributes_misses`: `last_misses` says why blocks of the last prompt were not there.
    """

    def __init__(
        self,
        capacity: int,
        policy_factory: PolicyFactory,
        clock: Clock,
        *,
        num_open: int = 0,
        block_tokens: int = TOKENS_PER_DIGEST,
        hint_kinds: Collection[str] = (),
        attributes_misses: bool = False,
    ) -> None:
        self.capacity, self.reuse, self._num_open = capacity, ReuseCount(), num_open
        self._block_tokens, events = block_tokens, EventBus()
        self._index = RadixIndex(block_tokens, clock=clock, policy_factory=policy_factory, events=events)
        self._hinted = HintedIndex(self._index, clock, hint_kinds)
        self.last_misses = MissCounts()
        self._attribution: MissAttribution | None = None
        if attributes_misses:  # a host's hashes cover its salts, so equal ones are never of two tenants
            self._attribution = MissAttribution(events, clock, across_namespaces=False)
        self._free = array("i", range(capacity))
        self._held: dict[str, tuple[PrefixHit, int]] = {}

    def admit(
        self, request_id: str, prompt: Digests | Tokens, max_hits: int, namespace: Namespace = NO_NAMESPACE
    ) -> int:
        """A request begins; returns how many leading blocks it would reuse, at most `max_hits`."""
        path = prompt if isinstance(prompt, Tokens) else path_of(prompt)
        hit = self._index.pin(self._index.lookup(path, namespace))
        num_hits = min(hit.num_blocks, max_hits)
        self.reuse.add(len(path) // self._block_tokens, num_hits)
        if self._attribution is not None:
            self.last_misses = self._attribution.observe(self._index, path, namespace, num_hits)
        self._held[request_id] = hit, num_hits
        self._held[request_id] = self._extend(hit, path), num_hits
        return num_hits

    def finish(
        self, request_id: str, digests: Digests | Tokens, use: Use = NO_USE, said: RequestHints = NO_HINTS
    ) -> None:
        """The request ends with these blocks, its prompt's and its output's."""
        held = self._held.get(request_id)
        if held is None:
            return
        path = digests if isinstance(digests, Tokens) else path_of(digests)
        hit, num_reused = self._extend(held[0], path), held[1]
        del self._held[request_id]
        self._index.unpin(hit, use._replace(num_reused_blocks=num_reused) if use is not NO_USE else use)
        self._hinted.ended(said, path, hit.namespace)

    @property
    def num_held(self) -> int:
        """Requests that have begun and not ended."""
        return len(self._held)

    def clear(self) -> None:
        """The host has emptied its cache."""
        self._free += self._index.clear()

    def _extend(self, hit: PrefixHit, path: Tokens) -> PrefixHit:
        """Hold more of a path; as much as fits beside what others hold."""
        index, num_blocks, namespace = self._index, len(path) // self._block_tokens, hit.namespace
        resident = max(hit.num_blocks, index.lookup(path, namespace).num_blocks)
        num_open = self._num_open * len(self._held)
        while (short := num_blocks - resident + num_open - len(self._free)) > 0:
            if not index.num_evictable:
                num_blocks -= short
                break
            self._free += index.evict(min(short, index.num_evictable)) or array("i")
            resident = max(hit.num_blocks, index.lookup(path, namespace).num_blocks)
        if num_blocks <= hit.num_blocks:
            return hit
        first_new = len(self._free) - max(0, num_blocks - resident)
        block_ids = array("i", bytes(4 * min(resident, num_blocks))) + self._free[first_new:]
        del self._free[first_new:]
        longer = index.insert(path, block_ids, namespace, pin=True).hit
        index.unpin(hit)
        return longer

    def check(self) -> None:
        """Raise `BookkeepingError` where the books are wrong."""
        self._index.check()
        if self._index.num_cached + len(self._free) != self.capacity:
            raise BookkeepingError(f"{self._index.num_cached} cached and {len(self._free)} free blocks")
