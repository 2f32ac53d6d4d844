"""What every registered policy must do: exactly n blocks or none, never a pinned one, tails before heads."""

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
from sagellm.core.protocols.eviction import EvictionPolicy, Extent, Hint
from sagellm.core.registry import registry
from sagellm.kvmgr.eviction import EvictionCandidate

POLICIES = registry("policy").names()


def make(name: str) -> EvictionPolicy:
    policy: EvictionPolicy = registry("policy").create(name)
    return policy


class PolicyMachine(RuleBasedStateMachine):
    """Extents come, are pinned, unpinned, split and evicted; some have a parent that becomes a leaf."""

    name = ""

    def __init__(self) -> None:
        super().__init__()
        self.policy = make(self.name)
        self.free: dict[int, Extent] = {}
        self.pinned: dict[int, Extent] = {}
        self.parents: dict[int, Extent] = {}
        self.keys = 0
        self.tick = 0

    def extent(self, size: int, parent: int | None = None) -> Extent:
        self.keys += 1
        self.tick += 1
        return Extent(self.keys, parent, size, self.keys % 5, self.tick)

    @rule(size=st.integers(1, 6), has_parent=st.booleans())
    def insert(self, size: int, has_parent: bool) -> None:
        parent = self.extent(2) if has_parent else None
        extent = self.extent(size, parent.key if parent else None)
        if parent is not None:
            self.parents[extent.key] = parent
        self.policy.insert(extent)
        self.free[extent.key] = extent

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.free)))
        self.policy.pin(key)
        self.pinned[key] = self.free.pop(key)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.pinned)))
        self.tick += 1
        old = self.pinned.pop(key)
        self.free[key] = Extent(key, old.parent, old.num_blocks, old.first_position, self.tick)
        self.policy.unpin(self.free[key])

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.free)))
        self.policy.remove(key)
        del self.free[key]

    @precondition(lambda self: any(extent.num_blocks > 1 for extent in self.free.values()))
    @rule(data=st.data())
    def split(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(k for k, e in self.free.items() if e.num_blocks > 1)))
        old = self.free.pop(key)
        self.keys += 1
        head = Extent(key, old.parent, 1, old.first_position, old.last_use)
        tail = Extent(self.keys, key, old.num_blocks - 1, old.first_position + 1, old.last_use)
        self.policy.split(key, head, tail)
        self.free[tail.key] = tail

    @precondition(lambda self: self.free)
    @rule(data=st.data(), ended=st.booleans(), priority=st.one_of(st.none(), st.integers(-2, 2)))
    def hint(self, data: st.DataObject, ended: bool, priority: int | None) -> None:
        key = data.draw(st.sampled_from(sorted(self.free)))
        self.policy.hint(key, Hint(priority=priority, ended=ended))
        self.policy.hint(-1, Hint(ended=True))  # unknown keys are no error

    @rule(count=st.integers(0, 12))
    def evict(self, count: int) -> None:
        emptied: list[int] = []

        def on_emptied(key: int) -> Extent | None:
            emptied.append(key)
            self.free.pop(key)
            parent = self.parents.pop(key, None)
            if parent is not None:
                self.free[parent.key] = parent
            return parent

        reachable = sum(e.num_blocks for e in self.free.values())
        reachable += sum(p.num_blocks for child, p in self.parents.items() if child in self.free)
        if count > reachable:
            assert self.policy.evict(self.policy.num_evictable + 1) is None
            return
        victims = self.policy.evict(count, on_emptied)
        assert victims is not None
        assert sum(victim.num_blocks for victim in victims) == count
        assert not {victim.key for victim in victims} & self.pinned.keys()
        for victim in victims:
            if victim.key in self.free:
                old = self.free[victim.key]
                assert victim.num_blocks < old.num_blocks
                left = old.num_blocks - victim.num_blocks
                self.free[victim.key] = Extent(old.key, old.parent, left, old.first_position, old.last_use)

    @invariant()
    def books_balance(self) -> None:
        self.policy.check()
        assert self.policy.num_evictable == sum(extent.num_blocks for extent in self.free.values())


@pytest.mark.parametrize("name", POLICIES)
def test_state_machine(name: str) -> None:
    machine: Any = type(f"Policy_{name}", (PolicyMachine,), {"name": name})
    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=30))


@pytest.mark.parametrize("name", POLICIES)
def test_negative_counts_are_errors(name: str) -> None:
    with pytest.raises(BookkeepingError, match="-1"):
        make(name).evict(-1)


@pytest.mark.parametrize("name", POLICIES)
def test_the_form_of_the_design_documents(name: str) -> None:
    policy: Any = make(name)
    candidates = [
        EvictionCandidate("old", [1, 2], 1.0),
        EvictionCandidate("held", [3, 4, 5], 0.0, is_pinned=True),
        EvictionCandidate("new", [6, 7], 3.0),
        EvictionCandidate("middle", [8], 2.0),
    ]
    victims = policy.select_victims(candidates, required_blocks=3)
    assert "held" not in victims
    assert sum(len(c.block_ids) for c in candidates if c.sequence_id in victims) >= 3
    assert policy.select_victims(candidates, required_blocks=6) == []
    assert policy.num_evictable == 0


def test_lru_gives_up_the_oldest_first() -> None:
    policy = make("lru")
    for key in range(4):
        policy.insert(Extent(key, None, 2, last_use=key))
    policy.pin(0)
    policy.unpin(Extent(0, None, 2, last_use=9))
    victims = policy.evict(5)
    assert victims is not None
    assert [(victim.key, victim.num_blocks) for victim in victims] == [(1, 2), (2, 2), (3, 1)]
