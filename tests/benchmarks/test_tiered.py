"""`TieredDevice`: its hits are those of a device and its tier, and its books agree."""

from __future__ import annotations

import random
from pathlib import Path

from sagellm.benchmarks.replay.block_trace import block_trace
from sagellm.benchmarks.tiered import ServedPrompt, TieredDevice, replay_tiered
from sagellm.benchmarks.traces import read_trace
from sagellm.core.types import Namespace, Tokens
from sagellm.kvmgr.eviction import LRUPolicy
from sagellm.kvmgr.kv_pool.free_list import FreeListPool
from sagellm.kvmgr.prefix_cache.radix import RadixIndex

CHAT = Path(__file__).parent.parent / "golden" / "traces" / "chat.jsonl"


def made(num_blocks: int, num_slots: int) -> TieredDevice:
    def index_of(_: int) -> RadixIndex:
        return RadixIndex(1, policy=LRUPolicy())

    return TieredDevice(num_blocks, num_slots, index_of, lambda size: FreeListPool(size, 1))


def prompt(number: int, num_blocks: int = 4) -> Tokens:
    return Tokens([number] * num_blocks)


def test_what_the_device_evicts_comes_from_the_tier() -> None:
    device = made(6, 12)
    served = [device.serve(str(i), prompt(n), Namespace(), 1) for i, n in enumerate((1, 1, 2, 1))]
    assert served == [
        ServedPrompt(0, 0, 4),
        ServedPrompt(4, 0, 4),
        ServedPrompt(0, 0, 4),
        ServedPrompt(2, 2, 4),
    ]
    device.close()


def test_without_slots_nothing_comes_back() -> None:
    device = made(4, 0)
    served = [device.serve(str(i), prompt(n), Namespace(), 1) for i, n in enumerate((1, 2, 1))]
    assert [each.num_on_device + each.num_loaded for each in served] == [0, 0, 0]
    device.close()


def test_the_books_agree_after_many_prompts() -> None:
    device, rng = made(16, 40), random.Random(0)
    for number in range(200):
        tokens = Tokens([rng.randrange(3) for _ in range(rng.randrange(1, 12))])
        served = device.serve(str(number), tokens, Namespace(), 1)
        assert served.num_on_device + served.num_loaded <= served.num_blocks == len(tokens)
        device.tiers.check()
        device.index.check()
        device.pool.check({"prefix index": device.index.all_block_ids()})
    device.evict_all()
    assert device.pool.num_free == 16
    device.close()


def test_a_larger_tier_hits_more_of_a_trace() -> None:
    trace = block_trace(read_trace(CHAT))
    size = trace.longest
    hits = [
        sum(
            each.num_on_device + each.num_loaded
            for each in replay_tiered(trace, size, slots * size, "lru").served
        )
        for slots in (0, 2, 20)
    ]
    assert hits[0] < hits[1] < hits[2] <= sum(trace.bound)
