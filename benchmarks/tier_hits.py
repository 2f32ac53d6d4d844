"""Hits of a device with a larger tier, beside one flat pool.

    python benchmarks/tier_hits.py TRACE --capacity 0.5% --capacity 1% [--policy adaptive] [--factor 10]

The real index, pool, arrivals, tier and hierarchy, block by block, over a storage without bytes; requests
come one after the other, and all that moves has moved before the next one. The flat pool is `sagellm replay`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from sagellm.benchmarks.replay.block_trace import BlockTrace, block_trace
from sagellm.benchmarks.replay.sweep import ReplaySweepPlan, capacity, run_case
from sagellm.benchmarks.traces import read_trace
from sagellm.core.blocks import Tier
from sagellm.core.clock import ManualClock
from sagellm.core.protocols.eviction import EvictionPolicy, Use
from sagellm.core.protocols.kv_tiers import Buffer, ReadOutcome, StoredBlock, TierLookup
from sagellm.core.types import TOKEN_BYTES, Account, Namespace, Tokens
from sagellm.engines.build import make_policy
from sagellm.kvmgr.eviction import PrefillCostModel
from sagellm.kvmgr.kv_pool.free_list import FreeListPool
from sagellm.kvmgr.kv_pool.tiers.arrivals import PrefixArrivals
from sagellm.kvmgr.kv_pool.tiers.hierarchy import HierarchyManager
from sagellm.kvmgr.kv_pool.tiers.migrator import KVMigrator
from sagellm.kvmgr.kv_pool.tiers.tier import KVTier
from sagellm.kvmgr.prefix_cache.radix import RadixIndex

OWNER = "prefix index"


class NoBytes:
    """Implements `BlockBytes` and `BlockStorage` for blocks without bytes."""

    bytes_per_block = 1
    fault: str | None = None

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots

    def read_blocks(self, block_ids: Sequence[int], target: memoryview) -> None:
        pass

    def write_blocks(self, block_ids: Sequence[int], data: Buffer) -> None:
        pass

    def write(self, blocks: Sequence[StoredBlock], data: Buffer) -> None:
        pass

    def read(
        self, slots: Sequence[int], token_hashes: Sequence[bytes], target: memoryview
    ) -> list[ReadOutcome]:
        return [ReadOutcome.OK] * len(slots)

    def forget(self, slots: Iterable[int]) -> None:
        pass

    def touch(self, slots: Iterable[int]) -> None:
        pass

    def recover(self) -> Sequence[StoredBlock]:
        return ()

    def close(self) -> None:
        pass


def no_hashes(path: bytes, namespace: Namespace) -> list[bytes]:
    """One for each token of a path."""
    return [b""] * (len(path) // TOKEN_BYTES)


class TieredDevice:
    """A device of `num_blocks` blocks with one tier of `num_slots` below it."""

    def __init__(self, num_blocks: int, num_slots: int, policy: str, clock: ManualClock) -> None:
        def made(size: int) -> EvictionPolicy:
            return make_policy(policy, capacity=size, clock=clock)

        self._clock = clock
        self.pool = FreeListPool(num_blocks, 1)
        self.index = RadixIndex(1, clock=clock, policy_factory=partial(made, num_blocks))
        arrivals = PrefixArrivals(self.index, self.pool)
        arrivals.serve(self._make_room, OWNER)
        below = RadixIndex(1, clock=clock, policy_factory=partial(made, num_slots))
        self.tier = KVTier(Tier.DRAM, below, FreeListPool(num_slots, 1), NoBytes(num_slots))
        migrator = KVMigrator(
            NoBytes(num_blocks), {Tier.DRAM: NoBytes(num_slots)}, no_hashes,
            block_size=1,
        )  # fmt: skip
        costs = PrefillCostModel(1, seconds_per_token=1e9)
        self.tiers = HierarchyManager(self.index, arrivals, [self.tier], migrator, costs, 1)

    def _make_room(self, num_blocks: int, account: Account | None = None) -> None:
        missing = min(num_blocks - self.pool.num_free, self.index.num_evictable)
        evicted = self.index.evict(missing) if missing > 0 else None
        if evicted:
            self.pool.take_back(OWNER, evicted)

    def _settle(self) -> None:
        while not self.tiers.is_idle:
            self.tiers.wait(1.0)
            self.tiers.poll()

    def serve(self, name: str, tokens: Tokens, namespace: Namespace, num_output_tokens: int) -> int:
        """Serve a prompt; returns how many of its blocks were reused."""
        if self.tiers.request(name, tokens, namespace, len(tokens)) is TierLookup.HIT_PENDING:
            self._settle()
        hit = self.index.pin(self.index.lookup(tokens, namespace))
        missing = len(tokens) - hit.num_blocks
        self._make_room(missing)
        own = self.pool.allocate(missing, name)
        assert own is not None
        ids = self.index.block_ids(hit) + own.block_ids
        whole = self.index.insert(tokens, ids, namespace, pin=True).hit
        self.pool.hand_over(own, 0, missing, OWNER)
        self.pool.free(own)
        self.index.unpin(hit)
        use = Use(num_output_tokens, hit.num_blocks)
        self.tiers.offer(whole, use=use)
        self._settle()
        self.index.unpin(whole, use)
        return hit.num_blocks


def tiered_ratio(trace: BlockTrace, num_blocks: int, num_slots: int, policy: str) -> float:
    """Reused blocks over all blocks of prompts."""
    clock, hits = ManualClock(trace.requests[0].time_s), 0
    device = TieredDevice(num_blocks, num_slots, policy, clock)
    for number, request in enumerate(trace.requests):
        clock.advance(max(0.0, request.time_s - clock.now()))
        tokens = Tokens(request.ids.slice(0, num_blocks))
        hits += device.serve(f"r{number}", tokens, request.namespace, request.num_output_tokens)
    device.tiers.close()
    return hits / trace.num_blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--capacity", action="append", help="of the device; blocks, or a share of all")
    parser.add_argument("--policy", default="adaptive")
    parser.add_argument("--factor", type=int, default=10, help="slots of the tier for a block of the device")
    asked = parser.parse_args()
    trace = block_trace(read_trace(asked.trace))
    for text in asked.capacity or ["1%"]:
        size = capacity(text, trace.num_unique).num_blocks
        flats = {"device alone": 1, "flat pool": 1 + asked.factor, "flat pool of the tier": asked.factor}
        print(f"{trace.name}, {asked.policy}, device {size:,} blocks, tier {asked.factor * size:,}:")
        for name, factor in flats.items():
            plan = ReplaySweepPlan((asked.policy,), (str(factor * size),))
            print(f"  {name}: {run_case(trace, plan, plan.cases(trace)[0]).block_ratio:.2%}", flush=True)
        print(
            f"  device and tier: {tiered_ratio(trace, size, asked.factor * size, asked.policy):.2%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
