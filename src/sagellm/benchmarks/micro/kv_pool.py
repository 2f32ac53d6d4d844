"""`sagellm bench micro kv_pool`: allocate, grow and free, with and without a quota; evict and allocate.

Its one section is d. The pool's lock and counters are on in every row: they have no switch.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from sagellm.benchmarks.micro._kv import OWNER, Prompts, pool_and_index
from sagellm.benchmarks.micro.cases import (
    BLOCK_SIZE,
    MicroBenchCell,
    MicroBenchmark,
    MicroBenchPlan,
    Operation,
    Recipe,
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

_PROMPT_TOKENS = 512
_PROMPT_BLOCKS = _PROMPT_TOKENS // BLOCK_SIZE
_MORE_BLOCKS = 1024
_PAYER = Account("tenant", "class")


class _Till(NamedTuple):
    """A pool, half of whose blocks are taken, and the account that pays."""

    pool: KVPool
    account: Account

    def allocate(self, num_blocks: int) -> Allocation:
        allocation = self.pool.allocate(num_blocks, OWNER, self.account)
        if allocation is None:
            raise CapacityError(f"the pool has {self.pool.num_free} free blocks, not {num_blocks}")
        return allocation


def _half_full(setting: MicroBenchCell, calls: int, *, quota: bool) -> _Till:
    total = 4 * setting.size * calls
    pool = registry("pool").create(
        setting.variant,
        total_blocks=total,
        block_size=BLOCK_SIZE,
        quota=_quota(total) if quota else None,
    )
    till = _Till(pool, _PAYER if quota else NO_ACCOUNT)
    till.allocate(total // 2)
    return till


def _quota(total_blocks: int) -> QuotaManager:
    """Both dimensions in use, and a ceiling that is never met."""
    share = Share(total_blocks // 2, total_blocks)
    return QuotaManager(total_blocks, {_PAYER.tenant: share}, {_PAYER.service_class: share})


def _allocate(setting: MicroBenchCell, calls: int, *, quota: bool) -> Operation:
    (pool, account), size = _half_full(setting, calls, quota=quota), setting.size
    return Operation(
        run=lambda _: pool.allocate(size, OWNER, account),
        teardown=lambda _, allocation: pool.free(allocation),
    )


def _free(setting: MicroBenchCell, calls: int, *, quota: bool) -> Operation:
    till = _half_full(setting, calls, quota=quota)
    return Operation(run=till.pool.free, setup=lambda: till.allocate(setting.size))


def _grow(setting: MicroBenchCell, calls: int, *, quota: bool) -> Operation:
    """One more block for a sequence that has `size` of them, as decoding takes it at a block's border."""
    till = _half_full(setting, calls, quota=quota)
    pool, allocation = till.pool, till.allocate(setting.size)
    return Operation(
        run=lambda _: pool.append_blocks(allocation, 1), teardown=lambda *_: pool.shrink(allocation, 1)
    )


def _evict_and_allocate(setting: MicroBenchCell, calls: int) -> Operation:
    return _taking(setting, 2 * setting.size * calls + _MORE_BLOCKS)


def _evict_and_allocate_in_large(setting: MicroBenchCell, calls: int) -> Operation:
    return _taking(setting, max(setting.plan.large_pool, setting.size * calls))


def _taking(setting: MicroBenchCell, num_blocks: int) -> Operation:
    """Every sample starts with no more free blocks than a prompt has."""
    prompts = Prompts(setting.plan.seed)
    kv = pool_and_index(setting.plan, cdiv(num_blocks, _PROMPT_BLOCKS) * _PROMPT_BLOCKS, pool=setting.variant)

    def fill() -> int:
        while kv.pool.num_free >= _PROMPT_BLOCKS:
            kv.cache(prompts.draw(_PROMPT_TOKENS))
        return setting.size

    return Operation(run=kv.exchange, setup=fill, teardown=lambda _, allocation: kv.pool.free(allocation))


def _allocations(plan: MicroBenchPlan) -> tuple[int, ...]:
    return plan.allocations


def _evictions(plan: MicroBenchPlan) -> tuple[int, ...]:
    return plan.evictions


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
            Recipe(EVICT, _evict_and_allocate, _allocations),
            Recipe(EVICT_LARGE, _evict_and_allocate_in_large, _evictions, in_a_row=True),
        )
    },
)
