"""Which checkpoints and blocks stay when the budget is full."""

from __future__ import annotations

import heapq
import itertools
from typing import Protocol

from sagellm.benchmarks.checkpoints.cache import HybridCache
from sagellm.benchmarks.checkpoints.rules import Rule, Served
from sagellm.benchmarks.checkpoints.tree import Path, Segment
from sagellm.benchmarks.traces.record import TraceRequest
from sagellm.core.errors import BookkeepingError
from sagellm.kvmgr.eviction.checkpoints.retention import CheckpointRetention


class Keeper(Protocol):
    """Makes checkpoints for served requests, and evicts down to a budget."""

    def serve(self, request: TraceRequest, path: Path, served: Served) -> None:
        """The request has used the checkpoint behind `served.num_reused` and computed the rest."""

    def shrink(self, budget_bytes: float) -> None:
        """Evicts until the cache has at most so many bytes."""


class CheckpointLRU:
    """Drops the checkpoint used longest ago, and the blocks that no other one needs.

    A use is that of the deepest checkpoint on a path alone. `max_per_path`: SGLang's cap
    (`--mamba-max-states-per-path`, pull request 31230): beyond it, a new checkpoint drops the shallowest on
    its path, but none at a fork.
    """

    def __init__(self, cache: HybridCache, rule: Rule, max_per_path: int | None = None) -> None:
        self._cache, self._rule, self._max_per_path = cache, rule, max_per_path
        self._uses: dict[int, int] = {}
        self._queue: list[tuple[int, int]] = []
        self._serial = itertools.count()

    def serve(self, request: TraceRequest, path: Path, served: Served) -> None:
        if served.num_reused:
            self._use(path.at(served.num_reused).key(served.num_reused))
        for depth in self._rule(served):
            self._use(self._cache.make(path.at(depth), depth))
        if self._max_per_path is not None:
            self._cap(path, self._max_per_path)
        if path.segments:
            self._cache.evict_uncovered(path.segments[-1])

    def shrink(self, budget_bytes: float) -> None:
        while self._cache.used_bytes > budget_bytes:
            use, key = heapq.heappop(self._queue)
            if self._uses.get(key) == use:
                self._drop(key)

    def _use(self, key: int) -> None:
        self._uses[key] = next(self._serial)
        heapq.heappush(self._queue, (self._uses[key], key))

    def _cap(self, path: Path, most: int) -> None:
        places = [(segment, depth) for segment in path.segments for depth in segment.depths]
        excess = len(places) - most
        for segment, depth in places[:-1]:
            is_fork = depth == segment.stop and segment.num_resident_children > 1
            if excess > 0 and not is_fork:
                self._drop(segment.key(depth))
                excess -= 1

    def _drop(self, key: int) -> None:
        segment = self._cache.checkpoints[key][0]
        del self._uses[key]
        self._cache.drop(key)
        self._cache.evict_uncovered(segment)


class BlockLRU:
    """One LRU queue of blocks and checkpoints, as vLLM's block pool.

    A block is used by every request that has it, tails are evicted before heads. A checkpoint is used when it
    is made or continued, and goes with its block at the latest.
    """

    def __init__(self, cache: HybridCache, rule: Rule) -> None:
        self._cache, self._rule = cache, rule
        self._uses: dict[int, int] = {}
        self._queue: list[tuple[int, int, int, Segment | int]] = []
        self._serial = itertools.count()
        self._number = 0

    def serve(self, request: TraceRequest, path: Path, served: Served) -> None:
        self._number += 1
        if served.num_reused:
            self._use(path.at(served.num_reused).key(served.num_reused), served.num_reused)
        for depth in self._rule(served):
            self._use(self._cache.make(path.at(depth), depth), depth)
        if path.segments:
            self._push(path.segments[-1])

    def shrink(self, budget_bytes: float) -> None:
        while self._cache.used_bytes > budget_bytes:
            use, _, _, item = heapq.heappop(self._queue)
            if isinstance(item, int):
                if self._uses.get(item) == use:
                    del self._uses[item]
                    self._cache.drop(item)
            elif item.last_use == use and not item.num_resident_children and item.resident > item.start:
                self._evict(item, budget_bytes)

    def _evict(self, segment: Segment, budget_bytes: float) -> None:
        """Evict blocks that are too many from a tail, down to a checkpoint."""
        stop = segment.resident - 1
        if segment.depths and segment.depths[-1] < segment.resident:
            stop = segment.depths[-1]
        elif not segment.depths:
            stop = segment.start
        missing = -int(-(self._cache.used_bytes - budget_bytes) // self._cache.block_bytes)
        for key in self._cache.evict_blocks(segment, min(missing, segment.resident - stop)):
            del self._uses[key]
        if segment.resident > segment.start:
            self._push(segment)
        elif segment.parent is not None and not segment.parent.num_resident_children:
            self._push(segment.parent)

    def _push(self, segment: Segment) -> None:
        entry = (segment.last_use, -segment.resident, next(self._serial), segment)
        heapq.heappush(self._queue, entry)

    def _use(self, key: int, depth: int) -> None:
        self._uses[key] = self._number
        heapq.heappush(self._queue, (self._number, -depth, next(self._serial), key))


class ValueKeeper:
    """`CheckpointRetention` on a `HybridCache`: both places and evictions by value."""

    def __init__(self, cache: HybridCache) -> None:
        self._cache = cache
        self.retention = CheckpointRetention(cache)
        self._now_s = 0.0

    def serve(self, request: TraceRequest, path: Path, served: Served) -> None:
        self._now_s = request.time_s
        keys = path.keys()
        depths = self.retention.places(
            keys, served.num_known, served.num_reused, request.num_output_tokens, self._now_s
        )
        for depth in depths:
            self._cache.make(path.at(depth), depth)
        for depth in depths:
            self.retention.made(keys[depth - 1], depth, self._now_s)
        if path.segments:
            self._cache.evict_uncovered(path.segments[-1])

    def shrink(self, budget_bytes: float) -> None:
        while self._cache.used_bytes > budget_bytes:
            if not self._cache.checkpoints:
                raise BookkeepingError("blocks are resident that no checkpoint needs")
            key = self.retention.victim(self._now_s)
            segment, above = self._cache.checkpoints[key][0], self._cache.marginal(key).above
            self._cache.drop(key)
            self._cache.evict_uncovered(segment)
            self.retention.removed(key, above, self._now_s)
