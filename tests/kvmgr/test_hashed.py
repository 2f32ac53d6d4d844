"""The hashed index alone: clashing hashes, its bookkeeping, and policies that break their promise."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from sagellm.compat import PrefixMatcher
from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.eviction import Extent, GiveUp
from sagellm.core.types import Account, Namespace, Tokens
from sagellm.kvmgr.eviction import LRUPolicy
from sagellm.kvmgr.prefix_cache import hashed
from sagellm.kvmgr.prefix_cache.fingerprint import HASH_BYTES, chain
from sagellm.kvmgr.prefix_cache.hashed import HashedIndex
from tests.contracts.test_prefix_index import POLICIES, IndexMachine
from tests.effort import examples

BLOCK = 2


def one_bit(data: bytes, step: int, namespace: Namespace, parent: bytes | None = None) -> list[bytes]:
    """The chain with two hashes only: nearly every block clashes with another."""
    return [bytes([one[0] & 1]) * HASH_BYTES for one in chain(data, step, namespace, parent)]


def filled(*prompts: list[int], **options: Any) -> HashedIndex:
    index = HashedIndex(block_size=BLOCK, **options)
    for tokens in prompts:
        start = index.num_cached
        index.insert(Tokens(tokens), range(start, start + len(tokens) // BLOCK))
    return index


@pytest.mark.parametrize("policies", POLICIES)
def test_blocks_with_one_hash_are_never_taken_for_each_other(
    policies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashed, "chain", one_bit)
    options = {"max_ghosts": 0}
    kept = {"policies": policies, "options": options, "has_unique_hashes": False}
    machine: Any = type("Clashing", (IndexMachine,), kept)
    run_state_machine_as_test(machine, settings=settings(max_examples=examples(20), stateful_step_count=40))


def test_no_eviction_is_forgotten_or_dated_wrongly() -> None:
    machine: Any = type("Remembering", (IndexMachine,), {"may_forget": False})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples(20), stateful_step_count=40))


def test_a_clash_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashed, "chain", one_bit)
    index = filled([1, 1, 2, 2])
    same = next(one for one in range(3, 99) if _name([one, one]) == _name([1, 1]))
    assert index.lookup(Tokens([same, same])).num_blocks == 0
    index.insert(Tokens([same, same]), [9])
    assert PrefixMatcher(index).match([same, same]).block_ids == [9]
    assert PrefixMatcher(index).match([1, 1, 2, 2]).block_ids == [0, 1]
    index.check()


def _name(tokens: list[int]) -> bytes:
    return one_bit(Tokens(tokens).tobytes(), 4 * BLOCK, Namespace())[0]


@pytest.mark.parametrize("block_ids", [[7, 7], [7, -1], [0, 7], [7, 0], [2, 7]])
def test_a_block_has_one_place(block_ids: list[int]) -> None:
    index = filled([1, 1], [2, 2], [3, 3])
    with pytest.raises(BookkeepingError, match=r"different and not negative|in the index already"):
        index.insert(Tokens([2, 2, 4, 4]), block_ids)
    index.check()
    assert (index.num_cached, PrefixMatcher(index).match([2, 2, 4, 4]).block_ids) == (3, [1])


def test_a_block_moves_to_a_free_one() -> None:
    index = filled([1, 1], [2, 2], [3, 3])
    index.remap({0: 5, 1: 0, 9: 2})
    assert [PrefixMatcher(index).match([token] * 2).block_ids for token in (1, 2, 3)] == [[5], [0], [2]]
    for wrong in ({5: 2}, {5: 7, 0: 7}):
        with pytest.raises(BookkeepingError, match="a free one of its own"):
            index.remap(wrong)
        index.check()


def test_only_who_pinned_can_unpin() -> None:
    index = filled([1, 1, 2, 2])
    index.pin(index.lookup(Tokens([1, 1, 2, 2])))
    with pytest.raises(BookkeepingError, match="1 blocks that is not pinned"):
        index.unpin(index.lookup(Tokens([1, 1])))
    index.check()


def test_an_extent_is_one_block_and_comes_back_with_its_key() -> None:
    heard: list[Extent] = []

    class Listening(LRUPolicy):
        def insert(self, extent: Extent) -> None:
            heard.append(extent)
            super().insert(extent)

    index = HashedIndex(block_size=BLOCK, policy_factory=Listening)
    tokens, account = Tokens([1, 1, 2, 2]), Account("tenant")
    index.insert(tokens, [0, 1], account=account)
    index.evict(2)
    index.insert(tokens, [0, 1], account=account)
    tail, head, again = heard
    assert (tail.parent, tail.first_position, tail.num_uses) == (head, 1, 1)
    assert (head.parent, head.first_position, head.tenant) == (None, 0, "tenant")
    assert (tail.num_blocks, again.num_blocks, again.key) == (0, 1, tail.key)


def test_uses_are_counted_for_the_prefix_too() -> None:
    index = filled([1, 1, 2, 2])
    shorter = index.pin(index.lookup(Tokens([1, 1])))
    result = index.insert(Tokens([1, 1, 3, 3]), [0, 5], pin=True)
    prefix: Any = shorter.node
    tail: Any = result.hit.node
    assert (prefix.num_uses, tail.num_uses) == (3, 1)
    index.retract(result)
    assert prefix.num_uses == 2


class Greedy(LRUPolicy):
    """Gives up more of an extent than it has."""

    def evict(self, num_blocks: int, give_up: GiveUp) -> int:
        extent = next(iter(self._live.values()))[-1]
        give_up(extent, 2)
        return num_blocks


def test_a_policy_that_gives_up_more_than_an_extent_has_is_named() -> None:
    index = filled([1, 1], policy=Greedy())
    with pytest.raises(BookkeepingError, match="2 blocks of"):
        index.evict(1)
    index.check()
