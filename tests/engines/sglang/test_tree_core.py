"""A guided TreeCore in SGLang's real prefix cache: LRU's hits, the books, and the way back."""

from __future__ import annotations

import logging
import random
from array import array
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

from benchmarks.hosts.sglang import Request, Serving, guided_cache, prefix_cache
from sagellm.core.clock import ManualClock
from sagellm.engines.build_kv import make_policy
from sagellm.engines.guests.settings import GuestSettings
from sagellm.engines.sglang.tree_core import GuidedTreeCore
from sagellm.kvmgr.eviction import LRUPolicy

pytestmark = pytest.mark.peer
SETTINGS = GuestSettings("on", report_s=0)


class World:
    """A cache of `num_tokens` with our policy or SGLang's own (None), and its requests."""

    def __init__(self, num_tokens: int, policy: str | None) -> None:
        self.clock = ManualClock(0.0)
        made = partial(make_policy, policy or "lru", capacity=num_tokens, clock=self.clock)
        if policy is None:
            self.cache = prefix_cache(num_tokens, "python", max_context=512)
        else:
            self.cache = guided_cache(num_tokens, SETTINGS, self.clock, made, max_context=512)
        self.serving, self.num_tokens = Serving(self.cache), num_tokens
        self.running: list[Request] = []
        self._num_requests = 0

    def begin(self, prompt: list[int], extra_key: str | None = None) -> Request | None:
        self.clock.advance(1.0)
        self._num_requests += 1
        req = Request(f"r{self._num_requests}", array("q", prompt), extra_key)
        if not self.serving.begin(req):
            return None
        self.running.append(req)
        return req

    def end(self, req: Request, *, finished: bool = True) -> None:
        self.clock.advance(1.0)
        self.running.remove(req)
        self.serving.end(req, finished=finished)

    def check(self) -> None:
        """SGLang's tree, our mirror and the pool agree."""
        cache, core = self.cache, self.cache.tree_core
        cache.sanity_check()
        own = sum(len(req.full_untruncated_fill_ids) - req.kv.cache_protected_len for req in self.running)
        in_tree = cache.evictable_size() + cache.protected_size()
        assert cache.token_to_kv_pool_allocator.available_size() + in_tree + own == self.num_tokens
        if isinstance(core, GuidedTreeCore):
            assert core.mirror is not None
            core.mirror.check()
            assert core.mirror.index.num_cached == in_tree
            assert core.mirror.num_evictable <= cache.evictable_size()
            assert core.num_unknown == 0


def workload(world: World, seed: int, steps: int = 500) -> list[int]:
    """Conversations with a system prompt, a few at a time; returns the hits of each request."""
    rng, hits = random.Random(seed), []
    sessions = [[7] * 12 + [100 + i] for i in range(12)]
    open_ones: dict[str, int] = {}
    for step in range(steps):
        if world.running and (len(world.running) == 3 or rng.random() < 0.4):
            req = rng.choice(world.running)
            index = open_ones.pop(req.rid)
            for _ in range(rng.randrange(1, 9)):
                token = rng.randrange(1000, 10**6)
                if not world.serving.decode(req, token):
                    break
                sessions[index].append(token)
            world.end(req)
            if len(sessions[index]) > 60:
                sessions[index] = [7] * 12 + [1000 + step]
        else:
            index = rng.choice([i for i in range(12) if i not in open_ones.values()])
            prompt = [*sessions[index], *(rng.randrange(1000, 10**6) for _ in range(rng.randrange(1, 9)))]
            began = world.begin(prompt)
            if began is not None:
                sessions[index] = prompt
                open_ones[began.rid] = index
                hits.append(began.num_found)
        if step % 10 == 0:
            world.check()
    for req in list(world.running):
        world.end(req)
    world.check()
    return hits


class PageByPage(UnifiedTreeCore):  # type: ignore[misc]
    """SGLang's own LRU, but only what is needed goes, and splitting a node is no use of it."""

    wanted_free = 0

    def _split_node(self, key: Any, child: Any, split_len: int) -> Any:
        used = child.last_access_time
        head, action = super()._split_node(key, child, split_len)
        head.last_access_time = child.last_access_time = used
        return head, action

    def evict_device_next_node(self, component_type: Any, tracker: Any) -> Any:
        result = super().evict_device_next_node(component_type, tracker)
        if result.node_id is not None:
            node = self.node_by_id(result.node_id)
            allocator = self.components_by_type[component_type].cache.token_to_kv_pool_allocator
            missing = self.wanted_free - allocator.available_size()
            if 0 < missing < len(node.key):
                self._split_node(node.key, node, len(node.key) - missing)
        return result


def page_by_page(num_tokens: int) -> World:
    world = World(num_tokens, None)
    core, evict = world.cache.tree_core, world.cache.evict_for_alloc
    core.__class__ = PageByPage

    def evict_for_alloc(params: EvictParams) -> Any:
        core.wanted_free = world.cache.token_to_kv_pool_allocator.available_size() + params.num_tokens
        return evict(params)

    world.cache.evict_for_alloc = evict_for_alloc
    return world


@pytest.mark.parametrize("num_tokens", [150, 300, 2000])
@pytest.mark.parametrize("seed", range(4))
def test_with_lru_every_hit_is_that_of_sglangs_order(num_tokens: int, seed: int) -> None:
    ours = workload(World(num_tokens, "lru"), seed)
    assert ours == workload(page_by_page(num_tokens), seed)
    assert sum(ours) > 0


@pytest.mark.parametrize("num_tokens", [150, 300, 2000])
def test_lru_by_pages_reuses_no_less_than_whole_leaves(num_tokens: int) -> None:
    """SGLang evicts whole leaves; we evict what is needed."""
    stock, ours = (sum(workload(World(num_tokens, policy), 0)) for policy in (None, "lru"))
    assert stock <= ours <= 1.1 * stock


@pytest.mark.parametrize("policy", ["adaptive", "s3fifo", "sieve"])
def test_every_policy_keeps_the_books(policy: str) -> None:
    world = World(200, policy)
    assert sum(workload(world, 1)) > 0
    assert world.cache.tree_core.mirror is not None


class CacheMachine(RuleBasedStateMachine):
    """Requests, preemptions, aborts, evictions for others, resets."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(40, "lru")

    @rule(family=st.integers(0, 3), length=st.integers(1, 30), tail=st.integers(0, 3), key=st.booleans())
    def begin(self, family: int, length: int, tail: int, key: bool) -> None:
        prompt = [1] * min(length, 6) + [family + 2] * max(0, length - 6) + [50 + i for i in range(tail)]
        if len(self.world.running) < 6:
            self.world.begin(prompt, "adapter" if key else None)

    @precondition(lambda self: self.world.running)
    @rule(number=st.integers(0, 9), token=st.integers(0, 2), count=st.integers(1, 6))
    def decode(self, number: int, token: int, count: int) -> None:
        req = self.world.running[number % len(self.world.running)]
        for _ in range(count):
            if not self.world.serving.decode(req, token):
                self.world.end(req, finished=False)
                return

    @precondition(lambda self: self.world.running)
    @rule(number=st.integers(0, 9), finished=st.booleans())
    def end(self, number: int, finished: bool) -> None:
        self.world.end(self.world.running[number % len(self.world.running)], finished=finished)

    @rule(num_tokens=st.integers(1, 50))
    def evict(self, num_tokens: int) -> None:
        """Without a target of free tokens, as for other pools."""
        before = self.world.cache.evictable_size()
        self.world.cache.evict(EvictParams(num_tokens=num_tokens))
        assert before - self.world.cache.evictable_size() == min(before, num_tokens)

    @rule(num_held=st.integers(1, 10))
    def lock_elsewhere(self, num_held: int) -> None:
        """A back-up locks a leaf for a while, and room is needed meanwhile."""
        cache = self.world.cache
        leaves = sorted(cache.tree_core.evictable_device_leaves, key=lambda node: node.id)
        if leaves:
            node_id = leaves[num_held % len(leaves)].id
            receipt = cache.inc_lock_ref(node_id).to_dec_params()
            cache.evict(EvictParams(num_tokens=num_held))
            cache.dec_lock_ref(node_id, receipt)

    @precondition(lambda self: not self.world.running)
    @rule()
    def reset(self) -> None:
        self.world.cache.reset()
        self.world.cache.token_to_kv_pool_allocator.clear()

    @invariant()
    def balanced(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        for req in list(self.world.running):
            self.world.end(req)
        self.world.cache.evict(EvictParams(num_tokens=40))
        assert self.world.cache.token_to_kv_pool_allocator.available_size() == 40


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_sglang_gets_its_own_order_back(caplog: pytest.LogCaptureFixture) -> None:
    """With a request running; what was cached is found afterwards, and can be evicted."""
    world = World(60, "adaptive")
    prompt = list(range(24))
    world.end(world.begin(prompt) or Request("", array("q")))
    other = world.begin([5] * 20)
    assert other is not None
    core = world.cache.tree_core
    with caplog.at_level(logging.WARNING, "sagellm.sglang"):
        core.give_back("a test says so")
        core.give_back("again")
    assert [record.getMessage() for record in caplog.records] == [
        "sageLLM: SGLang evicts in its own order from now on: a test says so"
    ]
    again = world.begin(prompt)
    assert again is not None
    assert again.num_found == 24
    for req in (again, other):
        world.end(req)
    world.cache.evict(EvictParams(num_tokens=60))
    assert world.cache.token_to_kv_pool_allocator.available_size() == 60


def test_an_error_of_the_policy_gives_the_order_back(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(LRUPolicy):
        def evict(self, num_blocks: int, give_up: Any) -> int:
            raise RuntimeError("no idea")

    world = World(30, None)
    world.cache = guided_cache(30, SETTINGS, world.clock, Broken, max_context=512)
    world.serving = Serving(world.cache)
    for family in range(4):
        world.end(world.begin([family] * 12) or Request("", array("q")))
    assert world.cache.tree_core.mirror is None
    assert "RuntimeError: no idea" in caplog.text
    world.cache.sanity_check()
    assert world.cache.token_to_kv_pool_allocator.available_size() + world.cache.evictable_size() == 30


def test_what_has_a_copy_in_host_memory_is_demoted_and_comes_back() -> None:
    """HiCache's calls on the tree, with host values set by hand: there is no device to copy from."""
    world = World(40, "lru")
    cache, core = world.cache, world.cache.tree_core
    prompts = [[family] * 18 for family in (1, 2)]
    for prompt in prompts:
        world.end(world.begin(prompt) or Request("", array("q")))
    core.set_hicache_enabled()
    for node in [core.node_by_id(node_id) for node_id in list(core._node_arena)][1:]:
        full = node.component_data[ComponentType.FULL]
        full.host_value = full.value.clone()
        core._update_duplicate_tracking(node)
    cache.evict(EvictParams(num_tokens=7))
    cache.evict(EvictParams(num_tokens=13))
    world.check()
    found = cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", prompts[0]))))
    assert (found.device_prefix_len, found.host_hit_length) == (0, 18)
    found = cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", prompts[1]))))
    assert (found.device_prefix_len, found.host_hit_length) == (16, 2)
    node_id = found.best_match_node
    transfer, others = core.build_load_back_spec(node_id)
    slots = cache.token_to_kv_pool_allocator.alloc(len(transfer.host_indices))
    core.commit_load_back(node_id, slots, transfer, others)
    lock = cache.lock(node_id)
    core.finish_load_back(node_id)
    world.check()
    assert core.mirror.num_evictable == 0
    cache.evict(EvictParams(num_tokens=40))
    assert cache.protected_size() == 18
    cache.unlock(lock)
    world.check()
    cache.evict(EvictParams(num_tokens=40))
    assert cache.token_to_kv_pool_allocator.available_size() == 40
