"""`adaptive`: its shadow is LRU, and what it may lose to LRU is bounded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.benchmarks.replay.replayer import replay
from sagellm.benchmarks.traces.record import TraceRequest
from sagellm.core.clock import ManualClock
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.eviction import EvictionPolicy, Hint, SimpleExtent, Use
from sagellm.core.protocols.prefix_cache import PrefixReuseIndex
from sagellm.core.registry import registry
from sagellm.core.types import Namespace, Tokens
from sagellm.kvmgr.eviction.adaptive import AdaptivePolicy
from sagellm.kvmgr.eviction.learned import LearnedPolicy
from sagellm.kvmgr.eviction.lru import LRUPolicy
from sagellm.kvmgr.prefix_cache.hashed import HashedIndex
from sagellm.kvmgr.prefix_cache.radix import RadixIndex

CAPACITY = 250
INDEXES: list[Any] = [RadixIndex, HashedIndex]


def request(time_s: float, ids: Sequence[int], num_output_tokens: int = 0) -> TraceRequest:
    return TraceRequest(time_s, Tokens(ids), Namespace(), len(ids), num_output_tokens)


def hits(requests: Sequence[TraceRequest], policy: EvictionPolicy, capacity: int) -> list[int]:
    clock = ManualClock()
    return list(replay(requests, RadixIndex(block_size=1, policy=policy, clock=clock), clock, capacity).hits)


class Cache:
    """An index that serves one request after the other, with true block ids."""

    def __init__(
        self, index: Any, policy: EvictionPolicy, capacity: int, clock: ManualClock | None = None
    ) -> None:
        self.clock, self.policy, self.capacity = clock or ManualClock(), policy, capacity
        self.index: PrefixReuseIndex = index(block_size=1, policy=policy, clock=self.clock)
        self.free = list(range(capacity))

    def found(self, ids: Tokens) -> int:
        return self.index.lookup(ids).num_blocks

    def serve(self, one: TraceRequest) -> int:
        """Returns the blocks found."""
        self.clock.advance(max(0.0, one.time_s - self.clock.now()))
        found = self.index.pin(self.index.lookup(one.ids))
        num_new = len(one.ids) - found.num_blocks
        if num_new > len(self.free):
            freed = self.index.evict(num_new - len(self.free))
            assert freed is not None
            self.free += freed
        taken = [self.free.pop() for _ in range(num_new)]
        ids = [*self.index.block_ids(found), *taken]
        whole = self.index.insert(one.ids, ids, pin=True).hit
        if found.num_blocks:
            self.index.unpin(found)
        self.index.unpin(whole, Use(one.num_output_tokens, found.num_blocks))
        return found.num_blocks


@dataclass(frozen=True, slots=True)
class Step:
    """A request beside LRU: blocks found by the policy, by its shadow of LRU and by LRU; then the books."""

    own: int
    shadow: int
    lru: int
    regret: int
    budget: float


def beside_lru(
    requests: Sequence[TraceRequest], capacity: int, index: Any = RadixIndex, **options: float
) -> list[Step]:
    """The policy and a real LRU, one request at a time; `advance` is 0 unless given."""
    policy = AdaptivePolicy(capacity=capacity, **{"advance": 0, **options})  # type: ignore[arg-type]
    caches = [Cache(index, one, capacity) for one in (policy, LRUPolicy())]
    steps = []
    for one in requests:
        lead = policy.lead
        own, lru = (cache.serve(one) for cache in caches)
        steps.append(Step(own, own - (policy.lead - lead), lru, policy.regret, policy.budget))
    policy.check()
    return steps


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


def branching_world(seed: int, num: int, depth: int = 14) -> list[TraceRequest]:
    """Paths through a tree of two symbols: prefixes that many share, that split, end inside each other and
    come back after they were gone."""
    draw = random.Random(seed)
    requests = []
    for number in range(num):
        ids = [draw.randrange(3)] * 3 + [int(draw.random() < 0.25) for _ in range(depth)]
        requests.append(request(float(number), ids[: draw.randrange(1, 4 + depth)]))
    return requests


# -- the shadow


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("options", [{}, {"max_regret": 0.1}, {"max_regret": 1.0}, {"stake": 5.0}])
def test_the_shadow_finds_what_lru_finds(options: dict[str, float], index: Any) -> None:
    """Request by request, although the cache beside it holds other blocks."""
    for requests, capacity in (
        (branching_world(0, 600), 60),
        (steady_world(1, 150), 300),
        (turning_world(2, 200, 400), 150),
    ):
        steps = beside_lru(requests, capacity, index, **options)
        assert [one.shadow for one in steps] == [one.lru for one in steps]
    if options:
        assert any(one.own != one.lru for one in steps)


paths = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple), min_size=1, max_size=40)


@given(paths, st.integers(9, 24), st.sampled_from([0.0, 0.05, 1.0]), st.sampled_from(INDEXES))
def test_the_shadow_is_lru(
    taken: list[tuple[int, ...]], capacity: int, max_regret: float, index: Any
) -> None:
    requests = [request(float(number), ids) for number, ids in enumerate(taken)]
    for step in beside_lru(requests, capacity, index, max_regret=max_regret):
        assert step.shadow == step.lru


def check_bound(steps: Sequence[Step], stake: float) -> None:
    """The theorem of the docstring: what is over the budget was lost in one request, and is paid back."""
    over, best_lead, lead = 0, 0, 0
    for step in steps:
        lost = max(0, step.lru - step.own)
        lead += step.own - step.lru
        best_lead = max(best_lead, lead)
        over = max(over, lost)
        floor = step.budget - (stake - 1) * max(0, lead)
        assert step.regret <= floor + (stake - 1) * best_lead + over
        assert -lead <= step.regret


@given(paths, st.integers(9, 24), st.sampled_from([0.0, 0.02, 0.2]), st.sampled_from(INDEXES))
def test_the_bound_holds(taken: list[tuple[int, ...]], capacity: int, max_regret: float, index: Any) -> None:
    requests = [request(float(number), ids) for number, ids in enumerate(taken)]
    check_bound(beside_lru(requests, capacity, index, max_regret=max_regret, stake=1.0), 1.0)


@pytest.mark.parametrize("stake", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_bound_holds_where_what_was_learned_turns_wrong(seed: int, stake: float) -> None:
    check_bound(beside_lru(turning_world(seed, 800, 1_000), CAPACITY, stake=stake), stake)
    check_bound(beside_lru(branching_world(seed, 1_000), 40, max_regret=0.02, stake=stake), stake)


@pytest.mark.parametrize(
    ("seed", "capacity", "max_regret", "longest", "num_calm"),
    [(2, 33, 0.01, 5, 200), (16, 53, 0.1, 10, 200), (23, 79, 0.05, 5, 100), (3, 60, 0.02, 20, 300)],
)
def test_the_bound_holds_where_all_ask_for_what_is_missing(
    seed: int, capacity: int, max_regret: float, longest: int, num_calm: int
) -> None:
    """After calm traffic every second request is the one of which LRU holds most that the cache does not."""
    draw = random.Random(seed)
    policy = AdaptivePolicy(capacity=capacity, max_regret=max_regret, stake=1.0, advance=0)
    own, lru = (Cache(RadixIndex, one, capacity) for one in (policy, LRUPolicy()))
    recent: list[Tokens] = []
    steps = []
    for number in range(600):
        ids = Tokens(range(1_000 * number, 1_000 * number + draw.randrange(2, longest + 1)))
        if number > num_calm and number % 2:
            gaps = [lru.found(one) - own.found(one) for one in recent]
            if max(gaps) > 0:
                ids = recent[gaps.index(max(gaps))]
        elif number <= num_calm and recent and draw.random() < 0.5:
            ids = draw.choice(recent[-12:])
        recent = [*(one for one in recent if one != ids), ids][-60:]
        lead = policy.lead
        hit, hit_by_lru = (cache.serve(request(float(number), list(ids))) for cache in (own, lru))
        steps.append(Step(hit, hit - (policy.lead - lead), hit_by_lru, policy.regret, policy.budget))
    assert sum(step.lru > step.own for step in steps) > 10
    check_bound(steps, 1.0)


# -- the advance


def rounds_world(seed: int, gap_s: float) -> list[TraceRequest]:
    """24 sessions take a turn each per round, in a new order each time. LRU evicts most of them too early."""
    draw = random.Random(seed)
    lengths = [draw.randrange(6, 14) for _ in range(24)]
    requests = []
    for number in range(384):
        if number % 24 == 0:
            order = draw.sample(range(24), 24)
        name = order[number % 24]
        lengths[name] += draw.randrange(1, 4)
        ids = [0, 1, *range(1_000 * (name + 1), 1_000 * (name + 1) + lengths[name])]
        requests.append(request(gap_s * number, ids))
    return requests


@pytest.mark.parametrize("gap_s", [0.3, 1.2, 2.4, 5.0])
def test_the_first_requests_gain_at_any_pace(gap_s: float) -> None:
    """384 requests have a budget of about 20 blocks. Without an advance one wrong choice took all of it."""
    requests, capacity = rounds_world(0, gap_s), 320
    lru, adaptive = (
        sum(hits(requests, one, capacity)) for one in (LRUPolicy(), AdaptivePolicy(capacity=capacity))
    )
    assert adaptive > 1.4 * lru


def test_the_advance_is_bounded_by_the_cache_and_ends() -> None:
    requests = [request(float(number), range(100 * number, 100 * number + 50)) for number in range(40)]
    steps = beside_lru(requests, 200, max_regret=0.01, stake=1.0, advance=30)
    budgets = [step.budget for step in steps]
    assert budgets[0] == 0.5 + 0.05 * 50, "of the blocks that are there"
    assert budgets[9] == 5.0 + 0.05 * 200
    assert budgets[28] == pytest.approx(14.5 + 0.5)
    assert budgets[29:31] == pytest.approx([15.0, 15.5])


# -- worlds


@pytest.mark.parametrize("seed", [0, 1])
def test_little_is_lost_where_what_was_learned_turns_wrong(seed: int) -> None:
    requests = turning_world(seed)
    num_asked = sum(len(one.ids) for one in requests)
    lru = sum(hits(requests, LRUPolicy(), CAPACITY))
    learned = sum(hits(requests, LearnedPolicy(capacity=CAPACITY), CAPACITY))
    adaptive = sum(hits(requests, AdaptivePolicy(capacity=CAPACITY), CAPACITY))
    assert learned < 0.9 * lru
    assert adaptive > lru - 0.003 * num_asked


@pytest.mark.parametrize("seed", range(2))
def test_most_of_the_gain_is_kept_where_learning_wins(seed: int) -> None:
    requests = steady_world(seed, 1_500)
    lru, learned, adaptive = (
        sum(hits(requests, policy, 400))
        for policy in (
            LRUPolicy(),
            LearnedPolicy(capacity=400),
            AdaptivePolicy(capacity=400),
        )
    )
    assert learned - lru > 0.15 * sum(len(one.ids) for one in requests)
    assert adaptive - lru > 0.7 * (learned - lru)


def test_without_a_budget_it_is_lru() -> None:
    for requests in (steady_world(0), turning_world(0, 300, 500), branching_world(3, 500)):
        adaptive = AdaptivePolicy(capacity=100, max_regret=0.0)
        assert hits(requests, adaptive, 100) == hits(requests, LRUPolicy(), 100)


def test_where_all_fits_nothing_is_lost() -> None:
    requests = steady_world(0, 200)
    adaptive = AdaptivePolicy(capacity=100_000)
    assert hits(requests, adaptive, 100_000) == hits(requests, LRUPolicy(), 100_000)
    assert adaptive.regret == 0


def test_it_learns_while_the_order_is_lru() -> None:
    requests = turning_world(0, 300, 300)
    policy = AdaptivePolicy(capacity=CAPACITY, max_regret=0.0)
    hits(requests, policy, CAPACITY)
    late = [record for record in policy._history if record.used_s > requests[-1].time_s - 100.0]
    assert len(late) > 100


def test_an_extent_that_ended_is_no_loss() -> None:
    """LRU evicts it first, so it is not missed."""
    clock = ManualClock()
    policy = AdaptivePolicy(capacity=20)
    index = RadixIndex(block_size=1, policy=policy, clock=clock)
    replay([request(0.0, range(10)), request(1.0, range(100, 110))], index, clock, 20)
    assert index.hint(index.lookup(Tokens(range(100, 110))), Hint(ended=True)) == 10
    index.evict(10)
    policy.check()
    assert policy.regret == 0
    assert index.lookup(Tokens(range(10))).num_blocks == 10


@pytest.mark.parametrize("index", INDEXES)
def test_a_retention_counts_more_than_the_budget_while_it_lasts(index: Any) -> None:
    old, young, others = range(10), range(100, 110), range(200, 210)
    for time_s, kept, gone in ((50.0, old, young), (200.0, young, old)):
        clock = ManualClock()
        policy = AdaptivePolicy(capacity=20, max_regret=0.0, clock=clock)
        cache = Cache(index, policy, 20, clock)
        cache.serve(request(0.0, old))
        cache.serve(request(1.0, young))
        hit = cache.index.lookup(Tokens(old))
        assert cache.index.hint(hit, Hint(priority=100, duration_s=100.0)) == 10
        cache.serve(request(time_s, others))
        assert cache.index.lookup(Tokens(kept)).num_blocks == 10
        assert cache.index.lookup(Tokens(gone)).num_blocks == 0
        policy.check()


@pytest.mark.parametrize("index", INDEXES)
def test_what_others_hold_is_no_gain(index: Any) -> None:
    """LRU cannot evict it either, however long ago it was used."""
    policy = AdaptivePolicy(capacity=30)
    cache = Cache(index, policy, 30)
    cache.serve(request(0.0, range(10)))
    running = cache.index.pin(cache.index.lookup(Tokens(range(8))))
    for number in range(1, 40):
        cache.serve(request(float(number), range(100 * number, 100 * number + 10)))
    assert cache.serve(request(50.0, range(10))) == 8
    assert policy.lead == 0
    cache.index.unpin(running)
    policy.check()


@pytest.mark.parametrize("index", INDEXES)
def test_a_cache_that_was_cleared_begins_anew(index: Any) -> None:
    """LRU would have been cleared too: nothing is missed."""
    policy = AdaptivePolicy(capacity=60, max_regret=0.1)
    cache = Cache(index, policy, 60)
    for one in branching_world(4, 300):
        cache.serve(one)
    cache.free += cache.index.clear()
    assert policy.regret == -policy.lead
    lead = policy.lead
    for one in branching_world(4, 10):
        cache.serve(one)
    assert policy.lead == lead
    policy.check()


# -- options and memory


@pytest.mark.parametrize("max_regret", [-0.1, 1.1, float("nan"), "x", True])
def test_a_share_that_is_none_is_refused(max_regret: Any) -> None:
    with pytest.raises(ConfigError, match="max_regret must be a number from 0 to 1"):
        AdaptivePolicy(max_regret=max_regret)


@pytest.mark.parametrize("stake", [0.5, float("inf"), float("nan"), "x", True])
def test_a_stake_below_one_is_refused(stake: Any) -> None:
    with pytest.raises(ConfigError, match="stake must be a number of at least 1"):
        AdaptivePolicy(stake=stake)


@pytest.mark.parametrize("advance", [-1, 2.0, "x", True])
def test_an_advance_that_is_none_is_refused(advance: Any) -> None:
    with pytest.raises(ConfigError, match="advance must be a number of requests, 0 or more"):
        AdaptivePolicy(advance=advance)


def test_a_fresh_one_has_the_same_options() -> None:
    policy = AdaptivePolicy(capacity=10, max_regret=0.5, stake=3.0, advance=7)
    fresh = policy.fresh()
    assert (fresh._max_regret, fresh._stake, fresh._advance, fresh._given_capacity) == (0.5, 3.0, 7, 10)
    assert fresh.num_evictable == 0


@pytest.mark.parametrize("name", ["learned", "adaptive"])
def test_memory_is_bounded(name: str) -> None:
    """Whatever comes: new blocks, and pins that never come back."""
    policy: Any = registry("policy").create(name, capacity=50, max_records=200)
    for key in range(4_000):
        policy.insert(SimpleExtent(key, 1, last_use=key, used_s=float(key)))
        if key % 3 == 0:
            policy.pin(key)
        policy.evict(max(0, policy.num_evictable - 50), lambda run, count: None)
    policy.check()
    assert len(policy._history) == 200
    assert len(policy._model) < 100
    assert len(policy._ranked._keys_in_turn) <= 100
    assert len(policy._history._open) <= 200
    assert len(policy._by_value._order) <= 200


@pytest.mark.parametrize("index", INDEXES)
def test_the_shadow_remembers_what_lru_holds_and_no_more(index: Any) -> None:
    capacity = 40
    policy = AdaptivePolicy(capacity=capacity, max_regret=1.0)
    cache = Cache(index, policy, capacity)
    for one in branching_world(5, 3_000):
        cache.serve(one)
        shadow = policy._shadow
        assert shadow.num_kept <= capacity
        assert len(shadow._use_of) + shadow._num_runs <= 64 + 4 * capacity
    policy.check()


def test_retentions_do_not_pile_up() -> None:
    """One is noted at each use of its extent, and ends in a fortnight."""
    policy = AdaptivePolicy(capacity=10)
    kept = SimpleExtent(0, bonus_s=1e6)
    policy.insert(kept)
    for number in range(1, 1_000):
        policy.pin(kept.key)
        kept.used_s, kept.last_use = float(number), number
        policy.unpin(kept)
        policy.insert(SimpleExtent(number, last_use=number, used_s=float(number)))
        policy.evict(1, lambda run, count: None)
    assert policy.num_evictable == 1
    assert len(policy._retained) <= 100
    assert len(policy._shadow._awaited) <= 200


class Counting(dict[Any, Any]):
    """Counts how many of its entries were looked at one after the other."""

    num_seen = 0

    def __iter__(self) -> Any:
        for key in super().__iter__():
            self.num_seen += 1
            yield key


@pytest.mark.parametrize("num_retained", [1_000, 600])
def test_evicting_what_has_a_retention_is_linear(num_retained: int) -> None:
    """In order of when the retentions end; what has none goes before."""
    policy = AdaptivePolicy(capacity=1_000)
    spared, order = Counting(), Counting()
    policy._spared.live, policy._shadow._order = spared, order  # type: ignore[assignment]
    for key in range(1_000):
        bonus_s = 3_600.0 if key < num_retained else 0.0
        policy.insert(SimpleExtent(key, last_use=key, used_s=float(key), bonus_s=bonus_s))
    gone: list[int] = []
    policy.evict(800, lambda run, count: gone.append(run.key))
    policy.check()
    assert gone == [*range(num_retained, 1_000), *range(num_retained)][:800]
    assert spared.num_seen + order.num_seen < 20_000
