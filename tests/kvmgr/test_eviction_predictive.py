"""`predictive`: whom it asks, what it makes of the answer, and what it teaches."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import pytest

from sagellm.compat import EvictionCandidate, select_victims
from sagellm.core.clock import ManualClock
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.eviction import EvictionPolicy, Hint, SimpleExtent
from sagellm.core.protocols.lifetime import (
    LifetimePredictor,
    Prediction,
    PredictionRequest,
    ReuseFeatures,
    ReusePrediction,
    ReusePredictor,
)
from sagellm.core.types import Tokens
from sagellm.kvmgr.eviction import LRUPolicy, predictive
from sagellm.kvmgr.eviction.predictive import PredictivePolicy
from sagellm.kvmgr.lifetime.reuse.reuse_table import ReuseTable
from sagellm.kvmgr.prefix_cache.radix import RadixIndex
from tests.eviction_workloads import Request, mixed

SOON = {0.1: 1.0, 0.5: 5.0, 0.9: 10.0}
LATE = {0.1: 10.0, 0.5: 50.0, 0.9: 100.0}
"""When, and which blocks."""


@dataclass
class FakeReuse:
    """Answers by a rule of position and age, and keeps what it is told."""

    rule: Callable[[ReuseFeatures, float], ReusePrediction]
    horizon_s: float = 1000.0
    told: list[tuple[ReuseFeatures, float, bool, float]] = field(default_factory=list)

    def predict(self, features: ReuseFeatures, age_s: float = 0.0) -> ReusePrediction:
        return self.rule(features, age_s)

    def update(self, features: ReuseFeatures, seconds: float, *, reused: bool, since_s: float = 0.0) -> None:
        self.told.append((features, seconds, reused, since_s))


@dataclass
class FakeLengths:
    """Seconds to go by the length of the sequence, 0 where none are given; keeps what it is told."""

    seconds: Mapping[int, float] = field(default_factory=dict)
    abstains: bool = False
    told: list[tuple[str, int, float]] = field(default_factory=list)

    def predict(self, request: PredictionRequest) -> Prediction:
        to_go_s = self.seconds.get(request.current_length, 0.0)
        return Prediction(to_go_s, to_go_s, 1.0, abstained=self.abstains)

    def update(self, sequence_id: str, actual_length: int, actual_time: float) -> None:
        self.told.append((sequence_id, actual_length, actual_time))


def by_position(answers: Mapping[int, tuple[float, Mapping[float, float]]]) -> FakeReuse:
    return FakeReuse(lambda features, _: ReusePrediction(*answers[features.position]))


def certain(*_: object) -> ReusePrediction:
    return ReusePrediction(0.5, SOON)


def made(
    predictor: ReusePredictor | LifetimePredictor | None,
) -> tuple[PredictivePolicy, ManualClock]:
    clock = ManualClock()
    return PredictivePolicy(predictor=predictor, capacity=1_000, clock=clock), clock


def use(policy: EvictionPolicy, run: SimpleExtent, clock: ManualClock, time_s: float) -> None:
    """A request uses a run, which is here or comes, and goes at once."""
    clock.advance(time_s - clock.now())
    policy.pin(run.key)
    run.used_s, run.last_use, run.num_uses = time_s, run.last_use + 1, run.num_uses + 1
    policy.unpin(run)


def order(policy: EvictionPolicy) -> list[int]:
    """Evict all; the keys in that order."""
    gone: list[int] = []

    def give_up(run: SimpleExtent, num_blocks: int) -> None:
        run.num_blocks -= num_blocks
        gone.append(run.key)

    policy.evict(policy.num_evictable, give_up)
    return gone


class Cache:
    """The real index with a policy, of block size 1: what is missing is inserted at once, evicting exactly
    that much."""

    def __init__(self, make: Callable[[ManualClock], EvictionPolicy], capacity: int) -> None:
        self.clock, self.capacity = ManualClock(), capacity
        self.policy = make(self.clock)
        self.index = RadixIndex(block_size=1, policy=self.policy, clock=self.clock)
        self.evicted: list[int] = []
        self._num_made = 0

    def ask(self, time_s: float, blocks: Iterable[int]) -> int:
        """A request comes and goes; returns how many of its blocks were here."""
        self.clock.advance(max(0.0, time_s - self.clock.now()))
        tokens, index = Tokens(blocks), self.index
        hit = index.pin(index.lookup(tokens))
        missing = len(tokens) - hit.num_blocks
        freed = index.evict(max(0, index.num_cached + missing - self.capacity))
        assert freed is not None
        self.evicted += freed
        ids = array("i", [*index.block_ids(hit), *range(self._num_made, self._num_made + missing)])
        self._num_made += missing
        whole = index.insert(tokens, ids, pin=True).hit
        index.unpin(hit)
        index.unpin(whole)
        return hit.num_blocks

    def ask_all(self, requests: Iterable[Request]) -> int:
        found = sum(self.ask(time_s, blocks) for time_s, blocks in requests)
        self.index.check()
        self.policy.check()
        return found


# -- asked about reuse


def test_the_least_likely_to_be_used_goes_first() -> None:
    policy, clock = made(by_position({0: (0.9, SOON), 10: (0.1, SOON), 20: (0.5, SOON)}))
    for key, position in enumerate((0, 10, 20)):
        use(policy, SimpleExtent(key, 4, first_position=position), clock, key + 1.0)
    assert order(policy) == [1, 2, 0]


def test_of_the_equally_likely_the_later_goes_first() -> None:
    policy, clock = made(by_position({0: (0.5, SOON), 10: (0.5, LATE)}))
    use(policy, SimpleExtent(0, 4, first_position=0), clock, 1.0)
    use(policy, SimpleExtent(1, 4, first_position=10), clock, 2.0)
    assert order(policy) == [1, 0]


def test_what_rests_too_long_loses_its_place() -> None:
    """Likely when young, hopeless when old; the other one stays in between."""

    def rule(features: ReuseFeatures, age_s: float) -> ReusePrediction:
        young = age_s < 50.0
        return ReusePrediction((0.9 if young else 0.0) if features.position == 0 else 0.3, SOON)

    for waits_s, gone in ((1.0, [1, 0]), (500.0, [0, 1])):
        policy, clock = made(FakeReuse(rule))
        use(policy, SimpleExtent(0, 4, first_position=0), clock, 1.0)
        use(policy, SimpleExtent(1, 4, first_position=10), clock, 2.0)
        clock.advance(waits_s)
        assert order(policy) == gone


@pytest.mark.parametrize(("most", "is_forgotten"), [(16, True), (200, False)])
def test_what_it_has_forgotten_does_not_stay_for_ever(
    monkeypatch: pytest.MonkeyPatch, most: int, *, is_forgotten: bool
) -> None:
    """Its value cannot be looked at again, however high it was."""
    monkeypatch.setattr(predictive, "MAX_RECORDS", most)
    policy, clock = made(by_position({0: (0.9, SOON), 10: (0.1, SOON)}))
    use(policy, SimpleExtent(0, 4, first_position=0), clock, 1.0)
    for key in range(1, 50):
        use(policy, SimpleExtent(key, 1, first_position=10), clock, 1.0 + key)
    gone: list[int] = []

    def give_up(run: SimpleExtent, num_blocks: int) -> None:
        run.num_blocks -= num_blocks
        gone.append(run.key)

    for _ in range(40):
        policy.evict(1, give_up)
    assert (0 in gone) == is_forgotten
    policy.check()


def test_an_abstaining_predictor_leaves_it_at_lru() -> None:
    requests = mixed(1, 300)
    predictor = FakeReuse(lambda features, _: ReusePrediction(1 / features.num_blocks, SOON, abstained=True))
    lru = Cache(lambda _: LRUPolicy(), 300)
    asking = Cache(lambda clock: PredictivePolicy(predictor=predictor, clock=clock), 300)
    assert asking.ask_all(requests) == lru.ask_all(requests)
    assert asking.evicted == lru.evicted


def test_without_a_predictor_it_is_lru() -> None:
    requests = mixed(2, 300)
    lru = Cache(lambda _: LRUPolicy(), 300)
    asking = Cache(lambda clock: PredictivePolicy(clock=clock), 300)
    assert asking.ask_all(requests) == lru.ask_all(requests)
    assert asking.evicted == lru.evicted


def test_with_a_table_it_finds_more_than_lru_once_it_has_seen_enough() -> None:
    requests = mixed(3, 1_500)
    lru = Cache(lambda _: LRUPolicy(), 300)
    asking = Cache(lambda clock: PredictivePolicy(predictor=ReuseTable(), capacity=300, clock=clock), 300)
    again = Cache(lambda clock: PredictivePolicy(predictor=ReuseTable(), capacity=300, clock=clock), 300)
    assert asking.ask_all(requests) > 1.1 * lru.ask_all(requests)
    again.ask_all(requests)
    assert again.evicted == asking.evicted


# -- what it teaches


def test_a_use_is_told_as_reuse_after_that_rest() -> None:
    predictor = FakeReuse(certain)
    policy, clock = made(predictor)
    run = SimpleExtent(0, 4)
    use(policy, run, clock, 5.0)
    use(policy, run, clock, 12.0)
    [(features, seconds, reused, since_s)] = predictor.told
    assert (features.position, features.num_blocks, features.turn) == (0, 4, 1)
    assert (seconds, reused, since_s) == (7.0, True, 0.0)
    use(policy, run, clock, 32.0)
    features, seconds, *_ = predictor.told[-1]
    assert (features.turn, features.gap_s, seconds) == (2, 7.0, 20.0)


def test_an_eviction_that_comes_back_is_told_as_reuse() -> None:
    predictor = FakeReuse(certain)
    policy, clock = made(predictor)
    use(policy, SimpleExtent(0, 4), clock, 1.0)
    assert order(policy) == [0]
    use(policy, SimpleExtent(0, 4), clock, 41.0)
    assert [(seconds, reused) for _, seconds, reused, _ in predictor.told] == [(40.0, True)]


def test_a_rest_is_told_in_pieces_that_join_and_never_overlap() -> None:
    predictor = FakeReuse(certain)
    policy, clock = made(predictor)
    run = SimpleExtent(0, 4)
    use(policy, run, clock, 1.0)
    for number in range(1, 60):
        use(policy, SimpleExtent(100 + number, 1, first_position=50), clock, 1.0 + 10 * number)
        policy.evict(1, lambda one, count: setattr(one, "num_blocks", one.num_blocks - count))
    pieces = [told[1:] for told in predictor.told if told[0].position == 0]
    assert pieces
    assert all(not reused for _, reused, _ in pieces)
    starts, ends = [since_s for *_, since_s in pieces], [seconds for seconds, *_ in pieces]
    assert starts == [0.0, *ends[:-1]]
    assert ends == sorted(set(ends))


# -- asked about lengths


def test_the_sequence_whose_predicted_end_is_nearest_goes_first() -> None:
    policy, clock = made(FakeLengths({4: 100.0, 5: 10.0, 6: 0.0}))
    use(policy, SimpleExtent(0, 4), clock, 1.0)
    use(policy, SimpleExtent(1, 5), clock, 2.0)
    use(policy, SimpleExtent(2, 6), clock, 30.0)
    assert order(policy) == [1, 2, 0]


def test_an_abstaining_predictor_of_lengths_leaves_it_at_lru() -> None:
    policy, clock = made(FakeLengths({4: 100.0}, abstains=True))
    use(policy, SimpleExtent(0, 4), clock, 1.0)
    use(policy, SimpleExtent(1, 5), clock, 2.0)
    assert order(policy) == [0, 1]


def test_a_sequence_that_nobody_goes_on_with_is_told_as_ended() -> None:
    predictor = FakeLengths()
    policy, clock = made(predictor)
    run = SimpleExtent(0, 4)
    use(policy, run, clock, 1.0)
    use(policy, run, clock, 61.0)
    for number in range(1, 80):
        use(policy, SimpleExtent(number, 9), clock, 61.0 + 100.0 * number)
        policy.evict(1, lambda one, count: setattr(one, "num_blocks", one.num_blocks - count))
    assert [(length, seconds) for _, length, seconds in predictor.told if length == 4] == [(4, 60.0)]


# -- as every policy


def test_hints_come_before_predictions() -> None:
    policy, clock = made(by_position({0: (0.9, SOON), 10: (0.1, SOON), 20: (0.5, SOON)}))
    for key, position in enumerate((0, 10, 20)):
        use(policy, SimpleExtent(key, 4, first_position=position), clock, key + 1.0)
    policy.hint(0, Hint(ended=True))
    policy.hint(1, Hint(wanted_by=1))
    policy.check()
    assert order(policy) == [0, 2, 1]


def candidates() -> list[EvictionCandidate]:
    return [
        EvictionCandidate("long", [1, 2], 1.0, estimated_lifetime=60.0),
        EvictionCandidate("short", [3], 2.0, estimated_lifetime=3.0),
        EvictionCandidate("over", [4], 30.0, estimated_lifetime=0.0),
    ]


def test_candidates_that_are_predicted_to_end_soon_go_first() -> None:
    policy, _ = made(None)
    assert select_victims(policy.fresh, candidates(), 1) == ["short"]
    assert select_victims(policy.fresh, candidates(), 2) == ["short", "over"]
    assert select_victims(policy.fresh, candidates(), 5) == []


def test_to_ask_for_victims_teaches_nobody() -> None:
    reuse, lengths = FakeReuse(certain), FakeLengths()
    for predictor in (reuse, lengths):
        assert len(select_victims(made(predictor)[0].fresh, candidates(), 4)) == 3
    assert not reuse.told
    assert not lengths.told


def test_a_capacity_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1 block"):
        PredictivePolicy(capacity=0)
