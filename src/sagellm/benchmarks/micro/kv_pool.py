"""`sagellm bench micro kv_pool`: allocate, append and free, with and without a quota. Evict and allocate. Its
only section is d. The pool's lock and counters are on in every row: they have no switch."""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import NamedTuple

from sagellm.benchmarks.micro._kv import OWNER, PROMPT_BLOCKS, Prompts, pool_and_index
from sagellm.benchmarks.micro.cases import (
    BLOCK_SIZE,
    MicroBenchCell,
    MicroBenchmark,
    Recipe,
    TimedOperation,
    timed,
)
from sagellm.core.blocks import cdiv
from sagellm.core.errors import CapacityError
from sagellm.core.protocols.kv_pool import Allocation, KVPool
from sagellm.core.registry import registry
from sagellm.core.types import NO_ACCOUNT, Account
from sagellm.kvmgr.kv_pool.quota import QuotaManager, Share

ALLOCATE = "allocate"
FREE = "free"
GROW = "grow by 1"
EVICT = "evict + allocate"
EVICT_LARGE = "evict + allocate, large pool"
WITH_QUOTA = ", with quota"

_MORE_BLOCKS = 1024
_PAYER = Account("tenant", "class")


class _HalfFullPool(NamedTuple):
    """A half-full pool, and the account that pays."""

    pool: KVPool
    account: Account

    def allocate(self, num_blocks: int) -> Allocation:
        allocation = self.pool.allocate(num_blocks, OWNER, self.account)
        if allocation is None:
            raise CapacityError(f"the pool has {self.pool.num_free} free blocks, not {num_blocks}")
        return allocation


def _half_full(cell: MicroBenchCell, calls: int, *, quota: bool) -> _HalfFullPool:
    total = 4 * cell.size * calls
    share = Share(total // 2, total)  # quotas in both dimensions, with ceilings that are never reached
    manager = QuotaManager(total, {_PAYER.tenant: share}, {_PAYER.service_class: share})
    pool = registry("pool").create(
        cell.variant,
        total_blocks=total,
        block_size=BLOCK_SIZE,
        quota=manager if quota else None,
    )
    half_full = _HalfFullPool(pool, _PAYER if quota else NO_ACCOUNT)
    half_full.allocate(total // 2)
    return half_full


def _allocate(cell: MicroBenchCell, calls: int, *, quota: bool) -> TimedOperation:
    (pool, account), size = _half_full(cell, calls, quota=quota), cell.size
    return TimedOperation(
        run=lambda _: pool.allocate(size, OWNER, account),
        teardown=lambda _, allocation: pool.free(allocation),
    )


def _free(cell: MicroBenchCell, calls: int, *, quota: bool) -> TimedOperation:
    half_full = _half_full(cell, calls, quota=quota)
    return TimedOperation(run=half_full.pool.free, setup=lambda: half_full.allocate(cell.size))


def _grow(cell: MicroBenchCell, calls: int, *, quota: bool) -> TimedOperation:
    """Appends one block to `size` blocks, as decoding does at a block boundary."""
    half_full = _half_full(cell, calls, quota=quota)
    pool, allocation = half_full.pool, half_full.allocate(cell.size)
    return TimedOperation(
        run=lambda _: pool.append_blocks(allocation, 1), teardown=lambda *_: pool.shrink(allocation, 1)
    )


def _evict_and_allocate(cell: MicroBenchCell, calls: int, *, large: bool) -> TimedOperation:
    """Each sample starts with fewer free blocks than a prompt has."""
    num_blocks = 2 * cell.size * calls + _MORE_BLOCKS
    if large:
        num_blocks = max(cell.plan.large_pool, cell.size * calls)
    prompts = Prompts(cell.plan.seed)
    kv = pool_and_index(cell.plan, cdiv(num_blocks, PROMPT_BLOCKS) * PROMPT_BLOCKS, pool=cell.variant)
    return TimedOperation(
        run=lambda _: kv.exchange(cell.size),
        setup=lambda: kv.fill(prompts),
        teardown=lambda _, allocation: kv.pool.free(allocation),
    )


_allocations, _evictions = attrgetter("allocations"), attrgetter("evictions")
BENCHMARK = MicroBenchmark(
    "kv_pool",
    registry("pool"),
    {
        "d": timed(
            "d",
            *(
                Recipe(case + (WITH_QUOTA if quota else ""), partial(build, quota=quota), _allocations)
                for case, build in ((ALLOCATE, _allocate), (FREE, _free), (GROW, _grow))
                for quota in (False, True)
            ),
            Recipe(EVICT, partial(_evict_and_allocate, large=False), _allocations),
            Recipe(EVICT_LARGE, partial(_evict_and_allocate, large=True), _evictions, in_a_row=True),
        )
    },
)
