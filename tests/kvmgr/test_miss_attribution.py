"""Why blocks were missing: each cause, over every index."""

from __future__ import annotations

from typing import Any

import pytest

from sagellm.core.clock import ManualClock
from sagellm.core.errors import ConfigError
from sagellm.core.events import EventBus
from sagellm.core.protocols.prefix_cache import MissCounts, PrefixReuseIndex, SpanState
from sagellm.core.registry import registry
from sagellm.core.types import NO_ACCOUNT, Account, Namespace, Tokens
from sagellm.kvmgr.prefix_cache.attribution import MissAttribution

BLOCK = 2
A, B = Namespace("a"), Namespace("b")
each_index = pytest.mark.parametrize("name", registry("index").names())


class World:
    """An index without a policy (last use decides), and who attributes its misses."""

    def __init__(self, name: str, **options: Any) -> None:
        self.clock, events = ManualClock(), EventBus()
        self.index: PrefixReuseIndex = registry("index").create(
            name, block_size=BLOCK, clock=self.clock, events=events
        )
        self.misses = MissAttribution(events, self.clock, **options)
        self.next_id = 0

    def put(self, text: str, namespace: Namespace = A, account: Account = NO_ACCOUNT) -> None:
        count = len(text) // BLOCK
        ids = range(self.next_id, self.next_id + count)
        self.next_id += count
        self.index.insert(tokens(text), ids, namespace, account=account)

    def ask(self, text: str, namespace: Namespace = A, **options: Any) -> MissCounts:
        hit = self.index.lookup(tokens(text), namespace)
        return self.misses.observe(self.index, hit.tokens, namespace, hit.num_blocks, **options)

    def states(self, text: str) -> list[SpanState]:
        return [span.state for span in self.misses.explain(self.index, tokens(text), A)]


def tokens(text: str) -> Tokens:
    return Tokens(map(ord, text))


@each_index
def test_what_nobody_computed_is_cold_and_what_is_no_whole_block_does_not_count(name: str) -> None:
    world = World(name)
    assert world.ask("abcdefg") == MissCounts(cold=3)
    world.put("abcd")
    assert world.ask("abcd") == MissCounts()
    assert world.ask("abcdxy") == MissCounts(cold=1)
    assert world.misses.snapshot() == MissCounts(cold=4)


@each_index
def test_evicted_blocks_are_told_by_age(name: str) -> None:
    world = World(name, premature_s=60.0)
    world.put("abcdefgh")
    world.index.evict(2)  # gh, ef
    world.clock.advance(50.0)
    world.index.evict(1)  # cd
    world.clock.advance(20.0)
    assert world.ask("abcdefghij") == MissCounts(cold=1, capacity=2, premature=1)
    world.clock.advance(40.0)
    assert world.ask("abcdefgh") == MissCounts(capacity=3)


@each_index
def test_what_follows_another_beginning_was_never_seen(name: str) -> None:
    world = World(name)
    world.put("abcdef")
    world.index.evict(3)
    assert world.ask("xycdef") == MissCounts(cold=3)
    assert world.ask("abxyef") == MissCounts(cold=2, premature=1)


@each_index
def test_edges_that_were_split_and_came_back_are_remembered_by_block(name: str) -> None:
    world = World(name, premature_s=0.0)
    world.put("aabbccdd")
    world.put("aabbxx")  # splits the first
    world.index.evict(5)
    world.put("aayyzz")  # comes back in part, and goes elsewhere
    assert world.ask("aabbccdd") == MissCounts(capacity=3)
    assert world.ask("aabbxxdd") == MissCounts(cold=1, capacity=2)


@each_index
def test_what_may_be_forgotten_is_not_called_new(name: str) -> None:
    world = World(name, max_ghosts=2)
    assert world.states("abcd") == [SpanState.NEVER_SEEN]
    world.put("abcdef")
    world.index.evict(3)
    assert world.states("xyz!") == [SpanState.UNKNOWN]
    assert set(world.states("abcdef")) == {SpanState.EVICTED, SpanState.UNKNOWN}


@each_index
def test_what_was_cleared_in_part_is_not_called_new(name: str) -> None:
    world = World(name)
    world.put("abcdef")
    used = world.index.pin(world.index.lookup(tokens("ab"), A))
    world.index.clear()
    assert world.states("abcdef") == [SpanState.HIT, SpanState.UNKNOWN]
    world.index.unpin(used)


@each_index
def test_an_eviction_is_known_after_an_insertion_that_was_undone(name: str) -> None:
    world = World(name, premature_s=0.0)
    world.put("abcd")
    world.index.evict(2)
    world.index.retract(world.index.insert(tokens("abcd"), [8, 9], A, pin=True))
    assert world.states("abcd") == [SpanState.EVICTED]
    assert world.ask("abcdef") == MissCounts(cold=1, capacity=2)


@each_index
def test_quota(name: str) -> None:
    world, account = World(name), Account("x")
    world.put("abcd", account=account)
    world.index.evict_from(account, 1, "quota")
    assert world.ask("abcdef") == MissCounts(cold=1, quota=1)


@each_index
def test_preemption(name: str) -> None:
    world = World(name)
    world.put("abcd")
    world.index.evict(1)
    assert world.ask("abcdef", preempted=True) == MissCounts(cold=1, preemption=1)


@each_index
def test_namespace(name: str) -> None:
    world = World(name)
    world.put("abcd", B)
    assert world.ask("abcdef") == MissCounts(cold=1, namespace=2)
    world.put("ab", A)
    world.index.evict(1)  # cd of B, the oldest leaf
    assert world.ask("abcdef") == MissCounts(cold=2)
    world.put("abcd", B)
    assert world.ask("abcdef") == MissCounts(cold=1, namespace=1)


@each_index
def test_what_was_evicted_here_is_no_matter_of_namespaces(name: str) -> None:
    world = World(name)
    world.put("abcd", A)
    world.index.evict(2)
    world.put("abcdef", B)
    assert world.ask("abcdef") == MissCounts(premature=2, namespace=1)


@each_index
def test_ids_of_local_scope_are_not_looked_for_elsewhere(name: str) -> None:
    world = World(name, across_namespaces=False)
    world.put("abcd", B)
    assert world.ask("abcd") == MissCounts(cold=2)


@each_index
def test_blocks_that_are_resident_are_not_missing_even_if_a_hit_was_cut_short(name: str) -> None:
    world = World(name)
    world.put("abcd")
    prompt = tokens("abcdef")
    assert world.misses.observe(world.index, prompt, A, 1) == MissCounts(cold=1)


@each_index
def test_a_cleared_index_knows_nothing(name: str) -> None:
    world = World(name)
    world.put("abcd")
    world.index.evict(1)
    world.index.clear()
    assert world.ask("abcd") == MissCounts(cold=2)


@each_index
def test_what_was_retracted_was_not_computed(name: str) -> None:
    world = World(name)
    world.put("ab")
    result = world.index.insert(
        tokens("abcd"), [world.index.block_ids(world.index.lookup(tokens("ab"), A))[0], 9], A, pin=True
    )
    world.index.retract(result)
    assert world.ask("abcd") == MissCounts(cold=1)


@each_index
def test_the_oldest_evictions_are_forgotten_first(name: str) -> None:
    world = World(name, max_ghosts=2)
    for text in ("ab", "cd", "ef"):
        world.put(text)
        world.index.evict(1)
    world.put("cd")
    world.index.evict(1)  # again: the last one now
    world.put("gh")
    world.index.evict(1)
    assert [world.ask(text).cold for text in ("ab", "ef", "cd", "gh")] == [1, 1, 0, 0]


@pytest.mark.parametrize("options", [{"premature_s": -1.0}, {"premature_s": float("nan")}, {"max_ghosts": 0}])
def test_options_out_of_range(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must"):
        World("radix", **options)
