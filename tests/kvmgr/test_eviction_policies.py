"""What each eviction policy does differently, on streams so small that one sees why."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from flat_oracle import FlatCache
from sagellm.core.clock import ManualClock
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.eviction import EvictionPolicy, Hint, SimpleExtent
from sagellm.core.registry import registry
from sagellm.core.types import Tokens
from sagellm.kvmgr.eviction.arc import ARCPolicy
from sagellm.kvmgr.eviction.hotspot import HotspotPolicy
from sagellm.kvmgr.eviction.lfu import LFUPolicy
from sagellm.kvmgr.eviction.qos import QoSPolicy, jain_index
from sagellm.kvmgr.eviction.s3fifo import S3FIFOPolicy
from sagellm.kvmgr.eviction.sieve import SievePolicy
from sagellm.kvmgr.eviction.slo import SLOPolicy
from sagellm.kvmgr.eviction.two_q import TwoQPolicy
from sagellm.kvmgr.prefix_cache.radix import RadixIndex

OURS = ["arc", "cost_benefit", "fifo", "hotspot", "lfu", "qos", "s3fifo", "sieve", "slo", "two_q"]


def make(name: str, **options: Any) -> EvictionPolicy:
    policy: EvictionPolicy = registry("policy").create(name, **options)
    return policy


def hold(policy: EvictionPolicy, runs: Sequence[SimpleExtent]) -> None:
    for tick, run in enumerate(runs):
        run.last_use = tick
        policy.insert(run)


def use(policy: EvictionPolicy, run: SimpleExtent, tick: int) -> None:
    policy.pin(run.key)
    run.num_uses += 1
    run.last_use = tick
    policy.unpin(run)


def evicted(policy: EvictionPolicy, count: int) -> list[int]:
    """Keys in the order in which they went; a run goes whole before its parent comes."""
    given: list[int] = []

    def give_up(run: SimpleExtent, num_blocks: int) -> SimpleExtent | None:
        run.num_blocks -= num_blocks
        given.append(run.key)
        return run.parent if not run.num_blocks else None

    policy.evict(count, give_up)
    policy.check()
    return given


# -- hints, in every policy that takes them


@pytest.mark.parametrize("name", OURS)
def test_ended_goes_first_and_wanted_goes_last(name: str) -> None:
    policy = make(name)
    hold(policy, [SimpleExtent(key) for key in range(6)])
    policy.hint(0, Hint(wanted_by=1))
    policy.hint(5, Hint(superseded=True))
    policy.check()
    order = evicted(policy, 6)
    assert (order[0], order[-1]) == (5, 0)


@pytest.mark.parametrize("name", OURS)
def test_who_is_no_longer_wanted_has_its_old_place(name: str) -> None:
    orders = []
    for hints in ([], [Hint(wanted_by=2), Hint(ended=True, wanted_by=1), Hint(wanted_by=0)]):
        policy = make(name)
        hold(policy, [SimpleExtent(key) for key in range(4)])
        for hint in hints:
            policy.hint(1, hint)
            policy.check()
        orders.append(evicted(policy, 4))
    assert orders[0] == orders[1]


@pytest.mark.parametrize("name", OURS)
def test_a_use_serves_one_of_those_who_wait(name: str) -> None:
    policy = make(name)
    runs = [SimpleExtent(key) for key in range(4)]
    hold(policy, runs)
    policy.hint(2, Hint(wanted_by=2))
    use(policy, runs[2], 5)
    assert evicted(policy, 3) != [2]
    assert evicted(policy, 1) == [2]


@pytest.mark.parametrize("name", OURS)
def test_a_pinned_extent_can_be_wanted(name: str) -> None:
    policy = make(name)
    runs = [SimpleExtent(key) for key in range(4)]
    hold(policy, runs)
    policy.pin(0)
    policy.hint(0, Hint(wanted_by=1))
    policy.unpin(runs[0])
    assert evicted(policy, 4)[-1] == 0


@pytest.mark.parametrize("name", OURS)
def test_the_tail_of_a_split_stays_wanted(name: str) -> None:
    policy = make(name)
    tail = SimpleExtent(0, 3)
    hold(policy, [tail, SimpleExtent(1), SimpleExtent(2)])
    policy.hint(0, Hint(wanted_by=1))
    head = SimpleExtent(0, 1)
    tail.key, tail.num_blocks, tail.first_position, tail.parent = 9, 2, 1, head
    policy.split(0, head, tail)
    policy.check()
    assert evicted(policy, 5)[2:] == [9, 0]


@pytest.mark.parametrize("name", OURS)
def test_a_tail_may_have_the_key_of_one_that_went(name: str) -> None:
    """Keys are content: what was taken out comes back as the tail of a split."""
    policy = make(name)
    whole, other = SimpleExtent(0, 3), SimpleExtent(9, 2)
    hold(policy, [whole, other])
    policy.remove(9)
    head = SimpleExtent(0, 1)
    whole.key, whole.num_blocks, whole.first_position, whole.parent = 9, 2, 1, head
    policy.split(0, head, whole)
    policy.check()
    assert evicted(policy, 3) == [9, 0]


@pytest.mark.parametrize("name", OURS)
def test_a_capacity_below_one_block_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match="at least 1 block"):
        make(name, capacity=0)


# -- in the radix tree


@pytest.mark.parametrize("name", OURS)
def test_in_the_radix_tree(name: str) -> None:
    """Prompts that share prefixes, pinned, grown, split, evicted: both keep their books."""
    draw = random.Random(5)
    policy = make(name, capacity=60)
    clock = ManualClock()
    index = RadixIndex(block_size=1, policy=policy, clock=clock)
    pinned = []
    for _ in range(400):
        clock.advance(1.0)
        length = draw.randrange(1, 12)
        tokens = Tokens([draw.randrange(2) for _ in range(length)])
        hit = index.pin(index.lookup(tokens))
        missing = length - hit.num_blocks
        index.evict(min(index.num_evictable, max(0, index.num_cached + missing - 60)))
        ids = array("i", [*index.block_ids(hit), *(draw.randrange(1 << 30) for _ in range(missing))])
        pinned.append(index.insert(tokens, ids, pin=True).hit)
        index.unpin(hit)
        if len(pinned) > 3:
            index.unpin(pinned.pop(draw.randrange(4)))
        index.check()
        policy.check()
        assert policy.num_evictable <= index.num_evictable
    for hit in pinned:
        index.unpin(hit)
    assert len(index.clear()) > 0
    assert (index.num_cached, policy.num_evictable) == (0, 0)


# -- one by one


def test_fifo_keeps_the_order_of_arrival() -> None:
    policy = make("fifo")
    runs = [SimpleExtent(key) for key in range(3)]
    hold(policy, runs)
    use(policy, runs[0], 9)
    assert evicted(policy, 3) == [0, 1, 2]


def test_a_parent_takes_the_place_of_its_child() -> None:
    policy = make("fifo")
    hold(policy, [SimpleExtent(1, parent=SimpleExtent(0, 2), first_position=2), SimpleExtent(2)])
    assert evicted(policy, 4) == [1, 0, 2]


def test_lfu_forgets_old_fame_by_ageing() -> None:
    survivors = {}
    for ageing in (True, False):
        cache = FlatCache(LFUPolicy(ageing=ageing), 2)
        cache.hits([1] * 9)
        cache.hits(range(100, 130))
        survivors[ageing] = 1 in cache.resident
    assert survivors == {True: False, False: True}


def test_lfu_does_not_make_a_parent_younger_than_its_child() -> None:
    policy = LFUPolicy()
    hold(policy, [SimpleExtent(key) for key in range(10, 15)])
    evicted(policy, 5)
    hold(
        policy,
        [SimpleExtent(1, parent=SimpleExtent(0, num_uses=2), first_position=1), SimpleExtent(2, num_uses=2)],
    )
    assert evicted(policy, 3) == [1, 0, 2]


def test_arc_keeps_what_was_used_twice_through_a_scan() -> None:
    cache = FlatCache(ARCPolicy(capacity=10), 10)
    cache.hits([1, 2, 3, 1, 2, 3])
    cache.hits(range(100, 200))
    assert {1, 2, 3} <= cache.resident.keys()


def test_arc_counts_blocks() -> None:
    policy = ARCPolicy(capacity=20)
    runs = [SimpleExtent(key, 5) for key in range(4)]
    hold(policy, runs)
    use(policy, runs[3], 9)
    assert evicted(policy, 6) == [0, 1]
    policy.insert(SimpleExtent(0, 5, last_use=10))  # meets its ghost: from now on 5 blocks used once may stay
    assert evicted(policy, 4 + 5) == [1, 3]
    assert evicted(policy, 20) == [0, 2]


def test_s3fifo_drops_one_hit_wonders_and_remembers_them() -> None:
    cache = FlatCache(S3FIFOPolicy(capacity=10), 10)
    cache.hits([1, 1, 1, *range(100, 110)])
    assert 1 in cache.resident
    assert 100 not in cache.resident
    cache.hits([100, *range(200, 230)])
    assert 100 in cache.resident


def test_sieve_gives_a_used_extent_one_more_round() -> None:
    cache = FlatCache(SievePolicy(), 3)
    cache.hits([1, 2, 3, 1, 4])
    assert cache.resident.keys() == {1, 3, 4}
    cache.hits([5, 6])
    assert cache.resident.keys() == {1, 5, 6}
    cache.hits([7])  # the hand goes on from where it evicted, it does not start again at the oldest
    assert cache.resident.keys() == {1, 6, 7}


def test_two_q_admits_to_the_main_queue_what_returns_late() -> None:
    cache = FlatCache(TwoQPolicy(capacity=8), 8)
    cache.hits([1, 1, *range(100, 108)])
    assert 1 not in cache.resident  # two uses in a row count as one
    cache.hits([1, *range(200, 220)])
    assert 1 in cache.resident


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("two_q", {"in_share": 2.0}),
        ("s3fifo", {"small_share": 0.0}),
        ("qos", {"tolerance": 1.0}),
        ("qos", {"weights": {"a": 0.0}}),
        ("slo", {"ttft_slo_s": 0.0}),
        ("hotspot", {"threshold": 1.0}),
    ],
)
def test_options_out_of_range_are_errors(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        make(name, **options)


def test_hotspot_protects_what_many_share_until_it_cools() -> None:
    for used_s, order in ((10.0, [1, 2, 0]), (2_000.0, [0, 1, 2])):
        policy = HotspotPolicy(half_life_s=100.0)
        policy.insert(SimpleExtent(0, num_uses=50, used_s=0.0))
        policy.insert(SimpleExtent(1, used_s=used_s - 1, last_use=1))
        policy.insert(SimpleExtent(2, used_s=used_s, last_use=2))
        assert evicted(policy, 3) == order


def test_hotspot_heat_grows_with_each_use() -> None:
    policy = HotspotPolicy()
    runs = [SimpleExtent(key) for key in range(3)]
    hold(policy, runs)
    for tick in range(4):
        use(policy, runs[0], tick)
    for run in runs[1:]:
        use(policy, run, 9)
    assert evicted(policy, 3) == [1, 2, 0]


def test_hot_extents_may_not_take_all() -> None:
    policy = HotspotPolicy(capacity=10, max_share=0.2)
    hold(policy, [SimpleExtent(key, num_uses=100 + key) for key in range(10)])
    assert evicted(policy, 10)[-2:] == [8, 9]


def test_slo_gives_up_low_priorities_first() -> None:
    policy = SLOPolicy(clock=ManualClock())
    hold(policy, [SimpleExtent(key) for key in range(4)])
    policy.hint(0, Hint(priority=2))
    policy.hint(3, Hint(priority=-1))
    policy.pin(0)
    policy.unpin(SimpleExtent(0))  # the priority outlasts a pin
    policy.insert(SimpleExtent(4, priority=1))
    assert evicted(policy, 5) == [3, 1, 2, 4, 0]


def test_slo_keeps_for_the_duration_of_a_hint() -> None:
    clock = ManualClock(100.0)
    policy = SLOPolicy(clock=clock)
    for key in range(3):
        policy.insert(SimpleExtent(key, used_s=100.0 + key))
    policy.hint(0, Hint(duration_s=30.0))
    policy.insert(SimpleExtent(3, used_s=200.0))
    assert evicted(policy, 4) == [1, 2, 0, 3]


def test_slo_spares_what_would_cost_the_deadline() -> None:
    policy = SLOPolicy(clock=ManualClock(), ttft_slo_s=0.5, patience_s=10.0)
    policy.insert(SimpleExtent(0, 1_000, used_s=0.0))
    policy.insert(SimpleExtent(1, 1, used_s=5.0))
    assert evicted(policy, 1) == [1]


# -- fairness


@pytest.mark.parametrize(
    ("values", "index"), [([1, 1, 1], 1.0), ([1, 0, 0, 0], 0.25), ([0, 0], 1.0), ([1e-300, 1e-300], 1.0)]
)
def test_jain_index(values: list[float], index: float) -> None:
    assert jain_index(values) == pytest.approx(index)


@pytest.mark.parametrize("values", [[], [1.0, -0.5]])
def test_jain_index_of_nothing_is_an_error(values: list[float]) -> None:
    with pytest.raises(ConfigError, match="at least one value"):
        jain_index(values)


def loops(weights: dict[str, float] | None) -> dict[str, float]:
    """Hit ratios of two tenants that draw alike from 100 blocks of their own, in a cache of 80."""
    draw = random.Random(3)
    cache = FlatCache(QoSPolicy(capacity=80, weights=weights, tolerance=0.1), 80)
    hits = {"a": 0, "b": 0}
    for _ in range(10_000):
        tenant = draw.choice("ab")
        hits[tenant] += cache.access(draw.randrange(100) + (100 if tenant == "b" else 0), tenant)
    return {tenant: count / 5_000 for tenant, count in hits.items()}


def test_a_tenant_of_larger_weight_is_served_better() -> None:
    equal, unequal = loops(None), loops({"a": 2.0})
    assert equal["a"] == pytest.approx(equal["b"], abs=0.03)
    assert unequal["a"] > 1.5 * unequal["b"]


def test_tenants_that_left_are_forgotten() -> None:
    """Names come from outside, and never end."""
    policy = QoSPolicy(capacity=50)
    for key in range(5_000):
        policy.insert(SimpleExtent(key, last_use=key, tenant=f"tenant {key}"))
        policy.evict(max(0, policy.num_evictable - 50), lambda extent, count: None)
    policy.check()
    assert len(policy._tenants) <= 1_024
