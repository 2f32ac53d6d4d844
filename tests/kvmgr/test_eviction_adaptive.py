"""`adaptive`: the shadow that it compares itself with, and what a world that turns around may cost."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.benchmarks.replay.replayer import replay
from sagellm.benchmarks.traces.record import TraceRequest
from sagellm.core.clock import ManualClock
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.eviction import EvictionPolicy, Run
from sagellm.core.registry import registry
from sagellm.core.types import Namespace, Tokens
from sagellm.kvmgr.eviction._lru_shadow import Lineage, LRUShadow
from sagellm.kvmgr.eviction.adaptive import AdaptiveEvictionPolicy
from sagellm.kvmgr.eviction.learned import LearnedEvictionPolicy
from sagellm.kvmgr.prefix_cache.radix import RadixPrefixCache

CAPACITY = 250
MARGIN, SLACK, FIRST_REST = 0.001, 4.0, 125


@dataclass(frozen=True, slots=True)
class Course:
    """A stream through one policy: hit blocks of each request, and who led after it."""

    policy: EvictionPolicy
    hits: list[int]
    follows_lru: list[bool]

    @property
    def flips(self) -> list[int]:
        """Requests with which the lead changed hands."""
        sides = [False, *self.follows_lru]
        return [number for number in range(len(self.hits)) if sides[number] != sides[number + 1]]


def course(name: str, requests: Sequence[TraceRequest], capacity: int) -> Course:
    clock, policies = ManualClock(), registry("policy")
    known = {"capacity": capacity, "clock": clock}
    options = {option: value for option, value in known.items() if option in policies.options(name)}
    policy: EvictionPolicy = policies.create(name, **options)
    index = RadixPrefixCache(block_size=1, policy=policy, clock=clock)
    hits, sides = [], []
    for request in requests:
        hits.append(replay([request], index, clock, capacity).hits[0])
        sides.append(isinstance(policy, AdaptiveEvictionPolicy) and policy.follows_lru)
    policy.check()
    return Course(policy, hits, sides)


def request(time_s: float, ids: Sequence[int], num_output_tokens: int = 0) -> TraceRequest:
    return TraceRequest(time_s, Tokens(ids), Namespace(), len(ids), num_output_tokens)


def turning_world(seed: int, num_before: int = 2_000, num_after: int = 2_500) -> list[TraceRequest]:
    """Prompts of two classes, told apart by their outputs. First only the short ones return, within a minute,
    and there is room for all; then four times as many come, and only the long ones return, so soon that LRU
    has them all."""
    draw = random.Random(seed)
    requests, now_s = [], 0.0
    for number in range(num_before + num_after):
        after = number >= num_before
        now_s += draw.expovariate(2.0 if after else 0.5)
        ids = list(range(100 * number, 100 * number + 4))
        is_long = draw.random() < 0.5
        num_output_tokens = 4_096 if is_long else 0
        requests.append(request(now_s, ids, num_output_tokens))
        if is_long == after:
            wait_s = draw.uniform(9.0, 13.0) if after else draw.uniform(1.0, 55.0)
            requests.append(request(now_s + wait_s, [*ids, 100 * number + 50], num_output_tokens))
    return sorted(requests, key=lambda one: one.time_s)


def steady_world(seed: int, num: int = 500) -> list[TraceRequest]:
    """One in four comes back after half a minute, beside many that do not."""
    draw = random.Random(seed)
    requests, now_s = [], 0.0
    for number in range(num):
        now_s += draw.expovariate(1.0)
        goes_on = draw.random() < 0.25
        for turn in range(6 if goes_on else 1):
            ids = range(1_000 * number, 1_000 * number + (4 * turn + 4 if goes_on else 12))
            requests.append(request(now_s + 30.0 * turn, ids))
    return sorted(requests, key=lambda one: one.time_s)


@dataclass(frozen=True, slots=True)
class World:
    requests: list[TraceRequest]
    lru: Course
    learned: Course
    adaptive: Course

    @property
    def num_asked(self) -> int:
        return sum(len(one.ids) for one in self.requests)


@pytest.fixture(scope="module", params=[0, 1])
def turned(request: pytest.FixtureRequest) -> World:
    stream = turning_world(request.param)
    return World(stream, *(course(name, stream, CAPACITY) for name in ("lru", "learned", "adaptive")))


# -- a world that turns around


def test_what_was_learned_is_wrong_there(turned: World) -> None:
    """Otherwise the tests below would show nothing."""
    assert sum(turned.learned.hits) < 0.9 * sum(turned.lru.hits)


def test_the_loss_is_bounded(turned: World) -> None:
    """The margin, the slack of each trial, and for each change of sides a cache's worth of blocks: LRU finds
    at first what the other one kept."""
    policy = turned.adaptive.policy
    assert isinstance(policy, AdaptiveEvictionPolicy)
    num_losses = math.log2(policy._next_rest / FIRST_REST)
    mean = turned.num_asked / len(turned.requests)
    loss = sum(turned.lru.hits) - sum(turned.adaptive.hits)
    stated = MARGIN * turned.num_asked + SLACK * mean * (1 + num_losses)
    assert loss <= stated + CAPACITY * num_losses
    assert loss < 0.25 * (sum(turned.lru.hits) - sum(turned.learned.hits))


def test_each_trial_loses_little(turned: World) -> None:
    """Counted in hits, not by the policy's own shadow: twice what it allows, for what that cannot see."""
    lead = [mine - others for mine, others in zip(turned.adaptive.hits, turned.lru.hits, strict=True)]
    sizes = [len(one.ids) for one in turned.requests]
    begin = 0
    for number in turned.adaptive.flips:
        if turned.adaptive.follows_lru[number]:
            trial = slice(begin, number + 1)
            asked = sum(sizes[trial])
            allowed = MARGIN * asked + SLACK * asked / len(sizes[trial])
            assert sum(lead[trial]) >= -2 * allowed
        begin = number + 1


def test_lru_takes_over_for_its_time_and_a_trial_follows(turned: World) -> None:
    """For twice as long the second time."""
    flips = turned.adaptive.flips
    assert len(flips) >= 2
    assert turned.requests[flips[0]].time_s > turned.requests[0].time_s + 3_000.0  # not in the first phase
    rest = FIRST_REST
    for taken, given_back in zip(flips[::2], flips[1::2], strict=False):
        assert turned.adaptive.follows_lru[taken]
        assert not turned.adaptive.follows_lru[given_back]
        assert given_back - taken == rest
        rest *= 2


def test_while_lru_leads_hits_become_those_of_lru(turned: World) -> None:
    """After the first 200 requests under LRU both caches hold the same."""
    taken, given_back = turned.adaptive.flips[:2]
    settled = slice(taken + 200, given_back)
    assert turned.adaptive.hits[settled] == turned.lru.hits[settled]


def test_without_a_capacity_it_counts_what_is_cached() -> None:
    """And does not compare itself with an LRU that has more room."""
    stream, clock = steady_world(0), ManualClock()
    index = RadixPrefixCache(block_size=1, policy=AdaptiveEvictionPolicy(clock=clock), clock=clock)
    hits = [replay([one], index, clock, CAPACITY).hits[0] for one in stream]
    assert hits == course("adaptive", stream, CAPACITY).hits


def test_it_learns_on_while_lru_leads(turned: World) -> None:
    policy = turned.adaptive.policy
    assert isinstance(policy, AdaptiveEvictionPolicy)
    late = [life for life in policy._lives if life.born_s > turned.requests[-1].time_s - 100.0]
    assert len(late) > 100


# -- a world that does not


@pytest.mark.parametrize("seed", range(2))
def test_where_learning_wins_it_is_the_same(seed: int) -> None:
    stream = steady_world(seed)
    learned, adaptive, lru = (course(name, stream, 400) for name in ("learned", "adaptive", "lru"))
    assert adaptive.hits == learned.hits
    assert sum(adaptive.hits) > sum(lru.hits) + 0.15 * sum(len(one.ids) for one in stream)
    assert adaptive.flips == []


def test_where_all_fits_nothing_is_lost() -> None:
    stream = steady_world(0, 200)
    lru, adaptive = (course(name, stream, 100_000) for name in ("lru", "adaptive"))
    assert adaptive.hits == lru.hits
    assert adaptive.flips == []


def test_no_patience_means_an_early_change() -> None:
    """`margin` and `slack` are what they say: a loss of one block is too much for an impatient one."""
    flips = {}
    stream = turning_world(2, 600, 900)
    for slack in (0.5, 50.0):
        clock = ManualClock()
        policy = AdaptiveEvictionPolicy(capacity=CAPACITY, clock=clock, margin=0.0, slack=slack)
        index = RadixPrefixCache(block_size=1, policy=policy, clock=clock)
        flips[slack] = len(stream)
        for number, one in enumerate(stream):
            replay([one], index, clock, CAPACITY)
            if policy.follows_lru:
                flips[slack] = number
                break
    assert flips[0.5] < flips[50.0]


@pytest.mark.parametrize("first_rest", [0, -1, True, 1.5])
def test_a_rest_that_is_no_whole_number_is_refused(first_rest: Any) -> None:
    with pytest.raises(ConfigError, match="first_rest must be a whole number of at least 1"):
        AdaptiveEvictionPolicy(first_rest=first_rest)


def test_first_rest_is_the_number_of_requests_under_lru() -> None:
    """Twice as many after the second trial."""
    clock = ManualClock()
    policy = AdaptiveEvictionPolicy(capacity=CAPACITY, clock=clock, margin=0.0, slack=0.5, first_rest=40)
    index = RadixPrefixCache(block_size=1, policy=policy, clock=clock)
    sides = []
    for one in turning_world(2, 600, 900):
        replay([one], index, clock, CAPACITY)
        sides.append(policy.follows_lru)
    rests = [len(list(group)) for follows_lru, group in groupby(sides) if follows_lru]
    assert rests[:2] == [40, 80]


def test_select_victims_and_options_reach_a_fresh_one() -> None:
    policy = AdaptiveEvictionPolicy(capacity=10)
    fresh = policy._fresh()
    assert isinstance(fresh, AdaptiveEvictionPolicy)
    assert isinstance(fresh, LearnedEvictionPolicy)
    assert fresh.num_evictable == 0
    assert not fresh.follows_lru


# -- memory


@pytest.mark.parametrize("name", ["learned", "adaptive"])
def test_memory_is_bounded(name: str) -> None:
    """Whatever comes: new blocks, and pins that never come back."""
    policy = registry("policy").create(name, capacity=50, max_lives=200)
    most_kept = 0
    for key in range(4_000):
        policy.insert(Run(key, 1, last_use=key, used_s=float(key)))
        if key % 3 == 0:
            policy.pin(key)
        policy.evict(max(0, policy.num_evictable - 50), lambda run, count: None)
        if isinstance(policy, AdaptiveEvictionPolicy):
            most_kept = max(most_kept, len(policy._shadow._kept))
    policy.check()
    assert len(policy._lives) == 200
    assert most_kept <= 52
    assert len(policy._model) < 100
    assert len(policy._hand) <= 100
    assert len(policy._lives._open) <= 200
    assert len(policy._by_value._order) <= 200


# -- the shadow


class SlowShadow:
    """The same as a list of single blocks, the next to go first: of a branch the last block first, and of a
    prompt its youngest branch."""

    def __init__(self) -> None:
        self.blocks: list[tuple[int, int]] = []

    def use(self, lineage: Lineage, end: int) -> int:
        found = self.found(lineage, end)
        stop = end
        for path, base in reversed(lineage):
            own = [position for one, position in self.blocks if one == path]
            keeps = stop if path == lineage[-1][0] else max([stop, *(position + 1 for position in own)])
            self.blocks = [block for block in self.blocks if block[0] != path]
            self.blocks += [(path, position) for position in reversed(range(base, keeps))]
            stop = base
        return found

    def found(self, lineage: Lineage, end: int) -> int:
        """The leading run of a prompt's blocks that are here."""
        stops = [base for _, base in lineage[1:]] + [end]
        wanted = [
            (path, position)
            for (path, base), stop in zip(lineage, stops, strict=True)
            for position in range(base, stop)
        ]
        return next((position for path, position in wanted if (path, position) not in self.blocks), end)

    def shrink(self, capacity: int) -> None:
        self.blocks = self.blocks[max(0, len(self.blocks) - capacity) :]


BRANCHES: list[Lineage] = [
    ((0, 0),),
    ((0, 0), (1, 3)),
    ((0, 0), (1, 3), (2, 5)),
    ((0, 0), (3, 3)),
    ((0, 0), (3, 3), (4, 9)),
    ((5, 0),),
    ((5, 0), (6, 2)),
]
uses = st.tuples(st.sampled_from(BRANCHES), st.integers(1, 12))
"""A branch, and how many blocks of its own a prompt has."""


@given(st.lists(uses | st.integers(0, 50), max_size=60))
def test_the_shadow_is_lru(steps: list[tuple[Lineage, int] | int]) -> None:
    fast, slow = LRUShadow(), SlowShadow()
    for step in steps:
        if isinstance(step, int):
            fast.shrink(step)
            slow.shrink(step)
        else:
            lineage, num_own = step
            end = lineage[-1][1] + num_own
            assert fast.use(lineage, end) == slow.use(lineage, end)
        assert fast.num_blocks == len(slow.blocks)


def test_the_shadow_finds_what_the_real_lru_finds() -> None:
    """Conversations that share nothing, in the real index under LRU. There the blocks of a request are made
    room for before it is served; here after: at the border it may find some more."""
    stream = steady_world(1, 300)
    real = course("lru", stream, 400)
    shadow, found = LRUShadow(), []
    for one in stream:
        found.append(shadow.use(((one.ids[0], 0),), len(one.ids)))
        shadow.shrink(400)
    assert sum(real.hits) > 500
    num_asked = sum(len(one.ids) for one in stream)
    assert sum(abs(mine - its) for mine, its in zip(found, real.hits, strict=True)) < 0.01 * num_asked


@pytest.mark.parametrize("seed", range(4))
def test_no_branch_has_less_than_nothing(seed: int) -> None:
    """A tree of prompts of two symbols, cut and grown all the time."""
    draw, clock = random.Random(seed), ManualClock()
    policy = AdaptiveEvictionPolicy(capacity=30, clock=clock)
    index = RadixPrefixCache(block_size=1, policy=policy, clock=clock)
    for number in range(400):
        ids = [0] * 4 + [draw.randrange(2) for _ in range(9)]
        replay([request(float(number), ids[: draw.randrange(1, 14)])], index, clock, 30)
        kept = policy._shadow._kept.values()
        assert policy._shadow.num_blocks == sum(end - base for base, end in kept) <= 30
        assert all(base <= end for base, end in kept)
