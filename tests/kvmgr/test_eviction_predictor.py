"""`predictive`, through the real index: what its predictor is told, and the order that follows."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from sagellm.benchmarks.replay.replayer import replay
from sagellm.benchmarks.traces import read_trace
from sagellm.compat import EvictionCandidate, select_victims
from sagellm.core.clock import ManualClock
from sagellm.core.protocols.eviction import Hint, SimpleExtent
from sagellm.core.protocols.lifetime import (
    LifetimePredictor,
    Prediction,
    PredictionRequest,
    ReuseFeatures,
    ReusePrediction,
    ReusePredictor,
)
from sagellm.core.types import Tokens
from sagellm.kvmgr.eviction import LRUPolicy
from sagellm.kvmgr.eviction._history import MAX_BRANCHES
from sagellm.kvmgr.eviction.predictive import (
    LEAST_HELD_S,
    PATIENCE_S,
    PredictivePolicy,
    density,
)
from sagellm.kvmgr.lifetime.reuse.reuse_table import ReuseTable
from sagellm.kvmgr.lifetime.statistical import StatisticalLifetimePredictor
from sagellm.kvmgr.prefix_cache.radix import RadixIndex
from tests.eviction_workloads import Request, mixed

Told = tuple[ReuseFeatures, float, bool, float]


class FakeReuse:
    """Expects paths of an even length back, hardly the others; records what it is told."""

    horizon_s = 600.0

    def __init__(self, *, abstained: bool = False) -> None:
        self.abstained = abstained
        self.told: list[Told] = []
        self.asked: list[tuple[ReuseFeatures, float]] = []

    def predict(self, features: ReuseFeatures, age_s: float = 0.0) -> ReusePrediction:
        self.asked.append((features, age_s))
        probability = 0.9 if features.num_blocks % 2 == 0 else 0.1
        return ReusePrediction(probability, {0.5: 30.0}, self.abstained)

    def update(self, features: ReuseFeatures, seconds: float, *, reused: bool, since_s: float = 0.0) -> None:
        assert 0 <= since_s <= seconds
        self.told.append((features, seconds, reused, since_s))

    @property
    def reuses(self) -> list[tuple[ReuseFeatures, float]]:
        return [(features, seconds) for features, seconds, reused, _ in self.told if reused]


class FakeLengths:
    """The longer a sequence, the longer it goes on: a minute for each block."""

    def __init__(self, *, abstained: bool = False) -> None:
        self.abstained = abstained
        self.asked: list[PredictionRequest] = []
        self.ended: list[tuple[str, int, float]] = []

    def predict(self, request: PredictionRequest) -> Prediction:
        self.asked.append(request)
        length = request.current_length
        return Prediction(length, 60.0 * length, 1.0, abstained=self.abstained)

    def update(self, sequence_id: str, actual_length: int, actual_time: float) -> None:
        self.ended.append((sequence_id, actual_length, actual_time))


class Cache:
    """The real index of block size 1: what is missing is inserted at once, evicting exactly that much."""

    def __init__(self, predictor: ReusePredictor | LifetimePredictor | None, capacity: int = 1_000) -> None:
        self.clock, self.capacity = ManualClock(), capacity
        self.policy = PredictivePolicy(predictor=predictor, capacity=capacity, clock=self.clock)
        self.index = RadixIndex(block_size=1, policy=self.policy, clock=self.clock)
        self.evicted: list[int] = []
        self._num_made = 0

    def ask(self, time_s: float, blocks: Iterable[int]) -> int:
        """A request comes and goes; returns how many of its blocks were here."""
        self.clock.advance(time_s - self.clock.now())
        tokens, index = Tokens(blocks), self.index
        hit = index.pin(index.lookup(tokens))
        found, missing = hit.num_blocks, len(tokens) - hit.num_blocks
        self.evict(max(0, index.num_cached + missing - self.capacity))
        ids = array("i", [*index.block_ids(hit), *range(self._num_made, self._num_made + missing)])
        self._num_made += missing
        whole = index.insert(tokens, ids, pin=True).hit
        index.unpin(hit)
        index.unpin(whole)
        return found

    def ask_all(self, requests: Iterable[Request]) -> int:
        return sum(self.ask(time_s, blocks) for time_s, blocks in requests)

    def evict(self, num_blocks: int) -> None:
        freed = self.index.evict(num_blocks)
        assert freed is not None
        self.evicted += freed

    def wait(self, seconds: float) -> None:
        """Time passes, and the policy is asked for nothing."""
        self.clock.advance(seconds)
        self.evict(0)

    def kept(self, *prompts: Sequence[int]) -> list[bool]:
        return [self.index.lookup(Tokens(prompt)).num_blocks == len(prompt) for prompt in prompts]

    def check(self) -> None:
        self.index.check()
        self.policy.check()


class PlainLRU(Cache):
    def __init__(self, capacity: int) -> None:
        super().__init__(None, capacity)
        self.index = RadixIndex(block_size=1, policy=LRUPolicy(), clock=self.clock)


def prompt(number: int, length: int) -> range:
    return range(1_000 * number, 1_000 * number + length)


# -- what a reuse predictor is told


def test_a_conversation_is_told_turn_by_turn() -> None:
    predictor = FakeReuse()
    cache = Cache(predictor)
    for time_s, length in ((0.0, 5), (10.0, 10), (40.0, 16)):
        cache.ask(time_s, range(length))
    assert predictor.reuses == [
        (ReuseFeatures(1, 1, 0, 5), 10.0),
        (ReuseFeatures(1, 2, 5, 10, 10.0), 30.0),
    ]
    assert predictor.asked[-1] == (ReuseFeatures(1, 3, 10, 16, 30.0), 0.0)
    cache.check()


def test_a_rest_is_told_in_pieces_that_join() -> None:
    predictor = FakeReuse()
    cache = Cache(predictor)
    cache.ask(0.0, range(6))
    for _ in range(100):
        cache.wait(1.0)
    pieces = [(since_s, seconds) for _, seconds, _, since_s in predictor.told]
    assert pieces == [(0.0, 2.0), (2.0, 8.0), (8.0, 32.0)]
    assert cache.ask(150.0, range(6)) == 6
    assert predictor.told[-1] == (ReuseFeatures(1, 1, 0, 6), 150.0, True, 32.0)


def test_a_rest_beyond_the_horizon_is_of_no_interest() -> None:
    predictor = FakeReuse()
    cache = Cache(predictor)
    cache.ask(0.0, range(6))
    for _ in range(50):
        cache.wait(100.0)
    pieces = [(since_s, seconds) for _, seconds, _, since_s in predictor.told]
    assert pieces == [(0.0, 100.0), (100.0, 200.0), (200.0, 600.0)]


def test_what_was_evicted_and_comes_back_was_reused() -> None:
    predictor = FakeReuse()
    cache = Cache(predictor)
    cache.ask(0.0, range(5))
    cache.ask(10.0, range(10))
    cache.evict(10)
    assert cache.ask(70.0, range(14)) == 0
    features, seconds = predictor.reuses[-1]
    assert (features.turn, seconds) == (2, 60.0)
    assert predictor.asked[-1] == (ReuseFeatures(1, 3, 0, 14, 60.0), 0.0)


def test_what_was_evicted_and_stays_away_rests() -> None:
    predictor = FakeReuse()
    cache = Cache(predictor)
    cache.ask(0.0, range(5))
    cache.evict(5)
    cache.wait(50.0)
    assert [(seconds, reused) for _, seconds, reused, _ in predictor.told] == [(50.0, False)]


def test_the_end_of_a_prompt_that_its_continuation_does_not_repeat_is_left_behind() -> None:
    predictor = FakeReuse()
    cache = Cache(predictor)
    cache.ask(0.0, range(10))
    cache.ask(20.0, [*range(9), *range(50, 56)])
    assert [seconds for _, seconds in predictor.reuses] == [20.0]
    assert {features.turn for features, _ in predictor.asked} == {0, 1, 2}


def test_a_branch_near_the_beginning_is_no_use_of_the_rest() -> None:
    predictor = FakeReuse()
    cache = Cache(predictor)
    cache.ask(0.0, range(10))
    cache.ask(20.0, [*range(3), *range(50, 56)])
    assert predictor.reuses == []
    assert predictor.asked[-1][0].turn == 1


def test_a_prefix_that_many_share_is_no_conversation() -> None:
    predictor = FakeReuse()
    cache = Cache(predictor)
    for number in range(MAX_BRANCHES + 4):
        cache.ask(5.0 * number, [*range(6), *prompt(number + 1, 5)])
    features, _ = predictor.asked[-1]
    assert (features.turn, features.gap_s) == (1, -1.0)
    cache.evict(5 * (MAX_BRANCHES + 4))
    shared, age_s = predictor.asked[-1]
    assert (shared.position, shared.gap_s, age_s) == (0, 5.0, 0.0)
    assert shared.num_uses >= MAX_BRANCHES + 4


def test_of_single_blocks_one_in_four_is_told() -> None:
    predictor = FakeReuse()
    policy = PredictivePolicy(predictor=predictor, capacity=1_000)
    for key in range(800):
        policy.insert(SimpleExtent(key, 1, last_use=key))
    policy.insert(SimpleExtent(800, 1, used_s=10.0, last_use=800))
    policy.evict(0, lambda extent, count: None)
    assert len(predictor.told) == 200


# -- what is made of its answers


def test_density_is_that_of_the_best_moment_to_give_up() -> None:
    sure = ReusePrediction(1.0, {0.5: 10.0, 1.0: 1_000.0})
    by_half = 0.5 / (LEAST_HELD_S + 10.0 * 0.75)
    assert density(sure, 1_000.0) == pytest.approx(by_half)
    assert density(ReusePrediction(0.0, {0.5: 10.0}), 100.0) == 0.0
    likely, late = ReusePrediction(0.8, {0.5: 10.0}), ReusePrediction(0.8, {0.5: 90.0})
    unlikely = ReusePrediction(0.1, {0.5: 10.0})
    assert density(likely, 100.0) > density(late, 100.0) > density(unlikely, 100.0) > 0


def test_what_is_not_expected_back_goes_first() -> None:
    cache = Cache(FakeReuse())
    wanted, other = prompt(1, 6), prompt(2, 7)
    cache.ask(0.0, wanted)
    cache.ask(5.0, other)
    cache.evict(7)
    assert cache.kept(wanted, other) == [True, False]
    cache.check()


def test_while_the_predictor_abstains_the_victims_are_those_of_lru() -> None:
    predictor = FakeReuse(abstained=True)
    caches = [Cache(predictor, 60), PlainLRU(60)]
    for cache in caches:
        cache.ask_all(mixed(1, 100))
        cache.check()
    assert len(caches[0].evicted) > 500
    assert caches[0].evicted == caches[1].evicted


def test_when_it_no_longer_abstains_all_get_their_place() -> None:
    predictor = FakeReuse(abstained=True)
    cache = Cache(predictor)
    wanted, other = prompt(1, 6), prompt(2, 7)
    cache.ask(0.0, wanted)
    cache.ask(5.0, other)
    predictor.abstained = False
    cache.ask(6.0, prompt(3, 8))
    cache.evict(7)
    assert cache.kept(wanted, other) == [True, False]


@pytest.mark.parametrize("seed", range(3))
def test_with_a_table_it_keeps_the_conversations_beside_what_asks_once(seed: int) -> None:
    requests = mixed(seed, 600)
    predictive, plain = Cache(ReuseTable(), 400), PlainLRU(400)
    lead = predictive.ask_all(requests) - plain.ask_all(requests)
    assert lead > 0.05 * sum(len(blocks) for _, blocks in requests)
    predictive.check()


def test_retention_makes_an_extent_look_younger() -> None:
    predictor = FakeReuse()
    cache = Cache(predictor)
    cache.ask(0.0, prompt(1, 6))
    cache.clock.advance(100.0)
    cache.index.hint(cache.index.lookup(Tokens(prompt(1, 6))), Hint(priority=100, duration_s=60.0))
    assert predictor.asked[-1][1] == 0.0


def test_what_has_ended_goes_first_and_what_is_wanted_last() -> None:
    cache = Cache(FakeReuse())
    prompts = [prompt(1, 6), prompt(2, 8), prompt(3, 7)]
    for number, blocks in enumerate(prompts):
        cache.ask(float(number), blocks)
    cache.index.hint(cache.index.lookup(Tokens(prompts[1])), Hint(ended=True))
    cache.index.hint(cache.index.lookup(Tokens(prompts[2])), Hint(wanted_by=1))
    cache.evict(8)
    assert cache.kept(*prompts) == [True, False, True]
    cache.evict(6)
    assert cache.kept(*prompts) == [False, False, True]


# -- lengths, and no predictor


def test_a_conversation_is_one_sequence_that_grows() -> None:
    predictor = FakeLengths()
    cache = Cache(predictor)
    for time_s, length in ((0.0, 5), (10.0, 8), (40.0, 12)):
        cache.ask(time_s, range(length))
    cache.ask(45.0, prompt(1, 4))
    asked = [(one.sequence_id, one.current_length, one.num_prompt_tokens) for one in predictor.asked]
    first, second = asked[0][0], asked[3][0]
    assert asked == [(first, 5, 5), (first, 8, 5), (first, 12, 5), (second, 4, 4)]
    assert first != second
    for _ in range(4):
        cache.wait(PATIENCE_S)
    assert sorted(predictor.ended) == [(first, 12, 40.0), (second, 4, 0.0)]


def test_what_is_predicted_to_end_first_goes_first() -> None:
    cache = Cache(FakeLengths())
    prompts = [prompt(1, 9), prompt(2, 3), prompt(3, 5)]
    for number, blocks in enumerate(prompts):
        cache.ask(10.0 * number, blocks)
    cache.evict(3)
    assert cache.kept(*prompts) == [True, False, True]
    cache.evict(5)
    assert cache.kept(*prompts) == [True, False, False]


@pytest.mark.parametrize("predictor", [None, FakeLengths(abstained=True)])
def test_without_a_prediction_it_is_lru(predictor: FakeLengths | None) -> None:
    caches = [Cache(predictor, 60), PlainLRU(60)]
    for cache in caches:
        cache.ask_all(mixed(1, 100))
        cache.check()
    assert len(caches[0].evicted) > 500
    assert caches[0].evicted == caches[1].evicted


def test_the_statistical_predictor_can_be_asked() -> None:
    cache = Cache(StatisticalLifetimePredictor(), 400)
    assert cache.ask_all(mixed(2, 300)) > 0
    cache.check()


# -- candidates, memory


def test_candidates_go_by_the_lifetime_that_they_bring() -> None:
    candidates = [
        EvictionCandidate("old, goes on", [1, 2], 0.0, estimated_lifetime=100.0),
        EvictionCandidate("ends at once", [3, 4], 10.0, estimated_lifetime=0.0),
        EvictionCandidate("nothing known", [5, 6], 20.0),
    ]
    for policy in (PredictivePolicy(), PredictivePolicy(predictor=FakeLengths())):
        assert select_victims(policy.fresh, candidates, 4) == ["ends at once", "nothing known"]


def test_candidates_are_asked_about_and_teach_nothing() -> None:
    predictor = FakeReuse()
    policy = PredictivePolicy(predictor=predictor, capacity=100)
    candidates = [EvictionCandidate("even", [1, 2], 0.0), EvictionCandidate("odd", [3, 4, 5], 50.0)]
    assert select_victims(policy.fresh, candidates, 3) == ["odd"]
    assert predictor.asked
    assert not predictor.told
    assert policy.num_evictable == 0


def test_rests_are_bounded_evicted_ones_included() -> None:
    policy = PredictivePolicy(predictor=FakeReuse(), capacity=50)
    most = policy._history.max_records
    for key in range(most + 500):
        policy.insert(SimpleExtent(key, 1, last_use=key, used_s=float(key)))
        policy.evict(max(0, policy.num_evictable - 50), lambda extent, count: None)
    assert len(policy._history) == most
    policy.check()


@pytest.mark.traces
def test_on_conversation_the_table_is_worth_more_than_recency(sagellm_traces: Path) -> None:
    """At 2 % of the unique blocks, where LRU has next to nothing."""
    trace = read_trace(sagellm_traces / "mooncake_conversation_first_half.jsonl.xz")
    requests = trace.requests
    capacity = round(0.02 * len({(one.namespace, block) for one in requests for block in one.ids}))
    hits = []
    for predictor in (ReuseTable(), None):
        clock = ManualClock(requests[0].time_s)
        policy = PredictivePolicy(predictor=predictor, capacity=capacity, clock=clock)
        index = RadixIndex(block_size=1, policy=policy, clock=clock)
        hits.append(sum(replay(requests, index, clock, capacity).hits))
    assert hits[0] > 1.2 * hits[1]
