"""The radix index against a slow twin: a dict of every prefix, stepped together by hypothesis."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sagellm.core.errors import BookkeepingError
from sagellm.core.events import BlocksRemoved, BlocksStored, EventBus
from sagellm.core.protocols.prefix_cache import PrefixHit
from sagellm.core.types import Namespace, Tokens
from sagellm.kvmgr.eviction import LRUEvictionPolicy
from sagellm.kvmgr.prefix_cache import RadixPrefixCache

BLOCK = 2
SPACES = (Namespace(), Namespace(tenant="a"), Namespace(adapter="b"))
prompts = st.lists(st.integers(0, 2), max_size=16)
spaces = st.sampled_from(SPACES)


class RadixAgainstDict(RuleBasedStateMachine):
    """The twin maps (namespace, whole prefix) to the block that holds the prefix's last tokens."""

    with_policy = True

    def __init__(self) -> None:
        super().__init__()
        policy = LRUEvictionPolicy() if self.with_policy else None
        self.index = RadixPrefixCache(block_size=BLOCK, policy=policy)
        self.twin: dict[tuple[Namespace, tuple[int, ...]], int] = {}
        self.pinned: list[PrefixHit] = []
        self.next_block = 0

    def longest(self, tokens: list[int], space: Namespace) -> int:
        blocks = 0
        while (blocks + 1) * BLOCK <= len(tokens) and (
            space,
            tuple(tokens[: (blocks + 1) * BLOCK]),
        ) in self.twin:
            blocks += 1
        return blocks

    def held(self) -> set[tuple[Namespace, tuple[int, ...]]]:
        return {
            (hit.namespace, tuple(hit.tokens.tolist()[: count * BLOCK]))
            for hit in self.pinned
            for count in range(1, hit.num_blocks + 1)
        }

    @rule(tokens=prompts, space=spaces)
    def insert(self, tokens: list[int], space: Namespace) -> None:
        whole = len(tokens) // BLOCK
        blocks = list(range(self.next_block, self.next_block + whole))
        self.next_block += whole
        existing = self.longest(tokens, space)
        result = self.index.insert(Tokens(tokens), blocks, space)
        assert result.num_existing == existing
        assert result.hit.num_blocks == whole
        for position in range(existing, whole):
            self.twin[(space, tuple(tokens[: (position + 1) * BLOCK]))] = blocks[position]

    @rule(tokens=prompts, space=spaces, limit=st.one_of(st.none(), st.integers(0, 20)))
    def lookup(self, tokens: list[int], space: Namespace, limit: int | None) -> None:
        hit = self.index.lookup(Tokens(tokens), space, limit)
        count = self.longest(tokens if limit is None else tokens[:limit], space)
        assert (hit.num_blocks, hit.num_tokens) == (count, count * BLOCK)
        assert self.index.block_ids(hit) == [
            self.twin[(space, tuple(tokens[: (position + 1) * BLOCK]))] for position in range(count)
        ]

    @rule(tokens=prompts, space=spaces)
    def pin(self, tokens: list[int], space: Namespace) -> None:
        hit = self.index.lookup(Tokens(tokens), space)
        free = {
            count
            for count in range(1, hit.num_blocks + 1)
            if (space, tuple(tokens[: count * BLOCK])) not in self.held()
        }
        assert self.index.num_unpinned_on_path(hit) == len(free)
        pinned = self.index.pin(hit)
        assert pinned.num_blocks == hit.num_blocks
        self.pinned.append(pinned)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        hit = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        alone = self.index.num_held_alone(hit)
        before = self.index.num_evictable
        self.index.unpin(hit)
        assert self.index.num_evictable == before + alone

    @rule(count=st.integers(0, 8))
    def evict(self, count: int) -> None:
        evictable = len(self.twin.keys() - self.held())
        freed = self.index.evict(count)
        if count > evictable:
            assert freed is None
            return
        assert freed is not None
        assert len(set(freed)) == count
        gone = {prefix for prefix, block in self.twin.items() if block in set(freed)}
        assert len(gone) == count
        assert not gone & self.held()
        for prefix in gone:
            del self.twin[prefix]
        for space, tokens in self.twin:  # tails before heads: nothing is left without what leads to it
            assert len(tokens) == BLOCK or (space, tokens[:-BLOCK]) in self.twin

    @rule()
    def clear(self) -> None:
        freed = self.index.clear()
        assert {block for prefix, block in self.twin.items() if prefix not in self.held()} == set(freed)
        self.twin = {prefix: block for prefix, block in self.twin.items() if prefix in self.held()}

    @invariant()
    def books_balance(self) -> None:
        self.index.check()
        assert self.index.num_cached == len(self.twin)
        assert self.index.num_evictable == len(self.twin.keys() - self.held())
        for hit in self.pinned:
            assert self.index.block_ids(hit) == [
                self.twin[(hit.namespace, tuple(hit.tokens.tolist()[: count * BLOCK]))]
                for count in range(1, hit.num_blocks + 1)
            ]


class RadixWithoutPolicy(RadixAgainstDict):
    with_policy = False


TestRadixAgainstDict = RadixAgainstDict.TestCase
TestRadixAgainstDict.settings = settings(max_examples=60, stateful_step_count=40)
TestRadixWithoutPolicy = RadixWithoutPolicy.TestCase
TestRadixWithoutPolicy.settings = settings(max_examples=30, stateful_step_count=40)


def filled(*prompts: list[int]) -> RadixPrefixCache:
    index = RadixPrefixCache(block_size=BLOCK)
    block = 0
    for tokens in prompts:
        whole = len(tokens) // BLOCK
        index.insert(Tokens(tokens), range(block, block + whole))
        block += whole
    return index


def test_without_a_policy_the_last_unpinned_leaf_stays_longest() -> None:
    index = filled([1, 1, 1, 1], [2, 2], [3, 3])
    first = index.pin(index.lookup(Tokens([1, 1, 1, 1])))
    index.unpin(first)
    assert index.evict(2) == [2, 3]
    assert index.evict(1) == [1]  # the tail before the head
    assert index.match_prefix([1, 1, 1, 1]).match_length == 2


def test_a_hit_that_became_wrong_is_looked_up_again() -> None:
    index = filled([1, 1, 2, 2, 3, 3])
    hit = index.lookup(Tokens([1, 1, 2, 2, 3, 3]))
    index.evict(2)
    assert index.pin(hit).num_blocks == 1


def test_a_lookup_changes_nothing() -> None:
    index = filled([1, 1, 2, 2])
    index.lookup(Tokens([1, 1, 9, 9]), Namespace(tenant="nobody"))
    index.lookup(Tokens([1, 1, 9, 9]))
    index.check()
    assert (index.num_cached, index.num_evictable) == (2, 2)


def test_duplicates_come_back_to_be_freed() -> None:
    index = RadixPrefixCache(block_size=BLOCK)
    assert index.insert_prefix([1, 1, 2, 2], [10, 11]) == []
    assert index.insert_prefix([1, 1, 2, 2, 3, 3], [20, 21, 22]) == [20, 21]
    assert index.match_prefix([1, 1, 2, 2, 3, 3]).block_ids == [10, 11, 22]


def test_max_blocks_pushes_out_what_is_oldest() -> None:
    index = RadixPrefixCache(max_blocks=2, block_size=BLOCK)
    index.insert_prefix([1, 1, 2, 2], [10, 11])
    assert index.insert_prefix([3, 3], [12]) == [11]


def test_events_tell_of_blocks_that_come_and_go() -> None:
    events = EventBus()
    seen: list[object] = []
    events.subscribe(BlocksStored, seen.append)
    events.subscribe(BlocksRemoved, seen.append)
    index = RadixPrefixCache(block_size=BLOCK, events=events)
    index.insert(Tokens([1, 1, 2, 2]), [7, 8])
    index.evict(1)
    assert seen == [BlocksStored((7, 8), 0), BlocksRemoved((8,), "capacity")]


@pytest.mark.parametrize("wrong", ["unpin", "blocks", "negative", "size"])
def test_misuse_is_told_and_changes_nothing(wrong: str) -> None:
    index = filled([1, 1, 2, 2])
    if wrong == "unpin":
        with pytest.raises(BookkeepingError, match="nobody pins"):
            index.unpin(index.lookup(Tokens([1, 1])))
    elif wrong == "blocks":
        with pytest.raises(BookkeepingError, match="3 blocks"):
            index.insert(Tokens([1, 1, 2, 2]), [1, 2, 3])
    elif wrong == "negative":
        with pytest.raises(BookkeepingError, match="-1"):
            index.evict(-1)
    else:
        with pytest.raises(ValueError, match="block_size"):
            RadixPrefixCache(block_size=0)
    index.check()
