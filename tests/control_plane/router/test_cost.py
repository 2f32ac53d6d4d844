"""What the cost router weighs, term by term."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.control_plane.router.cost import CostRouter
from sagellm.core.clock import ManualClock
from sagellm.core.errors import ConfigError, UnknownNameError
from sagellm.core.protocols.router import (
    CachedPrefix,
    ExecutionInstance,
    InstanceType,
    Placement,
    RequestMetadata,
)
from sagellm.core.types import SLO, Namespace, Tokens
from tests.contracts.test_routers import instances, named, requests
from tests.effort import examples

near: Any = pytest.approx
NOTHING = CachedPrefix()
ONE = RequestMetadata("1", Tokens(range(1000)), kv_cache_size_tokens=1100)
ALONE: dict[str, Any] = {"decode_weight": 0.0, "delay_weight": 0.0, "slowdown_weight": 0.0, "affinity_s": 0.0}
"""Only what computing the prompt takes."""


def instance(name: str, **given: Any) -> ExecutionInstance:
    return ExecutionInstance(name, **{"prefill_token_s": 1e-3, "step_s": 0.01, **given})


def place(
    router: CostRouter, *fleet: ExecutionInstance, request: RequestMetadata = ONE, **cached: CachedPrefix
) -> Placement:
    return router.place(request, fleet, [cached.get(one.instance_id, NOTHING) for one in fleet])


# -- the sum, and its terms


@settings(max_examples=examples(300), deadline=None)
@given(
    st.lists(st.tuples(instances, st.integers(0, 4000), st.integers(0, 900)), min_size=1, max_size=6),
    st.lists(requests, min_size=1, max_size=4),
    st.booleans(),
)
def test_the_cost_is_the_sum_of_its_terms(
    fleet: list[Any], asked: list[RequestMetadata], fetch: bool
) -> None:
    """The loop over all instances, against the terms that it is made of."""
    router = CostRouter(clock=ManualClock(), fetch=fetch, transfer_latency_s=0.0)
    known = named(*(one for one, _, _ in fleet))
    cached = [CachedPrefix(device, device + lower) for _, device, lower in fleet]
    for request in asked:
        views, _, _ = router._all_views(known)
        weighed = router._asked(request, views, cached)
        places = range(len(known))
        expected = [math.fsum(router._terms(weighed, views, cached, i).values()) for i in places]
        assert router._costs(weighed, views, cached, places) == near(expected)
        router.place(request, known, cached)
        router.check()


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(instances, min_size=2, max_size=6), st.data())
def test_views_that_are_kept_are_those_made_anew(fleet: list[ExecutionInstance], data: Any) -> None:
    """Reports that change one by one, ended requests, instances that come, go and change their order."""
    clock = ManualClock()
    kept, anew = CostRouter(clock=clock), CostRouter(clock=clock)
    known = named(*fleet)
    for number in range(12):
        act = data.draw(st.sampled_from(["place", "place", "report", "end", "order"]))
        at = data.draw(st.integers(0, len(known) - 1))
        if act == "report":
            known[at] = replace(known[at], num_queued_tokens=7 * number, reported_s=clock.now())
        elif act == "end":
            for router in (kept, anew):
                router.observe(known[at].instance_id, {"ttft": 0.1 * number, "tpot": 0.01})
        elif act == "order":
            known = data.draw(st.permutations(known))
        else:
            asked, some = data.draw(requests), known[: max(1, at)] if number % 3 == 0 else known
            anew._seen.clear()
            cached = [CachedPrefix(64 * i, 100 * i) for i in range(len(some))]
            assert str(kept.place(asked, some, cached)) == str(anew.place(asked, some, cached))
        clock.advance(data.draw(st.sampled_from([0.0, 0.1])))


def test_terms_of_a_placement() -> None:
    fleet = instance("a", num_queued_tokens=500, num_running=10, num_free_blocks=50, block_size=16)
    placement = place(CostRouter(), fleet, a=CachedPrefix(200, 400))
    assert placement.terms == near(
        {
            "queue": 0.5,
            "prefill": 0.6,
            "load": 200 * 5e-6,
            "delay": 0.6 * 10,
            "decode": 100 * 0.01,
            "slowdown": 0.0,
            "memory": (1100 - 200 - 50 * 16) * 1e-3,
        }
    )
    assert placement.reason == "200 tokens cached, 0.5 s ahead"


def test_the_last_token_is_always_computed() -> None:
    assert place(CostRouter(**ALONE), instance("a"), a=CachedPrefix(1000, 1000)).terms["prefill"] == near(
        1e-3
    )


def test_a_long_prefix_is_worth_a_queue() -> None:
    warm = CachedPrefix(900, 900)
    for queued, expected in ((899, "b"), (901, "a")):
        fleet = instance("a"), instance("b", num_queued_tokens=queued)
        assert place(CostRouter(**ALONE), *fleet, b=warm).prefill == expected


def test_a_lower_tier_is_slower_than_the_device_and_faster_than_computing() -> None:
    fleet = instance("a"), instance("b"), instance("c")
    router = CostRouter(**ALONE)
    assert place(router, *fleet, b=CachedPrefix(0, 800)).prefill == "b"
    assert place(router, *fleet, b=CachedPrefix(0, 800), c=CachedPrefix(800, 800)).prefill == "c"


def test_a_burst_between_two_reports_is_spread() -> None:
    clock = ManualClock(1.0)
    router = CostRouter(clock=clock)
    fleet = [instance(name, reported_s=0.5) for name in "abc"]
    assert sorted(place(router, *fleet).prefill for _ in range(9)) == sorted("abc" * 3)
    fleet[0] = instance("a", reported_s=1.5)
    assert place(router, *fleet).prefill == "a", "its report is later than what was placed there"


def test_a_short_memory_costs_what_must_be_computed_again() -> None:
    small = instance("a", num_free_blocks=10, block_size=16)
    assert place(CostRouter(), small, instance("b", num_free_blocks=100, block_size=16)).prefill == "b"


# -- longer steps


def seen(router: CostRouter, fleet: Sequence[ExecutionInstance], clock: ManualClock) -> None:
    """Reports of instances with 1 to 20 rows of 500 to 1,000 tokens: 10 ms, 1 ms a row, 1 us a token."""
    for number in range(1, 21):
        clock.advance(1.0)
        for each in fleet:
            context = number * (500 + 500 * (number % 2))
            report = replace(
                each, num_running=number, kv_cache_usage=context / 16_000, num_blocks=1000, block_size=16,
                step_s=0.01 + 1e-3 * number + 1e-6 * context, reported_s=clock.now(),
            )  # fmt: skip
            place(router, report)


def test_a_placement_foresees_how_it_lengthens_the_steps_of_all() -> None:
    clock = ManualClock()
    router = CostRouter(clock=clock)
    seen(router, [instance("a")], clock)
    clock.advance(1.0)
    now = instance(
        "a", num_running=5, kv_cache_usage=0.25, num_blocks=1000, block_size=16, num_free_blocks=750,
        step_s=0.019, reported_s=clock.now(),
    )  # fmt: skip
    longer_s = 1e-3 + (1000 + 100 / 2) * 1e-6
    clock.advance(0.1)
    first, second = (place(router, now).terms for _ in range(2))
    assert first["slowdown"] == pytest.approx(5 * longer_s * 100 * 256 / 356, rel=1e-3)
    step_s = 0.01 + 5e-3 + 4000e-6
    assert first["decode"] == pytest.approx(100 * (step_s + longer_s), rel=1e-3)
    assert second["decode"] == pytest.approx(100 * (step_s + 2 * longer_s), rel=1e-3), "the first one counts"
    assert second["slowdown"] == pytest.approx(first["slowdown"] * 6 / 5, rel=1e-3)


def test_a_long_batch_gets_no_more_for_a_short_prefix() -> None:
    clock = ManualClock()
    router = CostRouter(clock=clock)
    seen(router, [instance("a"), instance("b")], clock)
    clock.advance(1.0)
    fleet = [instance(name, num_running=rows, reported_s=clock.now()) for name, rows in (("a", 60), ("b", 1))]
    assert place(router, *fleet, a=CachedPrefix(300, 300)).prefill == "b"


def test_the_length_of_answers_is_learned_where_requests_do_not_say() -> None:
    router, silent = CostRouter(expected_output=100), replace(ONE, kv_cache_size_tokens=0)
    assert place(router, instance("a"), request=silent).terms["decode"] == near(100 * 0.01)
    for _ in range(200):
        router.observe("a", {"tpot": 0.01, "decode": 3.99})
    assert place(router, instance("a"), request=silent).terms["decode"] == pytest.approx(4.0, rel=1e-3)


def test_prompts_of_a_prefill_instance_are_not_delayed_by_one_behind_them() -> None:
    placement = place(CostRouter(separation="always"), replace(PREFILL, num_waiting=9), DECODE)
    assert placement.is_separated
    assert placement.terms["delay"] == 0


# -- goals, tenants, sessions


def test_a_goal_that_would_be_missed_costs_more() -> None:
    fleet = instance("slow", step_s=0.015), instance("long", num_queued_tokens=600)
    hurried = replace(ONE, slo_slack_s=1.2)
    assert place(CostRouter(), *fleet).prefill == "slow"
    assert place(CostRouter(), *fleet, request=replace(ONE, slo=SLO(tpot_s=0.012))).prefill == "long"
    placement = place(CostRouter(), fleet[1], request=hurried)
    assert placement.terms["late"] == near(4 * (1.6 - 1.2))


def test_a_session_stays_all_else_equal() -> None:
    router = CostRouter(clock=ManualClock())
    turn = replace(ONE, session_id="s")
    fleet = [instance(name, reported_s=1.0) for name in "ab"]
    first = place(router, fleet[1], request=turn)
    second = place(router, *map(replace, fleet), request=turn)
    assert (first.prefill, second.prefill) == ("b", "b")
    assert second.terms["affinity"] == -0.01


def test_a_tenant_is_spread() -> None:
    clock = ManualClock()
    router = CostRouter(clock=clock, **ALONE)
    mine = replace(ONE, namespace=Namespace("t"))
    fleet = [instance(name) for name in "ab"]
    for _ in range(3):
        place(router, fleet[0], request=mine)
    clock.advance(1.0)
    fleet = [replace(one, reported_s=0.5) for one in fleet]
    assert place(router, *fleet, request=mine).prefill == "b"
    fleet = [replace(fleet[0], reported_s=2.0), replace(fleet[1], num_queued_tokens=2000)]
    placement = place(router, *fleet, request=mine)
    share = router._tenants.of("t")
    assert placement.terms["tenant"] > 0
    assert share.total == near(sum(share.tokens.values()))
    assert place(router, *fleet, request=replace(ONE, namespace=Namespace("u"))).terms["tenant"] == 0


# -- stale events, temperature


def test_stale_instances_are_drawn_by_load() -> None:
    """Two are drawn of those whose events are incomplete; what is cached there is not believed."""
    clock = ManualClock(1.0)
    router = CostRouter(clock=clock, **ALONE)
    fleet = [instance(str(i), is_fresh=False, reported_s=2.0, num_queued_tokens=100 * i) for i in range(8)]
    warm = [NOTHING] * 7 + [CachedPrefix(900, 900)]
    got = {router.place(ONE, [*map(replace, fleet)], warm).prefill for _ in range(100)}
    assert "7" not in got, "it has the most load, so it loses each draw"
    assert len(got) > 2
    fresh = [*map(replace, fleet), instance("f", num_queued_tokens=300)]
    assert place(router, *fresh, f=CachedPrefix(999, 999)).prefill == "f"


def test_a_session_is_found_where_events_are_incomplete() -> None:
    router = CostRouter(clock=ManualClock(), **ALONE)
    fleet = [instance(str(i), is_fresh=False, reported_s=1.0) for i in range(8)]
    turn = replace(ONE, session_id="s")
    first = place(router, *fleet, request=turn).prefill
    longer = replace(turn, tokens=Tokens(range(1500)))
    assert place(router, *map(replace, fleet), request=longer).prefill == first


def test_temperature_spreads() -> None:
    fleet = instance("a"), instance("b", num_queued_tokens=100)
    counts = dict.fromkeys("ab", 0)
    for seed in range(300):
        router = CostRouter(temperature=0.1, seed=seed, **ALONE)
        counts[place(router, *fleet).prefill] += 1
    assert counts["a"] / 300 == near(1 / (1 + math.exp(-1)), abs=0.08)


# -- learning


def test_an_instance_that_is_slower_than_it_says_gets_less() -> None:
    router = CostRouter(clock=ManualClock(), **ALONE)
    fleet = [instance(name, reported_s=1.0) for name in "ab"]
    for _ in range(40):
        placement = place(router, *fleet)
        router.observe(placement.prefill, {"ttft": 3.0 if placement.prefill == "a" else 1.0})
    assert place(router, *fleet).prefill == "b"
    assert place(router, fleet[0]).terms["prefill"] > 2.0


def test_a_server_that_never_reports_is_counted_by_its_answers() -> None:
    router = CostRouter(clock=ManualClock(1.0), **ALONE)
    fleet = [ExecutionInstance(name) for name in "ab"]
    assert [place(router, *fleet).prefill for _ in range(3)] == ["a", "b", "a"]
    router.observe("a", {"ttft": 0.1})
    router.observe("a", {"ttft": 0.1})
    assert place(router, *fleet).prefill == "a"


# -- peers


def test_a_prefix_is_fetched_where_that_is_cheaper_than_to_compute_it() -> None:
    busy, idle = instance("a", num_queued_tokens=2000), instance("b")
    warm = CachedPrefix(900, 900)
    placement = place(CostRouter(fetch=True, transfer_token_s=1e-5, **ALONE), busy, idle, a=warm)
    assert (placement.prefill, placement.fetch_from) == ("b", "a")
    assert placement.terms == near(
        {"queue": 0, "fetch": 2e-3 + 900e-5, "prefill": 0.1, "delay": 0, "decode": 0, "slowdown": 0}
    )
    dear = place(CostRouter(fetch=True, transfer_token_s=2e-3, **ALONE), busy, idle, a=warm)
    assert (dear.prefill, dear.fetch_from) == ("b", "")
    assert place(CostRouter(**ALONE), busy, idle, a=warm).fetch_from == ""


# -- phases


def apart(name: str, kind: InstanceType, **given: Any) -> ExecutionInstance:
    return instance(name, kind=kind, **given)


PREFILL = apart("p", InstanceType.PREFILLING)
DECODE = apart("d", InstanceType.DECODING, num_running=20)


def test_a_long_prompt_is_separated_and_a_short_one_is_not() -> None:
    placement = place(CostRouter(), PREFILL, DECODE)
    assert (placement.prefill, placement.decode, placement.is_separated) == ("p", "d", True)
    assert placement.reason == "1000 uncached tokens"
    assert placement.terms["transfer"] == near(2e-3 + 1000 * 5e-6)
    short = replace(ONE, tokens=Tokens(range(100)))
    assert place(CostRouter(), PREFILL, DECODE, request=short).prefill == "d"
    assert place(CostRouter(), PREFILL, DECODE, d=CachedPrefix(900, 900)).prefill == "d", "cached there"


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("never", False), ("always", True), ("cost", True), ({"name": "threshold", "tokens": 1001}, False)],
)
def test_policies(policy: Any, expected: bool) -> None:
    assert place(CostRouter(separation=policy), PREFILL, DECODE).is_separated is expected


def test_cost_keeps_a_request_whole_where_nobody_is_delayed() -> None:
    idle = replace(DECODE, num_running=0)
    busy = replace(PREFILL, num_queued_tokens=5000)
    assert not place(CostRouter(separation="cost"), busy, idle).is_separated


def test_adaptive_gives_hybrid_instances_parts_by_the_goals_that_are_met() -> None:
    clock = ManualClock()
    router = CostRouter(separation={"name": "adaptive", "window": 64}, clock=clock)
    fleet = [apart(name, InstanceType.HYBRID, num_blocks=9999, block_size=16) for name in "abc"]
    goal = replace(ONE, slo=SLO(ttft_s=20.0, tpot_s=0.02), slo_slack_s=20.0)
    assert not place(router, *fleet, request=goal).is_separated
    for _ in range(200):
        clock.advance(0.7)
        placement = place(router, *fleet, request=goal)
        for name in {placement.prefill, placement.decode}:
            router.observe(name, {"tpot": 0.01, "decode": 0.99})
    placements = [place(router, *fleet, request=goal) for _ in range(4)]
    assert not {each.prefill for each in placements} & {each.decode for each in placements}
    assert "where prompts are computed" in placements[0].reason
    late = replace(goal, slo_slack_s=1.2)
    assert not place(router, *fleet, request=late).is_separated, "prompts wait at the prefill instances alone"


def test_adaptive_keeps_to_instances_of_fixed_types() -> None:
    router = CostRouter(separation="adaptive")
    goal = replace(ONE, slo=SLO(ttft_s=2.0), slo_slack_s=2.0)
    assert place(router, PREFILL, DECODE, request=goal).is_separated
    busy = replace(PREFILL, num_queued_tokens=3000)
    assert not place(router, busy, DECODE, request=goal).is_separated


def test_prefill_instances_serve_alone_where_there_is_nothing_better() -> None:
    assert place(CostRouter(), PREFILL).decode == "p"


def test_one_instance_is_not_separated_from_itself() -> None:
    assert not place(CostRouter(separation="always"), apart("h", InstanceType.HYBRID)).is_separated


@pytest.mark.parametrize("separation", ["sometimes", {"tokens": 5}])
def test_separations_that_there_are_not(separation: Any) -> None:
    with pytest.raises(UnknownNameError, match="unknown separation"):
        CostRouter(separation=separation)


@pytest.mark.parametrize("options", [{"tokens": "x"}, {"_parts": 1}, {"margin": 1.0}])
def test_options_of_separation_that_there_are_not(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="separation 'threshold'"):
        CostRouter(separation={"name": "threshold", **options})


@pytest.mark.parametrize(
    "options", [{"late_weight": math.nan}, {"prefill_token_s": 0.0}, {"temperature": -1.0}]
)
def test_options_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CostRouter(**options)
