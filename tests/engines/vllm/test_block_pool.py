"""`GuidedPool` on vLLM's real pool: the stock order with LRU, and nothing lost with any policy."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sagellm.core.clock import ManualClock
from sagellm.engines.vllm.block_pool import GuidedPool
from sagellm.kvmgr.eviction import LRUPolicy
from tests.engines.vllm.drivers import SIZE, Manager

pytestmark = pytest.mark.peer


def workload(manager: Manager, seed: int, steps: int = 600) -> list[int]:
    """Conversations with a system prompt, a few at a time; returns the hits of each request."""
    rng, hits = random.Random(seed), []
    sessions = [[7] * (SIZE * 3) + [100 + i] * SIZE for i in range(12)]
    open_ones: dict[str, int] = {}
    for step in range(steps):
        if open_ones and (len(open_ones) == 3 or rng.random() < 0.4):
            name = rng.choice(sorted(open_ones))
            index = open_ones.pop(name)
            for _ in range(rng.randrange(1, 9)):
                token = rng.randrange(1000, 10**6)
                if not manager.decode(name, token):
                    break
                sessions[index].append(token)
            manager.end(name, preempted=rng.random() < 0.1)
            if len(sessions[index]) > 60:
                sessions[index] = [7] * (SIZE * 3) + [step] * SIZE
        else:
            index = rng.choice([i for i in range(12) if i not in open_ones.values()])
            prompt = [*sessions[index], *(rng.randrange(1000, 10**6) for _ in range(rng.randrange(1, 9)))]
            began = manager.begin(prompt)
            if began is not None:
                sessions[index] = prompt
                open_ones[began] = index
                hits.append(manager.running[began].num_hits)
    for name in open_ones:
        manager.end(name)
    return hits


@pytest.mark.parametrize("num_blocks", [40, 70, 200])
@pytest.mark.parametrize("seed", range(4))
def test_with_lru_every_hit_is_that_of_vllm(num_blocks: int, seed: int) -> None:
    stock, ours = (workload(Manager(num_blocks, policy), seed) for policy in (None, "lru"))
    assert ours == stock
    assert sum(ours) > 0


@pytest.mark.parametrize("policy", ["adaptive", "s3fifo", "sieve"])
def test_every_policy_keeps_the_books(policy: str) -> None:
    manager = Manager(60, policy)
    assert sum(workload(manager, 1)) > 0
    assert manager.guided is not None
    assert manager.guided.is_guided
    assert manager.guided.queue.num_restarts == 0


class PoolMachine(RuleBasedStateMachine):
    """Requests, preemptions, resets, and other connectors that touch and free blocks as they like."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = Manager(30, "lru")
        self.touched: list[list[Any]] = []

    @rule(family=st.integers(0, 3), length=st.integers(1, 40), tail=st.integers(0, 3))
    def begin(self, family: int, length: int, tail: int) -> None:
        prompt = [1] * min(length, 8) + [family + 2] * max(0, length - 8) + [50 + i for i in range(tail)]
        self.manager.begin(prompt)

    @precondition(lambda self: self.manager.running)
    @rule(number=st.integers(0, 9), token=st.integers(0, 2), count=st.integers(1, 6))
    def decode(self, number: int, token: int, count: int) -> None:
        for _ in range(count):
            name = sorted(self.manager.running)[number % len(self.manager.running)]
            if not self.manager.decode(name, token):
                self.manager.end(name, preempted=True)
                return

    @precondition(lambda self: self.manager.running)
    @rule(number=st.integers(0, 9), preempted=st.booleans())
    def end(self, number: int, preempted: bool) -> None:
        name = sorted(self.manager.running)[number % len(self.manager.running)]
        self.manager.end(name, preempted=preempted)

    @rule(first=st.integers(0, 30), count=st.integers(1, 5))
    def touch_elsewhere(self, first: int, count: int) -> None:
        """Another connector reads cached blocks, from the start of a prompt or from its middle."""
        pool = self.manager.pool
        cached = [block for block in pool.blocks if block.block_hash is not None][first : first + count]
        if cached:
            pool.touch(cached)
            self.touched.append(cached)

    @precondition(lambda self: self.touched)
    @rule(number=st.integers(0, 9))
    def free_elsewhere(self, number: int) -> None:
        self.manager.pool.free_blocks(reversed(self.touched.pop(number % len(self.touched))))

    @rule(block=st.integers(1, 29))
    def lose_a_hash(self, block: int) -> None:
        """A connector reports a block whose KV could not be loaded."""
        self.manager.pool.evict_blocks({block})

    @rule()
    def reset(self) -> None:
        assert self.manager.pool.reset_prefix_cache() == (not self.manager.running and not self.touched)

    @invariant()
    def balanced(self) -> None:
        self.manager.check()
        assert self.manager.guided is not None
        assert self.manager.guided.is_guided

    def teardown(self) -> None:
        while self.touched:
            self.free_elsewhere(0)
        for name in list(self.manager.running):
            self.manager.end(name)
        assert self.manager.pool.get_num_free_blocks() == 30
        assert len(self.manager.pool.get_new_blocks(30)) == 30


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=150, stateful_step_count=60)


def test_the_pool_gets_its_own_queue_back(caplog: pytest.LogCaptureFixture) -> None:
    """With requests running, with cached blocks free; what was cached is found afterwards."""
    manager = Manager(40, "adaptive")
    prompt = list(range(24))
    manager.end(manager.begin(prompt) or "")
    other = manager.begin([5] * 20) or ""
    assert manager.guided is not None
    with caplog.at_level(logging.WARNING, "vllm.sagellm"):
        manager.guided.give_back("a test says so")
        manager.guided.give_back("again")
    assert [record.getMessage() for record in caplog.records] == [
        "sageLLM: vLLM evicts in its own order from now on: a test says so"
    ]
    assert type(manager.pool.free_block_queue).__name__ == "FreeKVCacheBlockQueue"
    again = manager.begin(prompt) or ""
    assert manager.running[again].num_hits == 5
    for name in (again, other):
        manager.end(name)
    assert len(manager.pool.get_new_blocks(40)) == 40


def test_an_error_of_the_policy_gives_the_queue_back(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(LRUPolicy):
        def evict(self, num_blocks: int, give_up: Any) -> int:
            raise RuntimeError("no idea")

    manager = Manager(10, None)
    guided = GuidedPool(manager.pool, Broken, ManualClock(0.0))
    for family in range(3):
        manager.end(manager.begin([family] * 4 * SIZE) or "")
    assert not guided.is_guided
    assert "RuntimeError: no idea" in caplog.text
    assert manager.pool.get_num_free_blocks() == 10


def test_a_reader_of_the_queue_that_we_do_not_know(caplog: pytest.LogCaptureFixture) -> None:
    """VLLM's lazy offloading walks along the queue's links."""
    manager = Manager(10, "lru")
    manager.end(manager.begin([1] * 4 * SIZE) or "")
    assert manager.pool.free_block_queue.fake_free_list_head.next_free_block is not None
    assert manager.guided is not None
    assert not manager.guided.is_guided
    assert "fake_free_list_head" in caplog.text
    assert len(manager.pool.get_new_blocks(10)) == 10


def test_a_name_that_has_moved_changes_nothing() -> None:
    manager = Manager(10, None)
    queue = manager.pool.free_block_queue
    del manager.pool.hash_block_size
    with pytest.raises(AttributeError, match="BlockPool of this vLLM has no hash_block_size"):
        GuidedPool(manager.pool, LRUPolicy, ManualClock(0.0))
    assert manager.pool.free_block_queue is queue
    assert "touch" not in vars(manager.pool)
