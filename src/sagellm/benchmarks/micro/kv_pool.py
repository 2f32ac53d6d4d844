"""`sagellm bench micro kv_pool`: allocate, append and free, with and without a quota. Evict and allocate
(section d). Below the device: what tiers' calls cost (t), and how fast bytes move (m). The pool's lock and
counters are on in every row: they have no switch."""

from __future__ import annotations

from functools import partial

from sagellm.benchmarks.micro._kv import OWNER, PROMPT_BLOCKS, Prompts, allocate, pool_and_index
from sagellm.benchmarks.micro.cases import (
    BLOCK_SIZE,
    CALLS_OF_SHORT,
    MicroBenchCell,
    MicroBenchmark,
    Recipe,
    TimedOperation,
    timed,
)
from sagellm.benchmarks.micro.kv_tiers import books, moves
from sagellm.core.blocks import cdiv
from sagellm.core.protocols.kv_pool import KVPool
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


def _half_full(cell: MicroBenchCell, calls: int, *, quota: bool) -> tuple[KVPool, Account]:
    """Returns a half-full pool, and the account that pays."""
    total = 4 * cell.size * calls
    share = Share(total // 2, total)  # quotas in both dimensions, with ceilings that are never reached
    manager = QuotaManager(total, {_PAYER.tenant: share}, {_PAYER.service_class: share})
    pool = registry("pool").create(
        cell.variant, total_blocks=total, block_size=BLOCK_SIZE, quota=manager if quota else None
    )
    account = _PAYER if quota else NO_ACCOUNT
    allocate(pool, total // 2, account)
    return pool, account


def _allocate(cell: MicroBenchCell, calls: int, *, quota: bool) -> TimedOperation:
    pool, account = _half_full(cell, calls, quota=quota)
    return TimedOperation(
        run=lambda _: pool.allocate(cell.size, OWNER, account),
        teardown=lambda _, allocation: pool.free(allocation),
    )


def _free(cell: MicroBenchCell, calls: int, *, quota: bool) -> TimedOperation:
    pool, account = _half_full(cell, calls, quota=quota)
    return TimedOperation(run=pool.free, setup=lambda: allocate(pool, cell.size, account))


def _grow(cell: MicroBenchCell, calls: int, *, quota: bool) -> TimedOperation:
    """Appends one block to `size` blocks, as decoding does at a block boundary."""
    pool, account = _half_full(cell, calls, quota=quota)
    allocation = allocate(pool, cell.size, account)
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


BENCHMARK = MicroBenchmark(
    "kv_pool",
    registry("pool").names,
    registry("pool").get,
    {
        "d": timed(
            "d",
            *(
                Recipe(case + (WITH_QUOTA if quota else ""), partial(build, quota=quota), "allocations")
                for case, build in ((ALLOCATE, _allocate), (FREE, _free), (GROW, _grow))
                for quota in (False, True)
            ),
            Recipe(EVICT, partial(_evict_and_allocate, large=False), "allocations"),
            Recipe(EVICT_LARGE, partial(_evict_and_allocate, large=True), "evictions", calls=CALLS_OF_SHORT),
        ),
        "t": books,
        "m": moves,
    },
)
