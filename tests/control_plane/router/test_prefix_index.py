"""What the fleet's prefix index knows after each kind of event, against sets of prefixes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from sagellm.control_plane.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Gap,
    KVEventBatch,
    Malformed,
    ReceivedBatch,
    Restart,
    WireForm,
    from_wire,
    to_wire,
)
from sagellm.control_plane.router import _tree
from sagellm.control_plane.router.prefix_index import PrefixIndex
from sagellm.core.blocks import Tier
from sagellm.core.clock import ManualClock
from sagellm.core.errors import ConfigError
from sagellm.core.events import BlocksStored, IndexCleared
from sagellm.core.protocols.router import CachedPrefix
from sagellm.core.types import Namespace, Tokens
from tests.control_plane.router.fleet import Twin, block_hash, removed, stored
from tests.effort import examples

SPACES = (Namespace(), Namespace(tenant="a"), Namespace(adapter="b"))
SIZES = {"a": 2, "b": 2, "c": 1}
"""Block size of each instance."""
STALE_S = 10.0
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14)
names = st.sampled_from(sorted(SIZES))
spaces = st.sampled_from(SPACES)
tiers = st.sampled_from([Tier.HBM, Tier.HBM, Tier.DRAM, Tier.NVME])


def found(
    index: PrefixIndex, tokens: list[int], *instances: str, space: Namespace = Namespace()
) -> list[Any]:
    return [tuple(one) for one in index.lookup(Tokens(tokens), space, instances)]


class AgainstTwin(RuleBasedStateMachine):
    @initialize(max_edge=st.sampled_from([1, 2, 3, 512]))
    def begin(self, max_edge: int) -> None:
        self._former = _tree.MAX_EDGE_BLOCKS
        _tree.MAX_EDGE_BLOCKS = max_edge
        self.clock = ManualClock()
        self.index = PrefixIndex(self.clock, stale_s=STALE_S)
        self.twins = {name: Twin() for name in SIZES}
        self.stale: dict[str, float] = {}
        self.asked: list[tuple[list[int], Namespace]] = [([0, 1] * 4, Namespace())]
        for name in SIZES:
            self.index.join(name)

    def teardown(self) -> None:
        if hasattr(self, "_former"):
            _tree.MAX_EDGE_BLOCKS = self._former

    def _expire(self) -> None:
        for name, until_s in list(self.stale.items()):
            if self.clock.now() >= until_s:
                self.twins[name].expire()
                del self.stale[name]
            self.index.is_fresh(name)

    @rule(name=names, tokens=prompts, space=spaces, tier=tiers, first=st.integers(0, 4))
    def store(self, name: str, tokens: list[int], space: Namespace, tier: Tier, first: int) -> None:
        size = SIZES[name]
        tokens = tokens[: len(tokens) // size * size]
        event = stored(tokens, size, min(first, len(tokens) // size), space, tier)
        self.index.apply(name, event)
        self.twins[name].store(event, tokens, size)
        self.asked = [*self.asked[-6:], (tokens, space)]

    @rule(name=names, tier=tiers, data=st.data())
    def remove(self, name: str, tier: Tier, data: Any) -> None:
        held = sorted(self.twins[name].held.get(tier, {}))
        gone = data.draw(st.lists(st.sampled_from(held), max_size=4)) if held else [b"unknown"]
        self.index.apply(name, removed(gone, tier))
        self.twins[name].remove(gone, tier)

    @rule(name=names)
    def clear(self, name: str) -> None:
        self.index.apply(name, IndexCleared())
        self.twins[name].clear([Tier.HBM])
        if not self.twins[name].suspects:
            self.stale.pop(name, None)

    @rule(name=names)
    def restart(self, name: str) -> None:
        self.index.apply(name, Restart(1))
        self.twins[name] = Twin()
        self.stale.pop(name, None)

    @rule(name=names)
    def leave(self, name: str) -> None:
        self.index.leave(name)
        self.index.join(name)
        self.twins[name] = Twin()
        self.stale.pop(name, None)

    @rule(name=names)
    def lose_events(self, name: str) -> None:
        self.index.apply(name, Gap(1, 2))
        self.twins[name].gap()
        self.stale[name] = self.clock.now() + STALE_S

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self._expire()

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.check()
        for tokens, space in self.asked:
            expected = [self.twins[name].lookup(tokens, space, SIZES[name]) for name in SIZES]
            assert self.index.lookup(Tokens(tokens), space, SIZES) == expected
        for name in SIZES:
            assert self.index.is_fresh(name) is (name not in self.stale)
            held = self.twins[name].held.values()
            assert self.index.events_of(name).num_blocks == sum(map(len, held))
        if not any(twin.held.get(tier) for twin in self.twins.values() for tier in Tier):
            assert self.index.num_blocks == 0


def test_lookups_are_those_of_the_twin() -> None:
    run_state_machine_as_test(
        AgainstTwin, settings=settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
    )


events = st.one_of(
    st.builds(
        BlockStored,
        st.lists(st.integers(0, 5), max_size=4),
        st.none() | st.integers(0, 5),
        st.lists(st.integers(-1, 2**31), max_size=1) | st.lists(st.integers(0, 1), max_size=8),
        st.integers(1, 2),
        medium=st.sampled_from([None, "GPU", "CPU", "x"]),
        group_idx=st.sampled_from([None, None, 0, 1]),
        cache_salt=st.sampled_from([None, "s"]),
    ),
    st.builds(BlockRemoved, st.lists(st.integers(0, 5), max_size=4), st.sampled_from([None, "CPU"])),
    st.just(AllBlocksCleared()),
    st.just(Gap(0, 1)),
    st.just(Restart(1)),
    st.just(Malformed(1, "x")),
)


@given(st.lists(st.tuples(st.sampled_from("ab"), events), max_size=30), st.sampled_from([1, 2, 512]))
@settings(max_examples=examples(200), deadline=None)
def test_no_publisher_breaks_it(items: list[tuple[str, Any]], max_edge: int) -> None:
    """Hashes that repeat, in one event and in several places, and events that make no sense."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_tree, "MAX_EDGE_BLOCKS", max_edge)
        clock = ManualClock()
        index = PrefixIndex(clock, max_blocks=8, stale_s=3.0)
        for name, item in items:
            index.apply(name, item)
            clock.advance(1.0)
            index.check()
            index.lookup(Tokens([0, 1, 0]), Namespace(), "ab")
        for name in "ab":
            index.leave(name)
        index.check()
        assert index.num_blocks == 0


# -- single behaviours


def test_a_prefix_counts_up_to_the_first_block_that_is_missing() -> None:
    index = PrefixIndex(ManualClock())
    prompt = list(range(12))
    index.apply("a", stored(prompt, 2))
    index.apply("b", stored(prompt[:4], 2))
    assert found(index, [*prompt, 5], "a", "b", "unknown") == [(12, 12), (4, 4), (0, 0)]
    index.apply("a", removed([block_hash(Namespace(), prompt[:6], 2)]))
    assert found(index, prompt, "a", "b") == [(4, 4), (4, 4)]
    index.apply("a", stored(prompt[:6], 2, 2))
    assert found(index, prompt, "a") == [(12, 12)], "what stands behind the gap is used again"


def test_lower_tiers_count_apart() -> None:
    index = PrefixIndex(ManualClock())
    prompt = list(range(8))
    index.apply("a", stored(prompt, 2))
    index.apply("a", stored(prompt, 2, tier=Tier.DRAM))
    index.apply("a", removed([block_hash(Namespace(), prompt[:end], 2) for end in (8, 6)]))
    assert found(index, prompt, "a") == [(4, 8)]


def test_blocks_without_tokens_are_those_of_another_tier() -> None:
    """As vLLM's offloading names them."""
    index = PrefixIndex(ManualClock())
    event = stored(list(range(4)), 2)
    index.apply("a", BlocksStored((), 0, event.hashes, None, b"", Namespace(), Tier.DRAM))
    assert index.events_of("a").num_orphans == 2
    index.apply("a", event)
    index.apply("a", BlocksStored((), 0, event.hashes, None, b"", Namespace(), Tier.DRAM))
    index.apply("a", IndexCleared())
    assert found(index, list(range(4)), "a") == [(0, 4)]


@pytest.mark.parametrize("hash_form", ["bytes", "int64"])
def test_wire_and_bus_are_the_same(hash_form: Any) -> None:
    prompt, tenant = list(range(6)), Namespace(tenant="secret", adapter="x")
    form = WireForm(2, hash_form)
    head, tail = stored(prompt[:4], 2, 0, tenant), stored(prompt, 2, 2, tenant)
    index = PrefixIndex(ManualClock())
    index.apply("batch", ReceivedBatch(0, KVEventBatch(0.0, [to_wire(head, form), to_wire(tail, form)])))
    index.apply("read", from_wire(to_wire(head, form)))
    index.apply("read", to_wire(tail, form))
    index.apply("bus", head)
    index.apply("bus", tail)
    assert found(index, prompt, "batch", "read", "bus", space=tenant) == [(6, 6)] * 3
    assert found(index, prompt, "batch", "read", "bus") == [(0, 0)] * 3
    index.apply("batch", to_wire(removed(tail.hashes), form))
    assert found(index, prompt, "batch", space=tenant) == [(4, 4)]


def test_vllm_gives_the_salt_among_the_extra_keys() -> None:
    index = PrefixIndex(ManualClock())
    index.apply("a", BlockStored([1], None, [1, 2], 2, None, "GPU", "lora", [("lora", "salty")]))
    assert found(index, [1, 2], "a", space=Namespace("salty", "", "lora")) == [(2, 2)]
    assert found(index, [1, 2], "a", space=Namespace("", "", "lora")) == [(0, 0)]


def test_what_begins_in_the_middle_is_left_out_and_counted() -> None:
    index = PrefixIndex(ManualClock())
    index.apply("a", Gap(0, 9))
    index.apply("a", stored(list(range(8)), 2, 2))
    assert found(index, list(range(8)), "a") == [(0, 0)]
    counts = index.events_of("a")
    assert (counts.num_orphans, counts.num_gaps, counts.num_blocks) == (2, 1, 0)


def test_events_that_make_no_sense_are_counted() -> None:
    index = PrefixIndex(ManualClock())
    index.apply("a", BlockStored([1, 2], None, [1, 2, 3], 2))
    index.apply("a", BlockStored([1], None, [2**31], 1))
    index.apply("a", BlockStored([1], None, [1], 1, group_idx=1))
    counts = index.events_of("a")
    assert (counts.num_malformed, counts.num_ignored, counts.num_blocks) == (2, 1, 0)


def test_after_lost_events_blocks_are_confirmed_or_forgotten() -> None:
    clock = ManualClock()
    index = PrefixIndex(clock, stale_s=10.0)
    assert not index.is_fresh("a"), "an instance that nobody knows"
    first, second = [1, 2, 3, 4], [5, 6]
    index.apply("a", stored(first, 2))
    index.apply("a", stored(second, 2))
    assert index.is_fresh("a")
    index.apply("a", Gap(3, 4))
    index.apply("a", stored(first, 2))
    clock.advance(9.0)
    assert not index.is_fresh("a")
    assert found(index, second, "a") == [(2, 2)]
    clock.advance(1.0)
    assert index.is_fresh("a")
    assert (found(index, first, "a"), found(index, second, "a")) == ([(4, 4)], [(0, 0)])


def test_a_bound_on_the_blocks_of_an_instance() -> None:
    index = PrefixIndex(ManualClock(), max_blocks=64)
    for number in range(200):
        index.apply("a", stored([number, 1, 2, 3], 2))
    index.check()
    counts = index.events_of("a")
    assert counts.num_blocks <= 64
    assert counts.num_blocks + counts.num_forgotten == 400
    assert found(index, [199, 1, 2, 3], "a") == [(4, 4)]


def test_a_long_answer_extends_one_edge() -> None:
    index = PrefixIndex(ManualClock())
    tokens = list(range(1000))
    index.apply("a", stored(tokens[:10], 2))
    for end in range(12, 1001, 2):
        index.apply("a", stored(tokens[:end], 2, end // 2 - 1))
    index.check()
    assert len(index._tree.edges) == 1
    assert found(index, tokens, "a") == [(1000, 1000)]
    for end in range(1000, 10, -2):
        index.apply("a", removed([block_hash(Namespace(), tokens[:end], 2)]))
    assert index.num_blocks == 5


def test_indexes_of_instances_are_used_again() -> None:
    index = PrefixIndex(ManualClock())
    for number in range(100):
        index.apply(f"i{number}", stored([1, 2], 2))
        index.leave(f"i{number}")
        index.leave("unknown")
    index.apply("last", stored([1, 2], 2))
    assert [edge.device.full for edge in index._tree.edges.values()] == [1]


@pytest.mark.parametrize("options", [{"max_blocks": 0}, {"stale_s": -1.0}])
def test_bounds_that_are_none(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="max_blocks of at least 8"):
        PrefixIndex(ManualClock(), **options)


def test_a_large_fleet_with_several_prefixes() -> None:
    """Most instances have the common part, some more, some nothing; ids change from call to call."""
    index, prompt = PrefixIndex(ManualClock()), list(range(40))
    held = {f"i{number}": (0 if number % 7 == 0 else 4 + 2 * (number % 5 == 0)) for number in range(70)}
    for name, count in held.items():
        index.join(name)
        if count:
            index.apply(name, stored(prompt[:count], 2))
    for names in (list(held), list(held)[::-1], [], ["i1", "unknown"], list(held)[5:]):
        assert found(index, prompt, *names) == [(held.get(name, 0),) * 2 for name in names]


def test_nothing_is_cached_in_an_empty_index() -> None:
    assert PrefixIndex().lookup(Tokens([1]), Namespace(), ["a"]) == [CachedPrefix(0, 0)]
