"""Which requests enter, wait or are refused, and in which order those that wait go on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sagellm.control_plane.admission import (
    STRATEGIES,
    Adaptive,
    AdmissionController,
    Admit,
    Delay,
    Reject,
    admission_strategy,
)
from sagellm.control_plane.quota_waits import QuotaWaits
from sagellm.control_plane.quotas import TenantQuotas
from sagellm.core.clock import ManualClock
from sagellm.core.errors import ConfigError, RequestError, UnknownNameError
from sagellm.core.fleet_config import TenantQuota
from sagellm.core.protocols.router import ExecutionInstance, InstanceType, RequestMetadata
from sagellm.core.types import SLO, Namespace, Tokens

IDLE = ExecutionInstance(
    "a", num_free_blocks=100, num_blocks=100, block_size=16, max_num_seqs=10, prefill_token_s=1e-3
)
FULL = replace(IDLE, num_waiting=8, num_running=10, num_queued_tokens=5000)
ONE = RequestMetadata("r", Tokens(range(1000)))


def controller(strategy: Any = "fifo", **given: Any) -> AdmissionController:
    return AdmissionController(strategy, clock=ManualClock(1.0), **given)


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_idle_fleet_takes_a_request_and_a_full_one_does_not(name: str) -> None:
    assert controller(name).decide(ONE, [IDLE]) == Admit()
    assert isinstance(controller(name).decide(ONE, [FULL, FULL]), Delay)
    assert controller(name).decide(ONE, [FULL, IDLE]) == Admit()


@pytest.mark.parametrize("name", STRATEGIES)
def test_nobody_waits_for_ever(name: str) -> None:
    """However urgent what comes later is, it comes behind one that waits long enough."""
    strategy = admission_strategy(name)
    urgent = replace(ONE, tokens=Tokens([1]), priority=10, slo=SLO(ttft_s=0.0))
    assert strategy.order(ONE, 0.0, 5.0) < strategy.order(urgent, 1000.0, 0.0)


def test_what_never_fits_is_refused_with_what_would() -> None:
    decision = controller().decide(replace(ONE, kv_cache_size_tokens=1700), [IDLE, FULL])
    assert decision == Reject(
        "the request needs KV for 1700 tokens, the largest instance has room for 1600: shorten the prompt or "
        "max_tokens by 100"
    )
    unknown = replace(IDLE, block_size=0)
    assert controller().decide(replace(ONE, kv_cache_size_tokens=1700), [IDLE, unknown]) == Admit()


def test_without_an_instance_a_request_waits() -> None:
    embeds = replace(IDLE, kind=InstanceType.EMBEDDING)
    assert controller().decide(ONE, [embeds]) == Delay("no instance serves at the moment")


def test_a_full_queue_refuses() -> None:
    decision = controller(max_waiting=3).decide(ONE, [FULL], num_waiting=3)
    assert decision == Reject("3 requests wait already, every instance is full: try again later")


def test_what_was_accepted_since_the_last_report_takes_places() -> None:
    admission = controller(depth=2)
    small = replace(IDLE, max_num_seqs=2)
    decisions = [admission.decide(replace(ONE, request_id=str(i)), [small]) for i in range(5)]
    assert [isinstance(one, Admit) for one in decisions] == [True] * 4 + [False]
    reported = replace(small, reported_s=2.0)
    assert admission.decide(ONE, [reported]) == Admit()


def test_memory_counts_where_others_run() -> None:
    short = replace(IDLE, num_running=1, num_free_blocks=10)
    assert isinstance(controller().decide(ONE, [short]), Delay)
    assert controller().decide(ONE, [replace(short, num_running=0)]) == Admit()


def test_the_last_places_are_for_priorities() -> None:
    busy = replace(IDLE, num_running=10, num_waiting=7)
    assert isinstance(controller("priority").decide(ONE, [busy]), Delay)
    assert controller("priority").decide(replace(ONE, priority=1), [busy]) == Admit()
    strategy = admission_strategy("priority")
    assert strategy.order(replace(ONE, priority=1), 50.0, 0.0) < strategy.order(ONE, 0.0, 0.0)


def test_a_goal_that_cannot_be_met_is_refused_with_one_that_can() -> None:
    hurried = replace(ONE, slo=SLO(ttft_s=1.5), slo_slack_s=1.5)
    decision = controller("slo").decide(hurried, [replace(IDLE, num_queued_tokens=1000)])
    assert decision == Reject("the first token would come 0.5 s too late: a goal of 2 s could be met now")
    assert controller("slo").decide(hurried, [IDLE]) == Admit()
    assert (
        controller("slo").decide(hurried, [replace(IDLE, num_queued_tokens=1000)], num_cached=600) == Admit()
    )


def test_deadlines_come_first() -> None:
    strategy = admission_strategy("slo")
    hurried = replace(ONE, slo=SLO(ttft_s=1.0))
    assert (
        strategy.order(hurried, 10.0, 0.0)
        < strategy.order(ONE, 0.0, 0.0)
        < strategy.order(hurried, 40.0, 0.0)
    )


def test_a_busy_fleet_takes_cheap_requests() -> None:
    busy = replace(IDLE, num_running=10, num_waiting=5)
    assert isinstance(
        controller("cost").decide(replace(ONE, tokens=Tokens(range(1500))), [busy, IDLE, busy]), Admit
    )
    crowded = replace(busy, num_free_blocks=100)
    assert isinstance(controller("cost").decide(replace(ONE, tokens=Tokens(range(1500))), [crowded]), Delay)
    assert controller("cost").decide(replace(ONE, tokens=Tokens(range(900))), [crowded]) == Admit()


def test_adaptive_holds_back_while_goals_are_missed() -> None:
    admission = controller("adaptive")
    busy = replace(IDLE, num_running=9)
    assert admission.decide(ONE, [busy]) == Admit()
    for _ in range(10):
        admission.strategy.observe(2.0, 1.0)
    assert isinstance(admission.decide(ONE, [busy]), Delay)
    for _ in range(60):
        admission.strategy.observe(0.5, 1.0)
        admission.strategy.observe(0.5, None)
    assert admission.decide(ONE, [busy]) == Admit()
    assert isinstance(admission.strategy, Adaptive)
    assert 0.1 <= admission.strategy.share <= 1.0


def test_quotas_hold_across_instances() -> None:
    clock = ManualClock()
    quotas = QuotaWaits(TenantQuotas({"t": TenantQuota(max_requests=1)}, clock), clock=clock)
    admission = controller(quotas=quotas)
    mine = replace(ONE, namespace=Namespace("t"))
    assert admission.enter(mine, 0)
    assert not admission.enter(replace(mine, request_id="s"), 0)
    assert admission.decide(mine, [IDLE, IDLE]) == Admit()
    quotas.leave("r")
    quotas.leave("r")
    assert quotas.released() == ["s"]
    quotas.check()


def test_what_waits_for_quotas_waits_too() -> None:
    clock = ManualClock()
    quotas = QuotaWaits(TenantQuotas({"*": TenantQuota(max_requests=1)}, clock), clock=clock)
    admission = controller(quotas=quotas, max_waiting=3)
    assert admission.enter(ONE, 1)
    assert not admission.enter(replace(ONE, request_id="s"), 1)
    with pytest.raises(RequestError, match="3 requests wait already"):
        admission.enter(replace(ONE, request_id="t"), 2)


@pytest.mark.parametrize("setting", ["fast", {"patience_s": 1.0}])
def test_strategies_that_there_are_not(setting: Any) -> None:
    with pytest.raises(UnknownNameError, match="unknown admission"):
        admission_strategy(setting)


@pytest.mark.parametrize("options", [{"patience": 1.0}, {"patience_s": -1.0}, {"patience_s": "x"}])
def test_options_that_there_are_not(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="admission 'priority'"):
        admission_strategy({"name": "priority", **options})


def test_a_depth_below_one_admits_nobody() -> None:
    with pytest.raises(ConfigError, match="a depth of at least 1"):
        AdmissionController(depth=0)
