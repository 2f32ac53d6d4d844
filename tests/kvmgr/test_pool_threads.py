"""Pools under four threads at once, each with allocations of its own, and the counters of the pools."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.kv_pool import Allocation, KVPool
from sagellm.core.registry import registry
from sagellm.core.types import Account, BlockIds
from sagellm.kvmgr.kv_pool import BuddyPool, FreeListPool, QuotaManager, Share

TOTAL = 256
POOLS = registry("pool").names()


@pytest.fixture(autouse=True)
def _frequent_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Worker:
    """Random operations; what it owns is its own."""

    def __init__(self, pool: KVPool, number: int, num_operations: int) -> None:
        self.pool = pool
        self.rng = random.Random(number)
        self.account = Account(f"tenant {number}")
        self.holder = f"holder {number}"
        self.num_operations = num_operations
        self.live: list[Allocation] = []
        self.held: list[BlockIds] = []

    def run(self) -> None:
        for _ in range(self.num_operations):
            self.step()

    def step(self) -> None:
        choice = self.rng.random()
        if choice < 0.25 or not self.live:
            allocation = self.pool.allocate(self.rng.randint(0, 12), self.account.tenant, self.account)
            if allocation is not None:
                self.live.append(allocation)
        elif choice < 0.5:
            self.pool.append_blocks(self.rng.choice(self.live), self.rng.randint(0, 3))
        elif choice < 0.6:
            allocation = self.rng.choice(self.live)
            self.pool.shrink(allocation, self.rng.randint(0, len(allocation.block_ids)))
        elif choice < 0.7:
            allocation = self.rng.choice(self.live)
            stop = self.rng.randint(0, len(allocation.block_ids))
            self.held.append(self.pool.hand_over(allocation, 0, stop, self.holder))
        elif choice < 0.85 and self.held:
            self.pool.take_back(self.holder, self.held.pop(), self.account)
        else:
            self.free_one(by_ids=choice > 0.99)

    def free_one(self, *, by_ids: bool) -> None:
        allocation = self.live.pop(self.rng.randrange(len(self.live)))
        if by_ids and allocation.block_ids:
            self.pool.free(allocation.block_ids.tolist())
        else:
            self.pool.free(allocation)

    def finish(self) -> None:
        while self.live:
            self.free_one(by_ids=False)
        while self.held:
            self.pool.take_back(self.holder, self.held.pop(), self.account)


def run_four(pool: KVPool, quota: QuotaManager, num_operations: int) -> None:
    workers = [Worker(pool, number, num_operations) for number in range(4)]
    with ThreadPoolExecutor(max_workers=4) as executor:
        running = [executor.submit(worker.run) for worker in workers]
        while wait(running, timeout=0.02).not_done:
            pool.check()
            assert 0 <= pool.get_fragmentation() < 1
            assert 0 <= pool.num_free <= TOTAL
    for future in running:
        future.result()
    held = {worker.holder: [block for ids in worker.held for block in ids] for worker in workers}
    pool.check(held)
    quota.check()
    for worker in workers:
        mine = sum(len(one.block_ids) for one in worker.live) + len(held[worker.holder])
        assert quota.used(worker.account) == mine
        worker.finish()
    pool.check({})
    assert pool.num_free == TOTAL
    assert pool.get_fragmentation() == 0


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize(
    "num_operations", [5_000, pytest.param(100_000, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_four_threads_leave_the_books_balanced(name: str, num_operations: int) -> None:
    quota = QuotaManager(TOTAL, {"tenant 0": Share(20, 90)})
    pool: KVPool = registry("pool").create(name, total_blocks=TOTAL, block_size=4, quota=quota)
    run_four(pool, quota, num_operations)


@pytest.mark.parametrize("name", POOLS)
def test_of_two_threads_that_free_the_same_one_gets_an_error(name: str) -> None:
    pool: KVPool = registry("pool").create(name, total_blocks=TOTAL, block_size=4)
    barrier = threading.Barrier(2)

    def free(allocation: Allocation) -> None:
        barrier.wait()
        pool.free(allocation)

    with ThreadPoolExecutor(max_workers=2) as executor:
        for _ in range(200):
            allocation = pool.allocate(3, "shared")
            assert allocation is not None
            errors = [executor.submit(free, allocation) for _ in range(2)]
            told = [str(one.exception()) for one in errors if one.exception() is not None]
            assert len(told) == 1
            assert "double free" in told[0]
            assert pool.num_free == TOTAL


@pytest.mark.parametrize("make", [FreeListPool, BuddyPool])
def test_counters(make: type[FreeListPool] | type[BuddyPool]) -> None:
    pool = make(16)
    allocation = pool.allocate(6, "a")
    assert allocation is not None
    pool.append_blocks(allocation, 4)
    assert pool.allocate(7, "b") is None
    pool.shrink(allocation, 3)
    pool.allocate(1, "c")
    pool.take_back("index", pool.hand_over(allocation, 0, 2, "index"))
    counts = (pool.num_allocated_total, pool.num_freed_total, pool.peak_used, pool.num_refused)
    assert counts == (11, 5, 10, 1)


def test_a_buddy_pool_keeps_allocations_contiguous() -> None:
    pool = BuddyPool(24)  # runs of 16 and 8
    small, large, odd = pool.allocate(2, "a"), pool.allocate(16, "b"), pool.allocate(3, "c")
    assert small is not None
    assert large is not None
    assert odd is not None
    assert small.block_ids.tolist() == [16, 17]
    assert large.block_ids.tolist() == list(range(16))
    assert odd.block_ids.tolist() == [20, 21, 22]
    scattered = pool.allocate(3, "d")
    assert scattered is not None
    assert scattered.block_ids.tolist() == [18, 19, 23]  # the largest run first
    for allocation in (large, odd, small, scattered):
        pool.free(allocation)
    joined = pool.allocate(24, "e")
    assert joined is not None
    assert joined.block_ids.tolist() == list(range(24))


def test_a_buddy_pool_refuses_blocks_that_cannot_be_given_back() -> None:
    pool = BuddyPool(24)
    allocation = pool.allocate(4, "a")
    assert allocation is not None
    ids = pool.hand_over(allocation, 0, 4, "index")
    for wrong, text in (([ids[0], ids[0]], "twice"), ([ids[0], 24], "no block 24"), ([-1], "no block -1")):
        ids_given = ids[:0]
        ids_given.extend(wrong)
        with pytest.raises(BookkeepingError, match=text):
            pool.take_back("index", ids_given)
        pool.check({"index": ids})
