"""What every registered pool must do, against a slow twin: a set of free ids."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.kv_pool import Allocation, KVPool
from sagellm.core.registry import registry

TOTAL = 24
POOLS = registry("pool").names()


def make(name: str) -> KVPool:
    pool: KVPool = registry("pool").create(name, total_blocks=TOTAL, block_size=4)
    return pool


class PoolMachine(RuleBasedStateMachine):
    name = ""

    def __init__(self) -> None:
        super().__init__()
        self.pool = make(self.name)
        self.live: list[Allocation] = []
        self.loose: list[int] = []

    @rule(count=st.integers(0, 10), owner=st.sampled_from("abc"))
    def allocate(self, count: int, owner: str) -> None:
        free = self.pool.num_free
        allocation = self.pool.allocate(count, owner)
        if count > free:
            assert allocation is None
            return
        assert allocation is not None
        assert len(set(allocation.block_ids)) == count
        assert not set(allocation.block_ids) & self.used()
        self.live.append(allocation)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        allocation = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.pool.free(allocation)
        if allocation.block_ids:
            with pytest.raises(BookkeepingError, match="double free"):
                self.pool.free(allocation)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def hand_over_and_free_by_id(self, data: st.DataObject) -> None:
        allocation = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.pool.hand_over(allocation.block_ids, "index")
        if allocation.block_ids:
            with pytest.raises(BookkeepingError, match="belongs to 'index'"):
                self.pool.free(allocation)
        self.loose.extend(allocation.block_ids)

    @precondition(lambda self: self.loose)
    @rule(data=st.data())
    def free_by_id(self, data: st.DataObject) -> None:
        block = self.loose.pop(data.draw(st.integers(0, len(self.loose) - 1)))
        assert self.pool.get_block_info(block).owner == "index"
        self.pool.free([block])

    def used(self) -> set[int]:
        return {block for allocation in self.live for block in allocation.block_ids} | set(self.loose)

    @invariant()
    def books_balance(self) -> None:
        self.pool.check()
        used = len(self.used())
        assert self.pool.num_free == TOTAL - used
        assert self.pool.get_utilization() == pytest.approx(used / TOTAL)
        assert 0 <= self.pool.get_fragmentation() < 1


@pytest.mark.parametrize("name", POOLS)
def test_state_machine(name: str) -> None:
    machine: Any = type(f"Pool_{name}", (PoolMachine,), {"name": name})
    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=30))


@pytest.mark.parametrize("name", POOLS)
def test_misuse_names_the_block_and_changes_nothing(name: str) -> None:
    pool = make(name)
    mine = pool.allocate(4, "me")
    assert mine is not None
    for wrong, text in (
        (Allocation("you", mine.block_ids), "belongs to 'me'"),
        ([mine.block_ids[0], mine.block_ids[0]], "named twice"),
        ([TOTAL], f"block {TOTAL} is not of this pool"),
        ([*mine.block_ids, next(b for b in range(TOTAL) if b not in mine.block_ids)], "double free"),
    ):
        with pytest.raises(BookkeepingError, match=text):
            pool.free(wrong)
    with pytest.raises(BookkeepingError, match="-1"):
        pool.allocate(-1, "me")
    with pytest.raises(BookkeepingError, match="no block"):
        pool.get_block_info(TOTAL)
    with pytest.raises(BookkeepingError, match="is free"):
        pool.hand_over([next(b for b in range(TOTAL) if b not in mine.block_ids)], "me")
    pool.check()
    assert pool.num_free == TOTAL - 4
    pool.free(mine)
    assert pool.get_fragmentation() == 0


@pytest.mark.parametrize("name", POOLS)
def test_a_pool_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="at least one"):
        registry("pool").create(name, total_blocks=0, block_size=4)
