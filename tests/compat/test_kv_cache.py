"""Pool, prefix index and eviction in the forms of the design documents, over every registered plug-in."""

from __future__ import annotations

import pytest

from sagellm.compat import (
    BlockAllocationRequest,
    EvictionCandidate,
    GPUKVPool,
    PrefixMatcher,
    RadixPrefixCache,
    allocate_blocks,
    insert_prefix,
    select_victims,
)
from sagellm.core.clock import ManualClock
from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.eviction import EvictionPolicy
from sagellm.core.protocols.prefix_cache import PrefixReuseIndex
from sagellm.core.registry import registry
from sagellm.core.types import Namespace, Tokens
from sagellm.kvmgr.kv_pool import BuddyPool

BLOCK = 2
INDEXES = ["radix", "hashed"]


def index_of(name: str, clock: ManualClock | None = None) -> PrefixReuseIndex:
    index: PrefixReuseIndex = registry("index").create(name, block_size=BLOCK, clock=clock)
    return index


# -- pool


def test_the_pool_answers_requests_with_lists() -> None:
    pool = GPUKVPool(16)
    block_ids = pool.allocate(BlockAllocationRequest(5, "sequence"))
    assert block_ids == [0, 1, 2, 3, 4]
    assert {pool.block_info[block].sequence_id for block in block_ids} == {"sequence"}
    with pytest.raises(MemoryError, match="12 blocks asked for, 11 of 16 free"):
        pool.allocate(BlockAllocationRequest(12, "too long"))
    pool.free(block_ids[1:3])
    pool.free([4, 0, 3])
    pool.check()
    assert pool.get_free_blocks() == 16
    with pytest.raises(BookkeepingError, match="double free of block 1"):
        pool.free([1])


def test_any_pool_answers_requests_with_lists() -> None:
    pool = BuddyPool(16)
    block_ids = allocate_blocks(pool, BlockAllocationRequest(5, "sequence"))
    assert block_ids == [0, 1, 2, 3, 4]
    assert {pool.block_info[block].sequence_id for block in block_ids} == {"sequence"}
    with pytest.raises(MemoryError, match="12 blocks asked for, 11 of 16 free"):
        allocate_blocks(pool, BlockAllocationRequest(12, "too long"))
    pool.free(block_ids[1:3])
    pool.free([4, 0, 3])
    pool.check()
    assert pool.num_free == 16
    with pytest.raises(BookkeepingError, match="double free of block 1"):
        pool.free([1])


# -- prefix index


@pytest.mark.parametrize("name", INDEXES)
def test_duplicates_come_back_to_be_freed(name: str) -> None:
    index = index_of(name)
    assert insert_prefix(index, [1, 1, 2, 2], [10, 11]) == []
    assert insert_prefix(index, [1, 1, 2, 2, 3, 3, 4], [20, 21, 22]) == [20, 21]
    assert PrefixMatcher(index).match([1, 1, 2, 2, 3, 3]).block_ids == [10, 11, 22]


@pytest.mark.parametrize("name", INDEXES)
def test_max_blocks_evicts_the_oldest(name: str) -> None:
    index = index_of(name)
    insert_prefix(index, [1, 1, 2, 2], [10, 11], max_blocks=2)
    assert insert_prefix(index, [3, 3], [12], max_blocks=2) == [11]


def test_the_radix_cache_has_both_forms() -> None:
    cache = RadixPrefixCache(max_blocks=2, block_size=BLOCK)
    assert cache.insert_prefix([1, 1, 2, 2], [10, 11]) == []
    assert cache.match_prefix([1, 1, 2, 2, 3]).block_ids == [10, 11]
    assert cache.match_prefix([1, 1, 2]).match_length == 2
    assert cache.insert_prefix([3, 3], [12]) == [11]


@pytest.mark.parametrize("name", INDEXES)
def test_a_matcher_reads_for_a_router(name: str) -> None:
    clock = ManualClock()
    index = index_of(name, clock)
    for tokens, block_ids in (([1, 1, 2, 2], [0, 1]), ([1, 1, 3, 3, 4, 4], [0, 2, 3])):
        clock.advance(1.0)
        index.insert(Tokens(tokens), block_ids)
    matcher = PrefixMatcher(index)
    match = matcher.match([1, 1, 2, 2, 9])
    assert (match.match_length, match.block_ids) == (4, [0, 1])
    assert matcher.match([1, 1, 2, 2], max_tokens=3).match_length == 2
    assert matcher.match([1, 1], Namespace(tenant="other")).block_ids == []
    best = matcher.best([1, 1, 2, 2], k=5)
    assert [(one.hit.num_tokens, one.num_blocks, one.used_s) for one in best] == [(4, 2, 1.0), (2, 3, 2.0)]
    assert matcher.best([1, 1]) == matcher.best([1, 1], k=2)[:1]
    assert matcher.best([1, 1])[0].num_blocks == 3, "of equal matches the one that was used last"


# -- eviction


@pytest.mark.parametrize("name", registry("policy").names())
def test_every_policy_selects_victims(name: str) -> None:
    candidates = [
        EvictionCandidate("old", [1, 2], 1.0),
        EvictionCandidate("held", [3, 4, 5], 0.0, is_pinned=True),
        EvictionCandidate("new", [6, 7], 3.0),
        EvictionCandidate("middle", [8], 2.0),
    ]

    def fresh() -> EvictionPolicy:
        policy: EvictionPolicy = registry("policy").create(name)
        return policy

    victims = select_victims(fresh, candidates, required_blocks=3)
    assert "held" not in victims
    assert sum(len(c.block_ids) for c in candidates if c.sequence_id in victims) >= 3
    assert select_victims(fresh, candidates, required_blocks=6) == []
