"""Our policies in vLLM's real manager of host memory. Its workers need a GPU; its manager does not."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from sagellm.engines.vllm import cpu_tier

pytestmark = pytest.mark.peer


class Tier:
    """Requests on a `CPUOffloadingManager`, each with the keys of its blocks."""

    def __init__(self, num_chunks: int, policy: str, module: str | None = cpu_tier.__name__) -> None:
        self.manager = CPUOffloadingManager(num_chunks, policy, module)
        self.running: dict[int, tuple[list[bytes], ReqContext]] = {}
        self._count = Counter[str]()

    def begin(self, name: int, blocks: list[int], *, fails: bool = False) -> int:
        """Load what is here, store the rest; returns the leading blocks that were here."""
        context = ReqContext(f"r{name}")
        keys = [make_offload_key(block.to_bytes(32, "little"), 0) for block in blocks]
        for position, key in enumerate(keys):
            context.set_offload_key_position(key, 16 * (position + 1))
        self.manager.on_new_request(context)
        hits = 0
        while hits < len(keys) and self.manager.lookup(keys[hits], context) is LookupResult.HIT:
            hits += 1
        if hits:
            self.manager.prepare_load(keys[:hits], context)
            self.manager.complete_load(keys[:hits], context)
        prepared = self.manager.prepare_store(keys, context)
        if prepared is not None:
            self.manager.complete_store(prepared.keys_to_store, context, success=not fails)
        self.running[name] = keys, context
        self.check()
        return hits

    def end(self, name: int) -> None:
        self.manager.on_request_finished(self.running.pop(name)[1])
        self.check()

    def check(self) -> None:
        policy = self.manager._policy
        if isinstance(policy, cpu_tier.SageCachePolicy):
            policy.check()
            assert len(policy._chunks) <= self.manager._num_chunks


def served(tier: Tier, seed: int, num_requests: int = 300) -> list[int]:
    """Conversations, one request at a time."""
    rng, hits = random.Random(seed), []
    paths = [[1, 2, 3, 100 * i + 10] for i in range(8)]
    for number in range(num_requests):
        path = paths[rng.choice((number % 8, number // 8 % 8))]
        path += [1000 * (number + 1) + i for i in range(rng.randrange(1, 5))]
        if len(path) > 40:
            path[:] = [1, 2, 3, 1000 * (number + 1)]
        hits.append(tier.begin(number, path))
        tier.end(number)
    return hits


@pytest.mark.parametrize("seed", range(3))
def test_with_lru_the_hits_are_those_of_vllm(seed: int) -> None:
    ours, stock = served(Tier(70, "LRUCachePolicy"), seed), served(Tier(70, "lru", None), seed)
    assert ours == stock
    assert sum(ours) > 0


@pytest.mark.parametrize("policy", ["AdaptiveCachePolicy", "S3FIFOCachePolicy"])
def test_other_policies_keep_the_books(policy: str) -> None:
    assert sum(served(Tier(70, policy), 0)) > 0


STEPS = st.tuples(st.integers(0, 4), st.integers(1, 12), st.booleans())


@settings(max_examples=200)
@given(st.lists(STEPS, max_size=40))
def test_requests_at_the_same_time(steps: list[tuple[int, int, bool]]) -> None:
    tier = Tier(15, "LRUCachePolicy")
    for name, length, fails in steps:
        if name in tier.running:
            tier.end(name)
        else:
            tier.begin(name, [i if i < 3 else 10 * (name % 3) + i for i in range(length)], fails=fails)
    tier.manager.reset_cache()
    tier.check()


def test_what_is_read_does_not_go() -> None:
    tier = Tier(6, "LRUCachePolicy")
    tier.begin(0, [1, 2, 3])
    tier.end(0)
    context = ReqContext("reader")
    keys = [make_offload_key(block.to_bytes(32, "little"), 0) for block in (1, 2, 3)]
    tier.manager.prepare_load(keys, context)
    tier.begin(1, [11, 12, 13])
    tier.end(1)
    assert tier.begin(2, [21, 22, 23]) == 0
    assert [tier.manager.lookup(key, context) for key in keys] == [LookupResult.HIT] * 3
    tier.manager.complete_load(keys, context)
    tier.check()
