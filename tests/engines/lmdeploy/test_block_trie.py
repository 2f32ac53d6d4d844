"""`GuidedTrie` in LMDeploy's real scheduler: with LRU the order of its repaired clock, and nothing lost."""

from __future__ import annotations

import os
import random
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from lmdeploy.pytorch.messages import MessageStatus

from sagellm.core.clock import ManualClock
from sagellm.engines.lmdeploy.block_trie import GuidedTrie
from sagellm.kvmgr.eviction import LRUPolicy
from tests.engines.lmdeploy.drivers import SIZE, Driver, nodes

pytestmark = pytest.mark.peer


def workload(driver: Driver, seed: int, steps: int = 400) -> list[int]:
    """Conversations with a system prompt, a few at a time; returns the hits of each request."""
    rng, open_ones = random.Random(seed), dict[int, int]()
    sessions = [[7] * (SIZE * 3) + [100 + i] * SIZE for i in range(12)]
    for step in range(steps):
        if len(open_ones) == 3 or (open_ones and rng.random() < 0.4):
            number = rng.choice(sorted(open_ones))
            for _ in range(rng.randrange(1, 9)):
                driver.prefill(rng.randrange(1000, 10**6))
                driver.decode(rng.randrange(1000, 10**6))
            index, sequence = open_ones.pop(number), driver.sequences[number]
            sessions[index] = sequence.all_ids.tolist()
            driver.stop(number)
            driver.end(number)
            if len(sessions[index]) > 60:
                sessions[index] = [7] * (SIZE * 3) + [step] * SIZE
        else:
            index = rng.choice([i for i in range(12) if i not in open_ones.values()])
            tail = [rng.randrange(1000, 10**6) for _ in range(rng.randrange(1, 9))]
            open_ones[driver.add([*sessions[index], *tail])] = index
    return [driver.hits.get(number, 0) for number in range(1, driver._num_requests + 1)]


@pytest.mark.parametrize("num_blocks", [55, 80, 200])
@pytest.mark.parametrize("seed", range(4))
def test_with_lru_every_hit_is_that_of_the_repaired_clock(num_blocks: int, seed: int) -> None:
    own, ours = (workload(Driver(num_blocks, policy), seed) for policy in (None, "lru"))
    assert ours == own
    assert sum(ours) > 0


@pytest.mark.parametrize("policy", ["adaptive", "s3fifo", "sieve"])
def test_every_policy_keeps_the_books(policy: str) -> None:
    driver = Driver(60, policy)
    assert sum(workload(driver, 1)) > 0
    assert driver.guided is not None
    assert driver.guided.is_guided


def test_without_a_plug_in_nothing_is_touched() -> None:
    driver = Driver(60, None, repaired=False)
    assert driver.trie.allocator._log_mem.access_time.dtype == np.int64
    assert not {"match", "allocate", "evict"} & vars(driver.trie).keys()


def test_this_is_a_patched_one_where_the_caller_says_so() -> None:
    assert hasattr(Driver(10, None).trie, "hooks") == bool(os.environ.get("REQUIRE_PATCHED"))


def test_evictions_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    """With the policy; with our patches also after `give_back`. A callback that fails is dropped."""
    driver, gone = Driver(40, "lru"), list[int]()
    assert driver.guided is not None

    def fails(blocks: list[int]) -> None:
        raise KeyError("mine")

    driver.guided.register_eviction_callback(fails)
    driver.guided.register_eviction_callback(gone.extend)
    finished(driver, [1] * (4 * SIZE) + [2])
    blocks = {node.block for node in nodes(driver.trie)}
    assert driver.trie.evict(2) == 2
    assert len(gone) == 2
    driver.guided.give_back("a test says so")
    assert driver.trie.evict(9) == 2
    assert set(gone) == blocks if driver.guided.is_patched else len(gone) == 2
    assert caplog.text.count("callback of evictions is left out") == 1


def test_uses_in_the_same_second_are_told_apart() -> None:
    """Eighty prompts fill the cache, eight more evict: the first eight go."""
    driver = Driver(161, None)
    for family in range(88):
        driver.add([family] * (2 * SIZE) + [1000])
        driver.prefill(5)
        driver.decode(6)
        driver.end(family + 1)
    assert {int(node.tokens[0]) for node in nodes(driver.trie)} == set(range(8, 88))


class TrieMachine(RuleBasedStateMachine):
    """Requests of two adapters, sessions that stop, go on and end, and too little memory for all."""

    def __init__(self) -> None:
        super().__init__()
        self.driver, self.token = Driver(30, "lru"), 1000

    def next_token(self) -> int:
        self.token += 1
        return self.token

    def one_of(self, number: int) -> int:
        return sorted(self.driver.sequences)[number % len(self.driver.sequences)]

    @rule(family=st.integers(0, 3), length=st.integers(1, 40), tail=st.integers(0, 3), other=st.booleans())
    def add(self, family: int, length: int, tail: int, other: bool) -> None:
        prompt = [1] * min(length, 8) + [family + 2] * max(0, length - 8) + [50 + i for i in range(tail)]
        self.driver.add(prompt, "other" if other else None)

    @rule()
    def prefill(self) -> None:
        self.driver.prefill(self.next_token())

    @rule(count=st.integers(1, 6))
    def decode(self, count: int) -> None:
        for _ in range(count):
            self.driver.decode(self.next_token())

    @precondition(lambda self: self.driver.sequences)
    @rule(number=st.integers(0, 9))
    def stop(self, number: int) -> None:
        self.driver.stop(self.one_of(number))

    @precondition(lambda self: self.driver.sequences)
    @rule(number=st.integers(0, 9), count=st.integers(1, 9))
    def resume(self, number: int, count: int) -> None:
        chosen = self.one_of(number)
        if self.driver.status(chosen) == "STOPPED":
            self.driver.resume(chosen, [self.next_token() for _ in range(count)])

    @precondition(lambda self: self.driver.sequences)
    @rule(number=st.integers(0, 9))
    def end(self, number: int) -> None:
        self.driver.end(self.one_of(number))

    @invariant()
    def balanced(self) -> None:
        self.driver.check()
        assert self.driver.guided is not None
        assert self.driver.guided.is_guided

    def teardown(self) -> None:
        for number in list(self.driver.sequences):
            self.driver.end(number)
        num_cached = len(nodes(self.driver.trie))
        assert self.driver.trie.evict(100) == num_cached
        assert self.driver.scheduler.block_manager.get_num_free_gpu_blocks() == 30


TestTrieMachine = TrieMachine.TestCase
TestTrieMachine.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def finished(driver: Driver, prompt: list[int]) -> int:
    """Serve a request alone; returns its hits."""
    number = driver.add(prompt)
    assert driver.prefill(10**6) == [number]
    driver.decode(10**6 + 1)
    driver.end(number)
    return driver.hits[number]


def test_the_trie_gets_its_own_order_back(caplog: pytest.LogCaptureFixture) -> None:
    """With a request running and blocks cached; what was cached is found afterwards."""
    driver = Driver(40, "adaptive")
    prompt = list(range(25))
    finished(driver, prompt)
    other = driver.add([5] * 20)
    driver.prefill(6)
    assert driver.guided is not None
    driver.guided.give_back("a test says so")
    driver.guided.give_back("again")
    assert [record.getMessage() for record in caplog.records] == [
        "sageLLM: LMDeploy evicts in its own order from now on: a test says so"
    ]
    assert not {"match", "allocate", "evict"} & vars(driver.trie).keys()
    assert finished(driver, prompt) == 6
    driver.end(other)
    assert driver.trie.evict(100) == 6 + 5
    assert driver.scheduler.block_manager.get_num_free_gpu_blocks() == 40


def test_an_error_of_the_policy_gives_the_order_back(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(LRUPolicy):
        def evict(self, num_blocks: int, give_up: Any) -> int:
            raise RuntimeError("no idea")

    driver = Driver(10, None)
    guided = GuidedTrie(driver.trie, Broken, ManualClock(0.0))
    for family in range(3):
        finished(driver, [family] * 4 * SIZE)
    assert not guided.is_guided
    assert "RuntimeError: no idea" in caplog.text


def test_a_reference_that_we_do_not_know(caplog: pytest.LogCaptureFixture) -> None:
    """Another part of LMDeploy holds a cached block: its own order, which respects that, comes back."""
    driver = Driver(10, "lru")
    finished(driver, [1] * 4 * SIZE)
    first = nodes(driver.trie)[-1]
    driver.trie.allocator.add_ref_count(np.array([first.block]), 1)
    assert driver.trie.evict(4) == 0
    assert "something refers to blocks" in caplog.text
    driver.trie.allocator.add_ref_count(np.array([first.block]), -1)
    assert driver.trie.evict(4) == 4


def test_a_migration_finds_nothing_and_does_not_fail() -> None:
    """`_schedule_migration` passes a list where `match` takes a sequence."""
    cases: list[Any] = [(None, pytest.raises(AttributeError)), ("lru", nullcontext())]
    for policy, expected in cases:
        driver = Driver(20, policy)
        number = driver.add([1] * 4 * SIZE)
        driver.sequences[number].status = MessageStatus.WAITING_MIGRATION
        with expected:
            assert driver.scheduler._schedule_migration() == [driver.sequences[number]]


def test_a_name_that_has_moved_changes_nothing() -> None:
    driver = Driver(10, None)
    del driver.trie.leaves
    with pytest.raises(AttributeError, match="BlockTrie of this LMDeploy has no leaves"):
        GuidedTrie(driver.trie, LRUPolicy, ManualClock(0.0))
    assert "match" not in vars(driver.trie)


def test_a_trie_in_use_or_switched_off_is_refused() -> None:
    driver = Driver(10, None)
    finished(driver, [1] * 4 * SIZE)
    with pytest.raises(ValueError, match="before the first request"):
        GuidedTrie(driver.trie, LRUPolicy, ManualClock(0.0))
    driver.trie.enable = False
    with pytest.raises(ValueError, match="enable_prefix_caching"):
        GuidedTrie(driver.trie, LRUPolicy, ManualClock(0.0))
