"""What every policy must do: exactly n blocks, never a pinned one, tails before heads.

Runs over all registered policies, and over those that `SAGELLM_POLICIES` names, separated by commas:

    SAGELLM_POLICIES=my_policy:Mine python -m pytest tests/contracts/test_eviction.py -k my_policy
"""

from __future__ import annotations

import os
from collections import deque
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
from sagellm.core.protocols.eviction import EvictionPolicy, Hint, SimpleExtent, UseListener
from sagellm.core.registry import registry
from tests.effort import examples

POLICIES = [*registry("policy").names(), *filter(None, os.environ.get("SAGELLM_POLICIES", "").split(","))]
CLASSIC = ["arc", "cost_benefit", "fifo", "hotspot", "lfu", "lru", "qos", "s3fifo", "sieve", "slo", "two_q"]
"""Those that remember nothing beyond their capacity; the learning ones have longer memories, bounded too."""


def make(name: str) -> EvictionPolicy:
    policy: EvictionPolicy = registry("policy").create(name)
    return policy


class PolicyMachine(RuleBasedStateMachine):
    """Extents come, are pinned, unpinned, split and evicted; some have a parent that becomes a leaf."""

    name = ""

    def __init__(self) -> None:
        super().__init__()
        self.policy = make(self.name)
        self.free: dict[int, SimpleExtent] = {}
        self.pinned: dict[int, SimpleExtent] = {}
        self.parents: dict[int, SimpleExtent] = {}
        self.keys = 0
        self.tick = 0

    def extent(self, size: int, parent: SimpleExtent | None = None) -> SimpleExtent:
        self.keys += 1
        self.tick += 1
        first = 0 if parent is None else parent.first_position + parent.num_blocks
        return SimpleExtent(self.keys, size, parent, first, self.tick, used_s=float(self.tick))

    @rule(size=st.integers(1, 6), has_parent=st.booleans())
    def insert(self, size: int, has_parent: bool) -> None:
        parent = self.extent(2) if has_parent else None
        extent = self.extent(size, parent)
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
        run = self.free[key] = self.pinned.pop(key)
        run.num_uses += 1
        run.last_use, run.used_s = self.tick, float(self.tick)
        self.policy.unpin(run)

    @rule(size=st.integers(1, 3))
    def unpin_a_stranger(self, size: int) -> None:
        """A leaf that was pinned from its birth comes by `unpin`."""
        extent = self.extent(size)
        self.policy.unpin(extent)
        self.free[extent.key] = extent

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def becomes_inner(self, data: st.DataObject) -> None:
        """It gets a child, and comes back as its parent."""
        key = data.draw(st.sampled_from(sorted(self.free)))
        parent = self.free.pop(key)
        self.policy.remove(key)
        child = self.extent(1, parent)
        self.parents[child.key] = parent
        self.policy.insert(child)
        self.free[child.key] = child

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
        tail = self.free.pop(key)
        self.keys += 1
        above = self.parents.get(key)
        head = SimpleExtent(key, 1, above, tail.first_position, tail.last_use)
        # as an index does: the living object becomes the tail, below a new head of the old key
        tail.key, tail.num_blocks, tail.first_position = (
            self.keys,
            tail.num_blocks - 1,
            head.first_position + 1,
        )
        self.policy.split(key, head, tail)
        self.parents[tail.key] = head
        self.free[tail.key] = tail

    @rule()
    def split_what_it_does_not_hold(self) -> None:
        """Inner extents are split too; it is no business of the policy's order."""
        head = self.extent(1)
        self.policy.split(head.key, head, self.extent(2, head))

    @precondition(lambda self: self.free or self.pinned)
    @rule(
        data=st.data(),
        hint=st.builds(
            Hint,
            priority=st.none() | st.integers(-2, 2),
            duration_s=st.none() | st.floats(0, 100),
            ended=st.booleans(),
            superseded=st.booleans(),
            wanted_by=st.integers(0, 2),
        ),
    )
    def hint(self, data: st.DataObject, hint: Hint) -> None:
        key = data.draw(st.sampled_from(sorted(self.free | self.pinned)))
        self.policy.hint(key, hint)
        self.policy.hint(-1, hint)  # unknown keys are no error

    @rule(count=st.integers(0, 12))
    def evict(self, count: int) -> None:
        given: list[int] = []
        reachable = sum(self.above(run) for run in self.free.values())

        def give_up(run: SimpleExtent, num_blocks: int) -> SimpleExtent | None:
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

        assert self.policy.evict(count, give_up) == sum(given) == min(count, reachable)

    def above(self, run: SimpleExtent) -> int:
        """Blocks of an extent and of all that become leaves when it goes."""
        parent = self.parents.get(run.key)
        return run.num_blocks + (self.above(parent) if parent is not None else 0)

    @invariant()
    def books_balance(self) -> None:
        self.policy.check()
        assert self.policy.num_evictable == sum(extent.num_blocks for extent in self.free.values())


@pytest.mark.parametrize("name", POLICIES)
def test_state_machine(name: str) -> None:
    machine: Any = type(f"Policy_{name.replace(':', '_')}", (PolicyMachine,), {"name": name})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples(40), stateful_step_count=30))


def size_of(thing: Any, seen: set[int]) -> int:
    """Items in all containers that can be reached from an object of ours."""
    if id(thing) in seen or isinstance(thing, str | bytes | int | float | type | SimpleExtent):
        return 0
    seen.add(id(thing))
    inner: list[Any] = []
    if isinstance(thing, dict):
        inner += [*thing.keys(), *thing.values()]
    elif isinstance(thing, list | tuple | set | frozenset | deque):
        inner += thing
    elif type(thing).__module__.startswith("sagellm"):
        slots = [name for one in type(thing).__mro__ for name in getattr(one, "__slots__", ())]
        inner += [*getattr(thing, "__dict__", {}).values(), *(getattr(thing, name, None) for name in slots)]
    return len(inner) + sum(size_of(one, seen) for one in inner)


@pytest.mark.parametrize("name", CLASSIC)
def test_memory_is_bounded(name: str) -> None:
    check_memory(name, step=750)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_memory_is_bounded_in_the_long_run(name: str) -> None:
    check_memory(name, step=4_000)


def check_memory(name: str, step: int) -> None:
    """Whatever comes and goes: new blocks, tenants, hints, pins that never come back.

    For a `UseListener` they do come back: it accounts for pinned blocks too, whose number the pool bounds.
    """
    policies = registry("policy")
    options = {"capacity": 50} if "capacity" in policies.options(name) else {}
    policy: EvictionPolicy = policies.create(name, **options)
    pinned: deque[SimpleExtent] = deque()

    def churn(first: int, last: int) -> int:
        for key in range(first, last):
            extent = SimpleExtent(key, 1, last_use=key, used_s=float(key), tenant=f"tenant {key % 200}")
            policy.insert(extent)
            if key % 3 == 0:
                policy.hint(key, Hint(wanted_by=key % 2, priority=key % 5, duration_s=1.0))
                policy.pin(key)
                policy.hint(key, Hint(wanted_by=1))
                pinned.append(extent)
            if isinstance(policy, UseListener) and len(pinned) > 100:
                policy.unpin(pinned.popleft())
            policy.evict(max(0, policy.num_evictable - 50), lambda extent, count: None)
        policy.check()
        return size_of(policy, set())

    sizes = [churn(first, first + step) for first in range(0, 12 * step, step)]
    assert max(sizes[6:]) <= 1.1 * max(sizes[:6]) + 100


@pytest.mark.parametrize("name", POLICIES)
def test_negative_counts_are_errors(name: str) -> None:
    with pytest.raises(BookkeepingError):
        make(name).evict(-1, lambda extent, count: None)


def evicted(policy: EvictionPolicy, count: int) -> list[tuple[int, int]]:
    """What a policy gives up, as (key, blocks), in order."""
    given: list[tuple[int, int]] = []

    def give_up(run: SimpleExtent, num_blocks: int) -> None:
        run.num_blocks -= num_blocks
        given.append((run.key, num_blocks))

    policy.evict(count, give_up)
    return given


def test_lru_gives_up_the_oldest_first() -> None:
    policy = make("lru")
    runs = [SimpleExtent(key, 2, last_use=key) for key in range(4)]
    for run in runs:
        policy.insert(run)
    policy.pin(0)
    runs[0].last_use = 9
    policy.unpin(runs[0])
    assert evicted(policy, 5) == [(1, 2), (2, 2), (3, 1)]


def test_lru_lets_retained_extents_look_younger_by_their_bonus() -> None:
    policy = make("lru")
    for key, used_s, bonus_s in ((0, 0.0, 15.0), (1, 10.0, 0.0), (2, 20.0, 0.0)):
        policy.insert(SimpleExtent(key, 1, last_use=key, used_s=used_s, bonus_s=bonus_s))
    assert [key for key, _ in evicted(policy, 3)] == [1, 0, 2]


def test_lru_gives_up_what_has_ended_first() -> None:
    policy = make("lru")
    for key in range(3):
        policy.insert(SimpleExtent(key, 1, last_use=key))
    policy.hint(2, Hint(ended=True))
    assert [key for key, _ in evicted(policy, 2)] == [2, 0]
