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
from sagellm.core.protocols.eviction import EvictionPolicy, Hint, Run
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
        self.free: dict[int, Run] = {}
        self.pinned: dict[int, Run] = {}
        self.parents: dict[int, Run] = {}
        self.keys = 0
        self.tick = 0

    def extent(self, size: int, parent: int | None = None) -> Run:
        self.keys += 1
        self.tick += 1
        return Run(self.keys, size, parent, self.keys % 5, self.tick)

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
        self.free[key] = Run(key, old.num_blocks, old.parent_key, old.first_position, self.tick)
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
        head = Run(key, 1, old.parent_key, old.first_position, old.last_use)
        tail = Run(self.keys, old.num_blocks - 1, key, old.first_position + 1, old.last_use)
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
        given: list[int] = []

        def give_up(run: Run, num_blocks: int) -> Run | None:
            assert self.free[run.key] is run
            given.append(num_blocks)
            run.num_blocks -= num_blocks
            if run.num_blocks:
                return None
            del self.free[run.key]
            parent = self.parents.pop(run.key, None)
            if parent is not None:
                self.free[parent.key] = parent
            return parent

        reachable = sum(run.num_blocks for run in self.free.values())
        reachable += sum(parent.num_blocks for child, parent in self.parents.items() if child in self.free)
        assert self.policy.evict(count, give_up) == sum(given) == min(count, reachable)

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
        make(name).evict(-1, lambda extent, count: None)


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


def evicted(policy: EvictionPolicy, count: int) -> list[tuple[int, int]]:
    """What a policy gives up, as (key, blocks), in order."""
    given: list[tuple[int, int]] = []

    def give_up(run: Run, num_blocks: int) -> None:
        run.num_blocks -= num_blocks
        given.append((run.key, num_blocks))

    policy.evict(count, give_up)
    return given


def test_lru_gives_up_the_oldest_first() -> None:
    policy = make("lru")
    runs = [Run(key, 2, last_use=key) for key in range(4)]
    for run in runs:
        policy.insert(run)
    policy.pin(0)
    runs[0].last_use = 9
    policy.unpin(runs[0])
    assert evicted(policy, 5) == [(1, 2), (2, 2), (3, 1)]


def test_lru_lets_retained_extents_look_younger_by_their_bonus() -> None:
    policy = make("lru")
    for key, used_s, bonus_s in ((0, 0.0, 15.0), (1, 10.0, 0.0), (2, 20.0, 0.0)):
        policy.insert(Run(key, 1, last_use=key, used_s=used_s, bonus_s=bonus_s))
    assert [key for key, _ in evicted(policy, 3)] == [1, 0, 2]


def test_lru_gives_up_what_has_ended_first() -> None:
    policy = make("lru")
    for key in range(3):
        policy.insert(Run(key, 1, last_use=key))
    policy.hint(2, Hint(ended=True))
    assert [key for key, _ in evicted(policy, 2)] == [2, 0]
