"""Compaction: the plan against trying every one, and its copies on real tensors."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.kv_pool import Allocation, KVPool
from sagellm.core.registry import registry
from sagellm.kvmgr.kv_pool import as_copies, plan_compaction

TOTAL = 30


def longest_run(free: set[int]) -> int:
    return max((sum(1 for _ in _run_from(block, free)) for block in free), default=0)


def _run_from(block: int, free: set[int]) -> list[int]:
    return [b for b in range(block, TOTAL) if free.issuperset(range(block, b + 1))]


def after(used: set[int], moves: Mapping[int, int]) -> set[int]:
    return used.difference(moves).union(moves.values())


def free_of(used: set[int]) -> set[int]:
    return set(range(TOTAL)) - used


@given(used=st.sets(st.integers(0, TOTAL - 1)), max_copies=st.none() | st.integers(0, 8))
def test_the_plan_is_the_shortest_that_leaves_the_longest_run(used: set[int], max_copies: int | None) -> None:
    moves = plan_compaction(used, TOTAL, max_copies)
    everything = list(zip(sorted(used, reverse=True), sorted(free_of(used)), strict=False))
    candidates = [(source, target) for source, target in everything if source > target][:max_copies]
    plans = [dict(candidates[:count]) for count in range(len(candidates) + 1)]
    assert moves == max(plans, key=lambda plan: longest_run(free_of(after(used, plan))))
    assert used.issuperset(moves)
    assert used.isdisjoint(moves.values())
    if max_copies is None:
        assert longest_run(free_of(after(used, moves))) == TOTAL - len(used)


@pytest.mark.parametrize(
    ("used", "max_copies", "moves"),
    [
        ([0, 1, 2], None, {}),  # nothing to gain
        ([20, 21, 29], None, {29: 0, 21: 1, 20: 2}),
        ([20, 21, 29], 2, {}),  # two copies would cut the run before block 20, and join nothing
        ([5, 12, 20], 2, {20: 0, 12: 1}),
        ([0, 2, 4, 6], None, {6: 1, 4: 3}),
        ([0, 2, 4, 6], 1, {6: 1}),
        ([0, 2, 4, 6], 0, {}),
        ([0, 29], None, {}),  # one run already
        (range(15, 30), None, {}),
        ([], None, {}),
        (range(30), None, {}),
    ],
)
def test_plans(used: list[int], max_copies: int | None, moves: dict[int, int]) -> None:
    assert plan_compaction(used, TOTAL, max_copies) == moves


def test_what_is_used_twice_or_unknown_has_no_plan() -> None:
    with pytest.raises(BookkeepingError, match="block 3 is used twice"):
        plan_compaction([3, 3], TOTAL)
    with pytest.raises(BookkeepingError, match="no block 30"):
        plan_compaction([30], TOTAL)


def fragmented(pool: KVPool, seed: int) -> tuple[list[Allocation], list[int]]:
    """Allocations and blocks of the holder "index" that are left of a random history."""
    rng = random.Random(seed)
    made = [pool.allocate(rng.randint(0, 5), f"request {number}") for number in range(12)]
    live = [allocation for allocation in made if allocation is not None]
    held: list[int] = []
    for allocation in rng.sample(live, len(live) // 2):
        held += pool.hand_over(allocation, 0, rng.randint(0, len(allocation.block_ids)), "index")
        pool.free(allocation)
        live.remove(allocation)
    return live, held


@pytest.mark.parametrize("name", registry("pool").names())
@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), max_copies=st.none() | st.integers(0, 5), shuffled=st.booleans())
def test_after_the_copies_every_owner_finds_its_bytes(
    name: str, seed: int, max_copies: int | None, shuffled: bool
) -> None:
    import torch

    from sagellm.engines.native.kv_cache import PagedKV

    pool: KVPool = registry("pool").create(name, total_blocks=TOTAL, block_size=2)
    storage = PagedKV(2, TOTAL, 2, 1, 3, torch.device("cpu"), torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*storage.keys, *storage.values):
        tensor.copy_(torch.rand(tensor.shape, generator=generator))

    def contents(block_ids: list[int]) -> list[torch.Tensor]:
        return [tensor[block_ids] for tensor in (*storage.keys, *storage.values)]

    live, held = fragmented(pool, seed)
    owners = [*(allocation.block_ids.tolist() for allocation in live), held]
    before = [contents(block_ids) for block_ids in owners]
    fragmentation = pool.get_fragmentation()

    moves = plan_compaction([block for block_ids in owners for block in block_ids], TOTAL, max_copies)
    copies = as_copies(moves)
    if shuffled:  # no copy may overwrite what another one is still to read
        random.Random(seed).shuffle(copies)
    storage.copy_blocks(copies)
    pool.remap(moves)
    held = [moves.get(block, block) for block in held]

    for block_ids, expected in zip([*(one.block_ids.tolist() for one in live), held], before, strict=True):
        for tensor, old in zip(contents(block_ids), expected, strict=True):
            torch.testing.assert_close(tensor, old, rtol=0, atol=0)
    pool.check({"index": held})
    if max_copies is None:
        assert pool.get_fragmentation() == 0
    assert pool.get_fragmentation() <= fragmentation
