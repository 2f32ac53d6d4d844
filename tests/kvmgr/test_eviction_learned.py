"""`learned`: its records of paths, through the real index, and the order that follows."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from sagellm.compat import EvictionCandidate, select_victims
from sagellm.core.clock import ManualClock
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.eviction import EvictionPolicy, Hint, SimpleExtent, Use
from sagellm.core.types import Retention, Tokens
from sagellm.kvmgr.eviction import LRUPolicy
from sagellm.kvmgr.eviction._history import MAX_BRANCHES
from sagellm.kvmgr.eviction.adaptive import history
from sagellm.kvmgr.eviction.adaptive.history import FEW_KINDS, FIT_FIRST, SHARED, ReuseRecord
from sagellm.kvmgr.eviction.learned import LearnedPolicy
from sagellm.kvmgr.prefix_cache.radix import RadixIndex
from tests.eviction_workloads import Request, mixed

"""When, and which blocks."""


class Cache:
    """The real index with a policy, of block size 1: what is missing is inserted at once, evicting exactly
    that much."""

    def __init__(self, policy: EvictionPolicy, clock: ManualClock, capacity: int = 1_000) -> None:
        self.policy, self.clock, self.capacity = policy, clock, capacity
        self.index = RadixIndex(block_size=1, policy=policy, clock=clock)
        self.evicted: list[int] = []
        self._num_made = 0

    def ask(
        self,
        time_s: float,
        blocks: Iterable[int],
        num_output_tokens: int = 0,
        retention: Sequence[Retention] = (),
    ) -> int:
        """A request comes and goes; returns how many of its blocks were here."""
        self.clock.advance(time_s - self.clock.now())
        tokens = Tokens(blocks)
        index = self.index
        hit = index.pin(index.lookup(tokens))
        found, missing = hit.num_blocks, len(tokens) - hit.num_blocks
        self.evict(max(0, index.num_cached + missing - self.capacity))
        ids = array("i", [*index.block_ids(hit), *range(self._num_made, self._num_made + missing)])
        self._num_made += missing
        whole = index.insert(tokens, ids, retention=retention, pin=True).hit
        index.unpin(hit)
        index.unpin(whole, Use(num_output_tokens, found))
        return found

    def ask_all(self, requests: Iterable[Request]) -> int:
        return sum(self.ask(time_s, blocks) for time_s, blocks in requests)

    def evict(self, num_blocks: int) -> None:
        freed = self.index.evict(num_blocks)
        assert freed is not None
        self.evicted += freed

    def check(self) -> None:
        self.index.check()
        self.policy.check()


class LearnedCache(Cache):
    """With `learned`, and access to its records."""

    def __init__(self, capacity: int = 1_000, max_records: int = 16_384) -> None:
        clock = ManualClock()
        self.learned = LearnedPolicy(capacity=capacity, clock=clock, max_records=max_records)
        super().__init__(self.learned, clock, capacity)

    @property
    def records(self) -> list[ReuseRecord]:
        return sorted(self.learned._history, key=lambda record: (record.used_s, record.end))

    def run(self, blocks: Iterable[int]) -> int:
        """The key of the extent at the end of a path that is here."""
        extent: Any = self.index.lookup(Tokens(blocks)).node
        key: int = extent.key
        return key


def lru(capacity: int = 1_000) -> Cache:
    return Cache(LRUPolicy(), ManualClock(), capacity)


def open_records(cache: LearnedCache) -> list[ReuseRecord]:
    return [record for record in cache.records if record.is_open]


def conversation(cache: LearnedCache) -> None:
    for time_s, length in ((0.0, 5), (10.0, 8), (40.0, 12)):
        cache.ask(time_s, range(length))


# -- records


def test_a_conversation_counts_its_turns_and_gaps() -> None:
    cache = LearnedCache()
    conversation(cache)
    first, second, third = cache.records
    assert [record.turn for record in cache.records] == [1, 2, 3]
    assert [record.end for record in cache.records] == [5, 8, 12]
    assert (first.gap_s, second.gap_s, third.gap_s) == (10.0, 30.0, None)
    assert (first.next_use_s, second.next_use_s, third.next_use_s) == (10.0, 40.0, None)
    assert [record.is_open for record in cache.records] == [False, False, True]
    cache.check()


def test_a_prompt_that_comes_again_as_it_was_is_a_turn_too() -> None:
    cache = LearnedCache()
    for time_s in (0.0, 7.0, 20.0):
        cache.ask(time_s, range(5))
    (record,) = cache.records
    assert (record.turn, record.end, record.used_s, record.is_open) == (3, 5, 20.0, True)


def test_two_conversations_are_two_paths() -> None:
    cache = LearnedCache()
    cache.ask(0.0, range(5))
    cache.ask(1.0, range(100, 105))
    assert [record.turn for record in cache.records] == [1, 1]


def test_a_whole_conversation_that_was_evicted_goes_on_from_its_ghost() -> None:
    cache = LearnedCache()
    conversation(cache)
    cache.evict(cache.index.num_cached)
    (ghost,) = cache.records
    assert (ghost.turn, ghost.end, ghost.used_s, ghost.is_open) == (3, 12, 40.0, True)
    assert cache.ask(100.0, range(15)) == 0
    (again,) = cache.records
    assert (again.turn, again.end) == (4, 15)
    assert (ghost.gap_s, ghost.next_use_s, ghost.is_open) == (60.0, 100.0, False)


def test_when_a_tail_is_given_up_the_record_moves_to_its_parent() -> None:
    cache = LearnedCache()
    conversation(cache)
    (last,) = open_records(cache)
    cache.evict(4)  # the third turn's own blocks
    assert last.key == cache.run(range(8))
    assert open_records(cache) == [last]
    cache.evict(1)
    assert cache.ask(100.0, range(12)) == 7
    (again,) = open_records(cache)
    assert (again.turn, last.gap_s) == (4, 60.0)
    cache.check()


def test_a_prompts_end_that_its_continuation_does_not_repeat_is_superseded() -> None:
    cache = LearnedCache()
    cache.ask(0.0, range(10))
    cache.ask(20.0, [*range(9), *range(50, 55)])
    first, rest, second = cache.records
    assert (first.end, first.is_open, first.gap_s) == (9, False, 20.0)
    assert (rest.end, rest.is_open, rest.features[-1]) == (10, True, 1)
    assert (second.end, second.turn, second.features[-1]) == (14, 2, 0)


def test_a_branch_near_the_beginning_supersedes_nothing() -> None:
    cache = LearnedCache()
    cache.ask(0.0, range(10))
    cache.ask(20.0, [*range(3), *range(50, 55)])
    old = next(record for record in open_records(cache) if record.end == 10)
    assert (old.used_s, old.turn, old.features[-1]) == (0.0, 1, 0)
    assert old.key == cache.run(range(10))


@pytest.mark.parametrize(("num_branches", "is_shared"), [(MAX_BRANCHES, False), (MAX_BRANCHES + 4, True)])
def test_a_prefix_that_many_share_becomes_shared(num_branches: int, is_shared: bool) -> None:
    cache = LearnedCache()
    for number in range(num_branches):
        cache.ask(5.0 * number, [*range(6), *range(100 * number + 100, 100 * number + 103)])
    shared = [record for record in cache.records if record.kind == SHARED]
    assert bool(shared) is is_shared
    for record in shared:
        assert record.key == cache.run(range(6))
        assert record.used_s == 5.0 * (num_branches - 1)
    late = [record for record in open_records(cache) if record.turn == 1][1:]
    assert len(late) == max(0, num_branches - MAX_BRANCHES - 1)
    assert len(open_records(cache)) == num_branches


@pytest.mark.parametrize("max_records", [10, 100])
def test_records_are_bounded_ghosts_included(max_records: int) -> None:
    cache = LearnedCache(capacity=50, max_records=max_records)
    most = 0
    for time_s, blocks in mixed(0, 150):
        cache.ask(time_s, blocks)
        most = max(most, len(cache.learned._history))
        assert len(cache.learned._history._open) == len(open_records(cache))
    assert most == max_records
    assert len(cache.learned._history._open._kind) <= max_records + 1
    cache.check()


# -- learned and LRU


def test_until_the_first_fit_the_victims_are_those_of_lru() -> None:
    caches = [LearnedCache(60), lru(60)]
    requests = mixed(1, 400)[: FIT_FIRST - 1]
    for cache in caches:
        cache.ask_all(requests)
        cache.check()
    assert not caches[0].policy._model.num_fits  # type: ignore[attr-defined]
    assert len(caches[0].evicted) > 300
    assert caches[0].evicted == caches[1].evicted


def test_after_a_fit_they_are_not() -> None:
    caches = [LearnedCache(60), lru(60)]
    for cache in caches:
        cache.ask_all(mixed(1, 400))
    assert caches[0].policy._model.num_fits  # type: ignore[attr-defined]
    assert caches[0].evicted != caches[1].evicted


@pytest.mark.parametrize("few_kinds", [FEW_KINDS, 0])
@pytest.mark.parametrize("seed", range(5))
def test_it_keeps_the_conversations_beside_what_asks_once(
    monkeypatch: pytest.MonkeyPatch, seed: int, few_kinds: int
) -> None:
    """LRU has room for 400 blocks, and some 650 new ones come between two turns. 0: all fits in parts."""
    monkeypatch.setattr(history, "FEW_KINDS", few_kinds)
    requests = mixed(seed, 400)
    num_asked = sum(len(blocks) for _, blocks in requests)
    learned, plain = LearnedCache(400), lru(400)
    lead = learned.ask_all(requests) - plain.ask_all(requests)
    assert lead > 0.15 * num_asked
    learned.check()


def test_a_fit_of_many_kinds_takes_several_evictions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its end the order is that of before: here that of LRU."""
    monkeypatch.setattr(history, "FEW_KINDS", 0)
    cache, plain = LearnedCache(60), lru(60)
    model, records = cache.learned._model, cache.learned._history
    evictions_in_fit = 0
    for time_s, blocks in mixed(1, 400):
        if model.num_fits:
            break
        evictions_in_fit += records._fit is not None
        cache.ask(time_s, blocks)
        plain.ask(time_s, blocks)
        cache.check()
        if not model.num_fits:
            assert cache.evicted == plain.evicted
    assert model.num_fits == 1
    assert records._fit is None
    assert evictions_in_fit >= 4  # three rounds, and the values


def test_a_prefix_that_many_share_is_kept() -> None:
    cache = LearnedCache(60)
    draw, time_s = random.Random(2), 0.0
    found = []
    for number in range(300):
        time_s += draw.expovariate(1.0)
        found.append(cache.ask(time_s, [*range(20), *range(100 * number + 100, 100 * number + 110)]))
    assert set(found[1:]) == {20}


def test_without_a_clock_time_is_that_of_the_latest_use() -> None:
    requests = mixed(3, 200)
    clock = ManualClock()
    hits: list[int] = []
    for policy in (LearnedPolicy(capacity=400, clock=clock), LearnedPolicy(capacity=400)):
        hits.append(Cache(policy, ManualClock() if hits else clock, 400).ask_all(requests))
    plain = lru(400).ask_all(requests)
    assert hits[1] - plain > 0.8 * (hits[0] - plain) > 0


# -- hints, retention, candidates


def fitted() -> LearnedCache:
    """A cache that has learned, and then holds four prompts alike, the first the oldest."""
    cache = LearnedCache(400)
    cache.ask_all(mixed(4, 200))
    cache.evict(cache.index.num_cached)
    now_s = cache.clock.now()
    for number in range(4):
        cache.ask(now_s + 1.0 + 10.0 * number, prompt(number))
    assert cache.learned._model.num_fits
    return cache


def prompt(number: int) -> range:
    return range(900_000 + 100 * number, 900_012 + 100 * number)


def kept(cache: Cache) -> list[int]:
    """Which of the four prompts are here whole."""
    return [number for number in range(4) if cache.index.lookup(Tokens(prompt(number))).num_blocks == 12]


def order(cache: Cache) -> list[int]:
    """In which order the four go."""
    gone: list[int] = []
    for _ in range(4):
        cache.evict(12)
        gone += [number for number in range(4) if number not in kept(cache) and number not in gone]
        cache.check()
    return gone


@pytest.mark.parametrize("hint", [Hint(ended=True), Hint(superseded=True)])
def test_what_has_ended_goes_first(hint: Hint) -> None:
    unhinted, cache = fitted(), fitted()
    usual = order(unhinted)
    last = usual[-1]
    cache.index.hint(cache.index.lookup(Tokens(prompt(last))), hint)
    assert order(cache) == [last, *usual[:-1]]


def test_what_is_wanted_goes_last() -> None:
    cache = fitted()
    first = order(fitted())[0]
    hit = cache.index.lookup(Tokens(prompt(first)))
    cache.index.hint(hit, Hint(wanted_by=1))
    assert order(cache)[-1] == first


def test_retention_keeps_an_extent_longer() -> None:
    cache = fitted()
    usual = order(fitted())
    first = usual[0]
    cache.index.hint(cache.index.lookup(Tokens(prompt(first))), Hint(duration_s=3_600.0))
    assert order(cache) == [*usual[1:], first]


def test_retention_given_with_the_request_counts_before_the_first_fit_too() -> None:
    cache = LearnedCache()
    cache.ask(0.0, prompt(0), retention=[Retention(0, None, 50, 3_600.0)])
    for number in range(1, 4):
        cache.ask(10.0 * number, prompt(number))
    assert order(cache) == [1, 2, 3, 0]


def test_retention_ends() -> None:
    caches = [fitted(), fitted()]
    first = order(fitted())[0]
    caches[0].index.hint(caches[0].index.lookup(Tokens(prompt(first))), Hint(duration_s=5.0))
    for cache in caches:
        cache.ask(cache.clock.now() + 600.0, [1, 2, 3])
        cache.evict(3 + 12)
    assert kept(caches[0]) == kept(caches[1]) != [0, 1, 2, 3]


def test_select_victims_uses_a_fresh_policy() -> None:
    cache = fitted()
    draw = random.Random(5)
    candidates = [
        EvictionCandidate(str(number), list(range(draw.randint(1, 9))), draw.uniform(0, 500.0))
        for number in range(FIT_FIRST // 2)
    ]
    expected = select_victims(LRUPolicy, candidates, 40)
    before = cache.learned.num_evictable
    assert select_victims(cache.learned.fresh, candidates, 40) == expected
    assert (cache.learned.num_evictable, kept(cache)) == (before, [0, 1, 2, 3])


def test_flat_runs_have_records_by_their_key() -> None:
    policy = LearnedPolicy(capacity=8)
    runs = [SimpleExtent(key, 2, used_s=float(key), last_use=key) for key in range(4)]
    for run in runs:
        policy.insert(run)
    policy.pin(0)
    runs[0].used_s, runs[0].last_use = 30.0, 9
    policy.unpin(runs[0])
    record = policy._history.get(0)
    assert record is not None
    assert (record.turn, record.used_s, record.end) == (2, 30.0, 2)
    given: list[int] = []
    assert policy.evict(7, lambda run, count: given.append(run.key)) == 7
    assert given == [1, 2, 3, 0]


def test_a_capacity_below_one_block_is_an_error() -> None:
    with pytest.raises(ConfigError, match="at least 1 block"):
        LearnedPolicy(capacity=0)
