"""What is the radix tree's own; what every index must do is in `tests/contracts/test_prefix_index.py`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sagellm.compat import PrefixMatcher
from sagellm.core.clock import ManualClock
from sagellm.core.errors import BookkeepingError
from sagellm.core.events import BlocksRemoved, BlocksStored, EventBus, IndexCleared
from sagellm.core.protocols.prefix_cache import MatchEnd
from sagellm.core.types import Account, Namespace, Retention, Tokens
from sagellm.kvmgr.eviction import LRUPolicy
from sagellm.kvmgr.prefix_cache import RadixIndex
from sagellm.kvmgr.prefix_cache import _tree as tree_file
from sagellm.kvmgr.prefix_cache._tree import Node
from sagellm.kvmgr.prefix_cache.fingerprint import fingerprint

BLOCK = 2


def filled(*prompts: list[int]) -> RadixIndex:
    index = RadixIndex(block_size=BLOCK)
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
    assert list(index.evict(2) or []) == [2, 3]
    assert list(index.evict(1) or []) == [1]  # the tail before the head
    assert PrefixMatcher(index).match([1, 1, 1, 1]).match_length == 2


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


def test_events_tell_of_blocks_that_come_and_go() -> None:
    events = EventBus()
    seen: list[object] = []
    for kind in (BlocksStored, BlocksRemoved, IndexCleared):
        events.subscribe(kind, seen.append)
    index = RadixIndex(block_size=BLOCK, events=events)
    tokens, space = Tokens([1, 1, 2, 2, 3, 3]), Namespace()
    one, two, three = fingerprint(tokens, BLOCK)
    index.insert(Tokens([1, 1, 2, 2]), [7, 8])
    index.insert(tokens, [7, 8, 9])
    index.evict(2)
    index.clear()
    assert seen == [
        BlocksStored((7, 8), 0, (one, two), None, Tokens([1, 1, 2, 2]).tobytes(), space),
        BlocksStored((9,), 4, (three,), two, Tokens([3, 3]).tobytes(), space),
        BlocksRemoved((9,), "capacity", (three,), space),
        BlocksRemoved((8,), "capacity", (two,), space),
        BlocksRemoved((7,), "cleared", (one,), space),
        IndexCleared(),
    ]


def test_what_was_cut_off_an_edge_is_gone_and_can_come_back() -> None:
    index = filled([1, 1, 2, 2, 3, 3, 4, 4])
    for left in (3, 2, 1):
        index.evict(1)
        index.check()
        assert index.lookup(Tokens([1, 1, 2, 2, 3, 3, 4, 4])).num_blocks == left
        assert index.lookup(Tokens([1, 1, 2, 2])).num_blocks == min(2, left)
    index.insert(Tokens([1, 1, 2, 2, 9, 9]), [0, 11, 12])
    index.check()
    assert PrefixMatcher(index).match([1, 1, 2, 2, 9, 9]).block_ids == [0, 11, 12]
    assert PrefixMatcher(index).match([1, 1, 2, 2, 3, 3]).block_ids == [0, 11]


def test_explain_says_why_a_match_ends() -> None:
    clock = ManualClock()
    index = RadixIndex(block_size=BLOCK, clock=clock)
    index.insert(Tokens([1, 1, 2, 2, 3, 3]), [0, 1, 2])
    index.insert(Tokens([5, 5]), [3], Namespace(tenant="other"))
    index.insert(Tokens([8, 8]), [4])
    clock.advance(7.0)
    index.evict(2)  # the last two blocks of the oldest leaf
    clock.advance(1.0)

    def why(*tokens: int) -> tuple[int, MatchEnd, float | None]:
        report = index.explain(Tokens(tokens))
        return report.num_tokens, report.end, report.at_s

    assert why(1, 1) == (2, MatchEnd.COMPLETE, None)
    assert why(1, 1, 2) == (2, MatchEnd.COMPLETE, None)
    assert why(1, 1, 2, 2, 3, 3) == (2, MatchEnd.EVICTED, 7.0)
    assert why(1, 1, 7, 7) == (2, MatchEnd.NEVER_SEEN, None)
    assert why(1, 7) == (0, MatchEnd.NOT_ALIGNED, None)
    assert why(5, 5) == (0, MatchEnd.OTHER_NAMESPACE, None)
    assert "at 7.000 s (capacity)" in str(index.explain(Tokens([1, 1, 2, 2])))
    index.clear()
    assert why(8, 8) == (0, MatchEnd.EVICTED, 8.0)
    index.insert(Tokens([8, 8]), [4])
    assert why(8, 8) == (2, MatchEnd.COMPLETE, None)


def test_retention_biases_the_policy_and_decays() -> None:
    clock = ManualClock()
    index = RadixIndex(block_size=BLOCK, policy=LRUPolicy(), clock=clock)
    kept = (Retention(0, 2, priority=100, duration_s=10.0),)
    index.insert(Tokens([1, 1, 2, 2]), [0, 1], retention=kept)
    clock.advance(5.0)
    index.insert(Tokens([3, 3]), [2])
    index.check()
    assert list(index.evict(2) or ()) == [1, 2]  # its tail, then the younger one, since its head is retained
    clock.advance(6.0)
    index.insert(Tokens([4, 4]), [3])
    assert list(index.evict(1) or ()) == [0]  # eleven seconds are more than the bias was worth


def test_each_account_gives_up_its_own() -> None:
    index = RadixIndex(block_size=BLOCK, policy_factory=LRUPolicy)
    a, b = Account("a"), Account("b")
    index.insert(Tokens([1, 1]), [0], account=a)
    index.insert(Tokens([1, 1, 2, 2]), [0, 1], account=b)
    index.insert(Tokens([3, 3]), [2], account=a)
    assert dict(index.evictable_by_account()) == {Account(): 0, a: 2, b: 1}
    assert list(index.evict_from(a, 2)) == [2]  # block 0 leads to a block of b
    assert list(index.evict_from(b, 5)) == [1]
    assert list(index.evict_from(a, 1)) == [0]
    index.check()


def test_accounts_need_policies_of_their_own() -> None:
    index = RadixIndex(block_size=BLOCK, policy=LRUPolicy())
    with pytest.raises(BookkeepingError, match="policy_factory"):
        index.insert(Tokens([1, 1]), [0], account=Account("a"))
    assert index.num_cached == 0
    index.check()


def test_keys_that_clash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def clash(parent: object, first_block: bytes, salt: int = 0) -> int:
        return salt

    monkeypatch.setattr(tree_file, "content_key", clash)
    index = RadixIndex(block_size=BLOCK, policy=LRUPolicy())
    for token in range(1, 6):
        index.insert(Tokens([token, token, 7, 7]), [2 * token, 2 * token + 1])
        index.check()
    index.pin(index.lookup(Tokens([3, 3])))
    index.check()
    assert sorted(index.clear()) == [2, 3, 4, 5, 7, 8, 9, 10, 11]
    index.check()


@pytest.mark.parametrize("wrong", ["unpin", "blocks", "negative", "size"])
def test_misuse_is_told_and_changes_nothing(wrong: str) -> None:
    index = filled([1, 1, 2, 2])
    if wrong == "unpin":
        with pytest.raises(BookkeepingError, match="is not pinned"):
            index.unpin(index.lookup(Tokens([1, 1])))
    elif wrong == "blocks":
        with pytest.raises(BookkeepingError, match="3 blocks"):
            index.insert(Tokens([1, 1, 2, 2]), [1, 2, 3])
    elif wrong == "negative":
        with pytest.raises(BookkeepingError, match="-1"):
            index.evict(-1)
    else:
        with pytest.raises(ValueError, match="block_size"):
            RadixIndex(block_size=0)
    index.check()


BROKEN: dict[str, Callable[[RadixIndex, Node], object]] = {
    "blocks in the tree": lambda index, leaf: setattr(index.tree, "num_cached", 9),
    "pinned blocks in the tree": lambda index, leaf: setattr(index.tree, "num_pinned", 1),
    "blocks of Account": lambda index, leaf: setattr(leaf.share, "num_cached", 9),
    "wrongly": lambda index, leaf: index._leaves.by_key.clear(),
    "0 hits that end here": lambda index, leaf: setattr(leaf, "pins", 1),
    "2 blocks, 1 ids": lambda index, leaf: leaf.blocks.pop(),
    "two places": lambda index, leaf: leaf.blocks.__setitem__(0, 0),
    "does not know it": lambda index, leaf: setattr(leaf, "edge", leaf.edge[::-1]),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_check_names_what_is_broken(fault: str) -> None:
    index = filled([1, 1, 2, 2], [3, 3, 4, 4])
    index.check()
    leaf = index.lookup(Tokens([3, 3, 4, 4])).node
    assert isinstance(leaf, Node)
    BROKEN[fault](index, leaf)
    with pytest.raises(BookkeepingError, match=fault):
        index.check()
