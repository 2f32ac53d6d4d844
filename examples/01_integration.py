"""The life of a request through the five KV modules, joined by hand.

It is the corrected example of the design documents.

Three requests, two of which share a prefix, then a fourth on a full pool: match the prefix, schedule,
allocate, evict when the pool is full, insert, teach the predictor, release. Run it with `python
examples/01_integration.py`; it needs the extra `native` (torch, for the LSTM).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from sagellm.compat import (
    BaseSchedulerIR,
    BlockAllocationRequest,
    EvictionCandidate,
    GPUKVPool,
    LRUEvictionPolicy,
    RadixPrefixCache,
    ScheduleRequest,
)
from sagellm.core.clock import ManualClock
from sagellm.core.types import Tokens
from sagellm.kvmgr.lifetime import LSTMLifetimePredictor, PredictionRequest
from sagellm.kvmgr.scheduler_ir.passes.prefix_cache_aware import PrefixCacheAwarePass
from sagellm.kvmgr.scheduler_ir.passes.priority_based import PriorityBasedPass

SECONDS_PER_TOKEN = 0.02
LONGEST = 4096


@dataclass
class Example:
    """The modules, and the blocks that each finished sequence keeps for its next turn."""

    total_blocks: int = 10000
    clock: ManualClock = field(default_factory=ManualClock)
    kept: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prefix_cache = RadixPrefixCache(max_blocks=1000)
        self.kv_pool = GPUKVPool(total_blocks=self.total_blocks, block_size=16, clock=self.clock)
        self.eviction_policy = LRUEvictionPolicy()
        self.lifetime_predictor = LSTMLifetimePredictor()
        self.scheduler = BaseSchedulerIR()
        self.scheduler.add_optimization_pass(PrefixCacheAwarePass(self.prefix_cache))
        self.scheduler.add_optimization_pass(PriorityBasedPass())
        self.ids = itertools.count(1)

    def process_request(self, token_ids: list[int], max_tokens: int, priority: int) -> list[int] | None:
        """Run one request to its end; returns its block table, None if not scheduled."""
        self.clock.advance(1.0)
        # Step 1: the request, as the scheduler sees it
        req = ScheduleRequest(
            request_id=f"request-{next(self.ids)}",
            token_ids=token_ids,
            max_tokens=max_tokens,
            priority=priority,
            arrived_time=self.clock.now(),
        )

        # Step 2: what is cached of its prompt (in tokens, whole blocks)
        prefix_match = self.prefix_cache.match_prefix(token_ids)
        req.prefix_cache_hit = prefix_match.match_length

        # Step 3: may it run now? Memory is counted in blocks; what eviction could free counts as available.
        result = self.scheduler.schedule(
            pending_requests=[req],
            running_requests=[],
            available_memory=self.kv_pool.get_free_blocks() + self.prefix_cache.num_evictable,
        )
        if not result.scheduled_requests:
            print(f"{req.request_id}: not scheduled, {result.draft.decisions[-1].reason}")
            return None

        # Step 4: hold the prefix, then allocate the rest; on a full pool, evict first
        hit = self.prefix_cache.pin(self.prefix_cache.lookup(Tokens(token_ids)))
        allocation = BlockAllocationRequest(req.kv_blocks_needed, req.request_id, req.priority)
        try:
            new_blocks = self.kv_pool.allocate(allocation)
        except MemoryError as error:
            print(f"{req.request_id}: {error}")
            self.evict(req.kv_blocks_needed - self.kv_pool.get_free_blocks())
            new_blocks = self.kv_pool.allocate(allocation)
        block_table = prefix_match.block_ids + new_blocks

        # Step 5: prefill and decode would run here, on the blocks of the table
        print(f"{req.request_id}: {len(prefix_match.block_ids)} blocks reused, {len(new_blocks)} new")
        predicted = self.lifetime_predictor.predict(
            PredictionRequest(req.request_id, token_ids, len(token_ids), LONGEST)
        )
        self.clock.advance(max_tokens * SECONDS_PER_TOKEN)

        # Step 6: the computed prompt enters the index, which owns those blocks from now on; the sequence
        # keeps the blocks of its answer until they are evicted
        whole = len(token_ids) // self.kv_pool.block_size
        self.kv_pool.free(self.prefix_cache.insert_prefix(token_ids, block_table))
        self.prefix_cache.unpin(hit)
        self.kept[req.request_id] = block_table[whole:]

        # Step 7: teach the predictor how long it really was
        actual_length = len(token_ids) + max_tokens
        self.lifetime_predictor.update(req.request_id, actual_length, max_tokens * SECONDS_PER_TOKEN)
        guess = "it abstains" if predicted.abstained else f"{predicted.remaining_tokens:.0f}"
        print(f"{req.request_id}: tokens to go, predicted: {guess}; in truth: {max_tokens}")
        return block_table

    def evict(self, required_blocks: int) -> None:
        """Evict finished sequences, chosen by the policy, then cached blocks of the index."""
        candidates = [
            EvictionCandidate(
                sequence_id=sequence_id,
                block_ids=block_ids,
                last_access_time=max(self.kv_pool.block_info[bid].last_access_time for bid in block_ids),
            )
            for sequence_id, block_ids in self.kept.items()
        ]
        for candidate in candidates:
            prediction = self.lifetime_predictor.predict(
                PredictionRequest(candidate.sequence_id, [], current_length=10, max_length=100)
            )
            candidate.estimated_lifetime = prediction.estimated_time
        held = sum(len(candidate.block_ids) for candidate in candidates)
        victims = self.eviction_policy.select_victims(candidates, min(required_blocks, held))
        for sequence_id in victims:
            required_blocks -= len(self.kept[sequence_id])
            self.release(sequence_id)
        print(f"  evicted the answers of {', '.join(victims)}")
        if required_blocks > 0:
            evicted = self.prefix_cache.evict(required_blocks)
            assert evicted is not None
            self.kv_pool.free(evicted)
            print(f"  the index gave up its {len(evicted)} oldest blocks")

    def release(self, sequence_id: str) -> None:
        self.kv_pool.free(self.kept.pop(sequence_id))

    def check(self) -> None:
        """Free + cached + kept = total: nothing is lost, nothing is counted twice."""
        self.prefix_cache.check()
        self.kv_pool.check()
        kept = sum(map(len, self.kept.values()))
        assert self.kv_pool.get_free_blocks() + self.prefix_cache.num_cached + kept == self.total_blocks


def main() -> None:
    shared = list(range(64))
    requests = [
        ([*shared, *range(1000, 1040)], 20, 1),  # 64 tokens that the next one shares
        ([*shared, *range(2000, 2040)], 30, 1),
        ([*range(100, 130)], 10, 0),  # nothing shared
    ]
    example = Example()
    for token_ids, max_tokens, priority in requests:
        blocks = example.process_request(token_ids, max_tokens, priority)
        print(f"  block table: {blocks}")
        example.check()

    print("a pool of 16 blocks, so that the last one finds it full:")
    small = Example(total_blocks=16)
    for token_ids, max_tokens, priority in [*requests, ([*range(3000, 3060)], 10, 0)]:
        small.process_request(token_ids, max_tokens, priority)
        small.check()
    for sequence_id in list(small.kept):
        small.release(sequence_id)
    small.check()
    print(f"released: {small.kv_pool.get_free_blocks()} blocks free, {small.prefix_cache.num_cached} cached")


if __name__ == "__main__":
    main()
