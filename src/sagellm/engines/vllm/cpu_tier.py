"""Our eviction order in vLLM's tier of host memory.

    "kv_connector_extra_config": {"spec_name": "CPUOffloadingSpec", ...,
        "eviction_policy": "AdaptiveCachePolicy", "cache_policy_module_path": "sagellm.engines.vllm.cpu_tier"}

vLLM's `CPUOffloadingManager` asks a `CachePolicy` where a chunk (one or more blocks) is, and which go. Ours
keeps the chunks of requests that have ended as paths in our prefix index, where an eviction policy chooses.
Chunks of a request that still runs go last; those behind a gap in their prompt, which no request could reach,
go first.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

from sagellm.core.clock import MonotonicClock
from sagellm.core.protocols.eviction import EvictionPolicy, Use
from sagellm.engines.build_kv import make_policy
from sagellm.engines.guests.paths import index_of_digests, path_of

Key = Any
"""vLLM's `OffloadKey`: a block hash and the number of a KV cache group."""
GROUP_BYTES = 4


class SageCachePolicy(CachePolicy):  # type: ignore[misc]
    """A subclass names the policy of ours that it uses."""

    policy = "adaptive"

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._clock = MonotonicClock()
        self.clear()

    def _made(self) -> EvictionPolicy:
        return make_policy(self.policy, capacity=self.cache_capacity, clock=self._clock)

    def clear(self) -> None:
        """Forget all chunks."""
        self.index = index_of_digests(self._made, self._clock)
        self._chunks: dict[Key, ChunkStatus] = {}
        self._key_of: dict[int, Key] = {}
        self._indexed: set[Key] = set()
        self._active: dict[Key, None] = {}
        self._spare: dict[Key, None] = {}
        self._num_idle = 0

    # -- what vLLM calls

    def get(self, key: Key) -> ChunkStatus | None:
        """The chunk of a key, if it is here."""
        return self._chunks.get(key)

    def insert(self, key: Key, chunk: ChunkStatus, req_context: Any = None) -> None:
        """A chunk that a running request stores."""
        self._chunks[key] = chunk
        self._key_of[chunk.chunk_id] = key
        self._active[key] = None
        self._num_idle += chunk.ref_cnt == 0

    def remove(self, key: Key) -> None:
        """A chunk whose store has failed."""
        chunk = self._chunks.pop(key)
        self._num_idle -= chunk.ref_cnt == 0
        del self._key_of[chunk.chunk_id]
        self._active.pop(key, None)
        self._spare.pop(key, None)
        if key in self._indexed:  # what stands behind it can no longer be reached either
            self._spare |= dict.fromkeys(self._indexed - {key})
            self._indexed.clear()
            self.index = index_of_digests(self._made, self._clock)

    def touch(self, keys: Iterable[Key], req_context: Any) -> None:
        """Nothing: a use counts once, when its request ends."""

    def on_request_finished(
        self, key_groups: Sequence[Sequence[Key]], insertion_only_keys: set[Key], reused_keys: set[Key],
        req_context: Any,
    ) -> None:  # fmt: skip
        """A request ends: the chunks of its prefix are a path that was used."""
        by_group: dict[bytes, list[tuple[int, Key]]] = {}
        positions: dict[Key, int] = getattr(req_context, "_offload_key_positions", {})
        for key, position in positions.items():  # without them chunks go in the order of their stores
            by_group.setdefault(key[-GROUP_BYTES:], []).append((position, key))
        for placed in by_group.values():
            self._used([key for _, key in sorted(placed)], len(reused_keys))
        for key in [key for group in key_groups for key in group]:
            if key in self._active:
                del self._active[key]
                self._spare[key] = None

    def evict(self, n: int, protected: set[Key]) -> list[tuple[Key, ChunkStatus]] | None:
        """Take out exactly `n` chunks that nothing reads. None if there are fewer."""
        if n > self._num_idle - sum(self._is_idle(key) for key in protected):
            return None
        gone: list[tuple[Key, ChunkStatus]] = []
        self._take(self._spare, n, protected, gone)
        while len(gone) < n and self.index.num_evictable:
            ids = self.index.evict(min(n - len(gone), self.index.num_evictable)) or ()
            chosen = dict.fromkeys(self._key_of[chunk_id] for chunk_id in ids)
            self._indexed -= chosen.keys()
            self._take(chosen, n, protected, gone)
            self._active |= chosen  # they are read now, or protected
        self._take(self._active, n, protected, gone)
        return gone

    def mark_evictable(self, key: Key) -> None:
        """No transfer reads the chunk any more."""
        self._num_idle += 1

    def mark_non_evictable(self, key: Key) -> None:
        """A transfer reads the chunk."""
        self._num_idle -= 1

    # -- inside

    def _is_idle(self, key: Key) -> bool:
        chunk = self._chunks.get(key)
        return chunk is not None and chunk.ref_cnt == 0

    def _used(self, keys: list[Key], num_reused: int) -> None:
        """Put the leading resident chunks of a prompt into the index."""
        length = next((i for i, key in enumerate(keys) if key not in self._chunks), len(keys))
        keys = keys[:length]
        if not keys:
            return
        ids = array("i", [self._chunks[key].chunk_id for key in keys])
        path = path_of([key[-GROUP_BYTES:] + key for key in keys])
        hit = self.index.pin(self.index.lookup(path))
        whole = self.index.insert(path, ids, pin=True)
        for key in keys[whole.num_existing :]:
            self._indexed.add(key)
            self._active.pop(key, None)
            self._spare.pop(key, None)
        self.index.unpin(hit)
        self.index.unpin(whole.hit, Use(0, num_reused))

    def _take(
        self, place: dict[Key, None], n: int, protected: set[Key], gone: list[tuple[Key, ChunkStatus]]
    ) -> None:
        """Move chunks that may go from a place, until `n` are gone."""
        idle = (key for key in place if self._is_idle(key) and key not in protected)
        for key in list(islice(idle, n - len(gone))):
            del place[key]
            chunk = self._chunks.pop(key)
            del self._key_of[chunk.chunk_id]
            self._num_idle -= 1
            gone.append((key, chunk))

    def check(self) -> None:
        """Assert that each chunk is in one place."""
        self.index.check()
        places = [*self._active, *self._spare, *self._indexed]
        assert sorted(places) == sorted(self._chunks)
        assert {self._key_of[chunk_id] for chunk_id in self.index.all_block_ids()} == self._indexed
        assert self._num_idle == sum(map(self._is_idle, self._chunks))


class AdaptiveCachePolicy(SageCachePolicy):
    """Learned reuse with a bound on the loss to LRU."""


class LRUCachePolicy(SageCachePolicy):
    """Least recently used first: what vLLM's own does."""

    policy = "lru"


class S3FIFOCachePolicy(SageCachePolicy):
    """S3-FIFO."""

    policy = "s3fifo"
