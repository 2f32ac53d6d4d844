"""What every registered pool must do, against a slow twin: lists of ids, and a set of those that are free."""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
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

from sagellm.core.clock import ManualClock
from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.kv_pool import Allocation, KVPool
from sagellm.core.registry import registry
from sagellm.core.types import NO_ACCOUNT, Account
from sagellm.kvmgr.kv_pool import QuotaManager, Share, plan_compaction
from tests.effort import examples

TOTAL = 27
CEILING = 11
TENANT = Account("tenant", "batch")
POOLS = registry("pool").names()


def make(name: str, total_blocks: int = TOTAL, **options: Any) -> KVPool:
    pool: KVPool = registry("pool").create(name, total_blocks=total_blocks, block_size=4, **options)
    return pool


def take(pool: KVPool, num_blocks: int, owner: str = "me", account: Account = NO_ACCOUNT) -> Allocation:
    allocation = pool.allocate(num_blocks, owner, account)
    assert allocation is not None
    return allocation


def longest_run(blocks: Iterable[int]) -> int:
    """The i-th of a run of ascending ids differs from i by the same for all of the run."""
    groups = itertools.groupby(enumerate(sorted(blocks)), lambda pair: pair[1] - pair[0])
    return max((len(list(group)) for _, group in groups), default=0)


class PoolMachine(RuleBasedStateMachine):
    name = ""
    with_quota = False

    def __init__(self) -> None:
        super().__init__()
        self.quota = QuotaManager(TOTAL, {TENANT.tenant: Share(5, CEILING)}) if self.with_quota else None
        self.clock = ManualClock()
        self.pool = make(self.name, quota=self.quota, clock=self.clock)
        self.free_ids = set(range(TOTAL))
        self.live: list[tuple[Allocation, list[int], float]] = []
        self.held: dict[tuple[str, Account], list[int]] = {}
        self.charged: Counter[Account] = Counter()
        self.reads: list[list[int]] = []
        self.unowned: set[int] = set()

    def fits(self, count: int, account: Account) -> bool:
        below_ceiling = not self.with_quota or account != TENANT or self.charged[TENANT] + count <= CEILING
        return count <= len(self.free_ids) and below_ceiling

    def came(self, block_ids: Iterable[int], account: Account) -> None:
        taken = list(block_ids)
        assert len(set(taken)) == len(taken)
        assert self.free_ids.issuperset(taken)
        self.free_ids.difference_update(taken)
        self.charged[account] += len(taken)

    def went(self, block_ids: Iterable[int], account: Account) -> None:
        gone = list(block_ids)
        self.unowned.update(self.read_ids().intersection(gone))
        self.free_ids.update(set(gone) - self.unowned)
        self.charged[account] -= len(gone)

    def read_ids(self) -> set[int]:
        return {block for read in self.reads for block in read}

    def pick(self, data: st.DataObject) -> tuple[Allocation, list[int], float]:
        return self.live[data.draw(st.integers(0, len(self.live) - 1), label="allocation")]

    @rule(
        count=st.integers(0, 12), owner=st.sampled_from("abc"), account=st.sampled_from([NO_ACCOUNT, TENANT])
    )
    def allocate(self, count: int, owner: str, account: Account) -> None:
        self.clock.advance(1.0)
        allocation = self.pool.allocate(count, owner, account)
        assert (allocation is not None) == self.fits(count, account)
        if allocation is not None:
            assert (allocation.owner, allocation.account) == (owner, account)
            assert len(allocation.block_ids) == count
            self.came(allocation.block_ids, account)
            self.live.append((allocation, allocation.block_ids.tolist(), self.clock.now()))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(0, 5))
    def grow(self, data: st.DataObject, count: int) -> None:
        allocation, block_ids, _ = self.pick(data)
        new = self.pool.append_blocks(allocation, count)
        assert (new is not None) == self.fits(count, allocation.account)
        if new is not None:
            assert len(new) == count
            self.came(new, allocation.account)
            block_ids.extend(new)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def shrink(self, data: st.DataObject) -> None:
        allocation, block_ids, _ = self.pick(data)
        keep = data.draw(st.integers(0, len(block_ids)), label="keep")
        self.pool.shrink(allocation, len(block_ids) - keep)
        self.went(block_ids[keep:], allocation.account)
        del block_ids[keep:]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        entry = self.pick(data)
        self.live.remove(entry)
        self.pool.free(entry[0])
        self.went(entry[1], entry[0].account)
        assert not entry[0].block_ids
        with pytest.raises(BookkeepingError, match="double free"):
            self.pool.free(entry[0])

    @precondition(lambda self: self.live)
    @rule(data=st.data(), holder=st.sampled_from(["index", "tier"]))
    def hand_over(self, data: st.DataObject, holder: str) -> None:
        allocation, block_ids, _ = self.pick(data)
        start = data.draw(st.integers(0, len(block_ids)), label="start")
        stop = data.draw(st.integers(start, len(block_ids)), label="stop")
        handed = self.pool.hand_over(allocation, start, stop, holder)
        assert handed.tolist() == block_ids[start:stop]
        self.held.setdefault((holder, allocation.account), []).extend(handed)
        del block_ids[start:stop]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def take_back(self, data: st.DataObject) -> None:
        holder, account = data.draw(st.sampled_from(list(self.held)), label="holder")
        has = self.held[holder, account]
        given = data.draw(st.permutations(has), label="given")[: data.draw(st.integers(0, len(has)))]
        self.pool.take_back(holder, array("i", given), account)
        self.went(given, account)
        self.held[holder, account] = [block for block in has if block not in given]

    @precondition(lambda self: any(block_ids for _, block_ids, _ in self.live))
    @rule(data=st.data())
    def free_single_ids(self, data: st.DataObject) -> None:
        mine = [block for _, block_ids, _ in self.live for block in block_ids]
        given = data.draw(st.lists(st.sampled_from(mine), unique=True), label="given")
        self.pool.free(given)
        for allocation, block_ids, _ in self.live:
            cut = [block for block in block_ids if block in given]
            self.went(cut, allocation.account)
            block_ids[:] = [block for block in block_ids if block not in cut]
            if cut and not block_ids:
                with pytest.raises(BookkeepingError, match="double free"):
                    self.pool.free(allocation)
                self.live = [entry for entry in self.live if entry[0] is not allocation]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        _, block_ids, _ = self.pick(data)
        read = block_ids[: data.draw(st.integers(0, len(block_ids)), label="read")]
        self.pool.keep(array("i", read))
        self.reads.append(read)

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        read = self.reads.pop(data.draw(st.integers(0, len(self.reads) - 1), label="read"))
        self.pool.let_go(array("i", read))
        back = self.unowned.intersection(read) - self.read_ids()
        self.unowned -= back
        self.free_ids |= back

    @precondition(lambda self: not self.reads)
    @rule(max_copies=st.none() | st.integers(0, 6))
    def compact(self, max_copies: int | None) -> None:
        moves = plan_compaction(set(range(TOTAL)) - self.free_ids, TOTAL, max_copies)
        self.pool.remap(moves)
        self.free_ids = self.free_ids.difference(moves.values()).union(moves)
        for blocks in (*(block_ids for _, block_ids, _ in self.live), *self.held.values()):
            blocks[:] = [moves.get(block, block) for block in blocks]

    def held_by_holder(self) -> dict[str, list[int]]:
        held: dict[str, list[int]] = {"index": [], "tier": []}
        for (holder, _), block_ids in self.held.items():
            held[holder] += block_ids
        return held

    @invariant()
    def books_balance(self) -> None:
        held = self.held_by_holder()
        self.pool.check()
        self.pool.check(held)
        for holder, block_ids in held.items():
            assert self.pool.num_held(holder) == len(block_ids)
        for allocation, block_ids, _ in self.live:
            assert allocation.block_ids.tolist() == block_ids
        if self.quota is not None:
            self.quota.check()
            for account in (NO_ACCOUNT, TENANT):
                assert self.quota.used(account) == self.charged[account]

    @invariant()
    def figures_agree(self) -> None:
        free = len(self.free_ids)
        assert self.pool.num_free == free
        assert (self.pool.num_kept, self.pool.num_unowned) == (len(self.read_ids()), len(self.unowned))
        assert self.pool.get_utilization() == pytest.approx(1 - free / TOTAL)
        expected = 1 - longest_run(self.free_ids) / free if free else 0.0
        assert self.pool.get_fragmentation() == pytest.approx(expected)

    @invariant()
    def every_block_has_its_record(self) -> None:
        owners = {b: (one.owner, made_s) for one, block_ids, made_s in self.live for b in block_ids}
        for block in range(TOTAL):
            info = self.pool.get_block_info(block)
            assert info.block_id == block
            if block in self.free_ids:
                assert info.owner is None
            elif block in self.unowned:
                assert info.owner == "a reader"
            elif block in owners:
                assert (info.owner, info.last_access_time) == owners[block]
                assert info.sequence_id == info.owner
            else:
                assert info.owner in {"index", "tier", "index or tier"}


@pytest.mark.parametrize("with_quota", [False, True], ids=["free for all", "quota"])
@pytest.mark.parametrize("name", POOLS)
def test_state_machine(name: str, with_quota: bool) -> None:
    machine: Any = type(f"Pool_{name}", (PoolMachine,), {"name": name, "with_quota": with_quota})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples(40), stateful_step_count=30))


MISUSES: dict[str, tuple[str, Callable[[KVPool, Allocation], object]]] = {
    "a negative count": ("-1", lambda pool, mine: pool.allocate(-1, "me")),
    "growing by a negative count": ("-1", lambda pool, mine: pool.append_blocks(mine, -1)),
    "shrinking by a negative count": ("-1", lambda pool, mine: pool.shrink(mine, -1)),
    "shrinking below nothing": ("cannot shrink by 4", lambda pool, mine: pool.shrink(mine, 4)),
    "a foreign allocation": (
        "'me', 3 blocks.* is not of this pool",
        lambda pool, mine: pool.free(Allocation("me", mine.block_ids)),
    ),
    "growing a foreign allocation": (
        "is not of this pool",
        lambda pool, mine: pool.append_blocks(Allocation("me", mine.block_ids), 1),
    ),
    "shrinking a foreign allocation": (
        "is not of this pool",
        lambda pool, mine: pool.shrink(Allocation("me", mine.block_ids), 1),
    ),
    "handing over a foreign allocation": (
        "is not of this pool",
        lambda pool, mine: pool.hand_over(Allocation("me", mine.block_ids), 0, 1, "index"),
    ),
    "handing over what it has not": (
        r"no blocks \[1, 4\) to hand to 'index'",
        lambda pool, mine: pool.hand_over(mine, 1, 4, "index"),
    ),
    "letting go what was not kept": (
        "block 3 is let go more often than it was kept",
        lambda pool, mine: pool.let_go(array("i", [3])),
    ),
    "a block named twice": (
        "named twice",
        lambda pool, mine: pool.free([*mine.block_ids, mine.block_ids[0]]),
    ),
    "a block that is free": ("double free of block 26", lambda pool, mine: pool.free([*mine.block_ids, 26])),
    "a block of a holder": ("held by 'index'.*take_back", lambda pool, mine: pool.free([3])),
    "a block that is none": ("no block 32", lambda pool, mine: pool.free([32])),
    "asking for a block that is none": ("no block -1", lambda pool, mine: pool.get_block_info(-1)),
    "asking behind the last block": ("no block 32", lambda pool, mine: pool.get_block_info(32)),
    "more than a holder has": (
        "'index' holds 2 blocks and gives back 3",
        lambda pool, mine: pool.take_back("index", array("i", [3, 4, 5]), TENANT),
    ),
    "a holder that is none": (
        "'tier' holds 0 blocks",
        lambda pool, mine: pool.take_back("tier", array("i", [3]), TENANT),
    ),
    "another account's blocks": (
        "charged for 0 blocks, not for 2",
        lambda pool, mine: pool.take_back("index", array("i", [3, 4]), NO_ACCOUNT),
    ),
    "a move onto a block in use": ("block 3 is a target", lambda pool, mine: pool.remap({0: 3})),
    "a move of a free block": ("block 26 is the source", lambda pool, mine: pool.remap({26: 25})),
    "a move from nowhere": ("no block 99", lambda pool, mine: pool.remap({99: 25})),
    "a move from behind the last block": ("no block 32", lambda pool, mine: pool.remap({32: 25})),
    "two moves to one place": ("the same target", lambda pool, mine: pool.remap({0: 25, 1: 25})),
}


@pytest.mark.parametrize("misuse", MISUSES)
@pytest.mark.parametrize("name", POOLS)
def test_misuse_says_what_is_wrong_and_changes_nothing(name: str, misuse: str) -> None:
    quota = QuotaManager(TOTAL)
    pool = make(name, 32, quota=quota)
    mine = take(pool, 5, "me", TENANT)
    handed = pool.hand_over(mine, 3, 5, "index")
    assert (mine.block_ids.tolist(), handed.tolist()) == ([0, 1, 2], [3, 4])
    text, act = MISUSES[misuse]
    with pytest.raises(BookkeepingError, match=text):
        act(pool, mine)
    pool.check({"index": handed})
    assert (pool.num_free, quota.used(TENANT), mine.block_ids.tolist()) == (27, 5, [0, 1, 2])


@pytest.mark.parametrize("name", POOLS)
def test_blocks_that_the_quota_is_not_charged_for_stay_where_they_are(name: str) -> None:
    quota = QuotaManager(TOTAL)
    pool = make(name, 32, quota=quota)
    mine = take(pool, 5, "me", TENANT)
    quota.refund(TENANT, 4)  # behind the pool's back
    with pytest.raises(BookkeepingError, match="charged for 1 blocks, not for 2"):
        pool.free([0, 1])
    assert (pool.num_free, mine.block_ids.tolist()) == (27, [0, 1, 2, 3, 4])
    assert quota.charge(TENANT, 4)
    pool.free([0, 1])
    pool.check({})
    assert (pool.num_free, quota.used(TENANT), mine.block_ids.tolist()) == (29, 3, [2, 3, 4])


@pytest.mark.parametrize("name", POOLS)
def test_check_names_the_block_and_its_owner(name: str) -> None:
    pool = make(name, 32)
    mine = take(pool, 5)
    pool.hand_over(mine, 3, 5, "index")
    for held, text in (
        ({"index": [3, 2]}, "block 2 is of 'me' and held by 'index'"),
        ({"index": [3, 26]}, "block 26 is free and held by 'index'"),
        ({"index": [3, 4], "tier": [3]}, "block 3 is held by 'index' and held by 'tier'"),
        ({"index": [3, 99]}, "no block 99"),
        ({"index": [3, 32]}, "no block 32"),
        ({"index": [3]}, r"'index' holds 2 blocks and names 1; without an owner: \[4\]"),
        ({}, r"'index' holds 2 blocks and names 0; without an owner: \[3, 4\]"),
        ({"index": [3], "tier": [4]}, "'index' holds 2 blocks and names 1"),
    ):
        with pytest.raises(BookkeepingError, match=text):
            pool.check(held)
    mine.block_ids.append(20)
    with pytest.raises(BookkeepingError, match="block 20 is free and of 'me'"):
        pool.check()
    del mine.block_ids[2:]
    with pytest.raises(BookkeepingError, match="3 blocks are held, the pool counts"):
        pool.check()
    with pytest.raises(BookkeepingError, match="block 2 has no owner"):
        pool.check({"index": [3, 4]})


@pytest.mark.parametrize("name", POOLS)
def test_a_block_given_back_twice_is_found_at_the_latest_by_check(name: str) -> None:
    pool = make(name)
    mine = take(pool, 4)
    mine_ids = pool.hand_over(mine, 0, 4, "index")

    def give_back_and_check() -> None:
        pool.take_back("index", array("i", [mine_ids[1], mine_ids[1]]))
        pool.check()

    with pytest.raises(BookkeepingError, match=f"block {mine_ids[1]}"):
        give_back_and_check()


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("count", [1, 5, 8, 16])
def test_a_fresh_pool_gives_consecutive_blocks(name: str, count: int) -> None:
    block_ids = take(make(name), count).block_ids
    assert block_ids.tolist() == list(range(block_ids[0], block_ids[0] + count))


@pytest.mark.parametrize("name", POOLS)
def test_a_pool_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="at least one"):
        make(name, total_blocks=0)
    assert take(make(name, total_blocks=1), 1).block_ids.tolist() == [0]
