"""`HostedPasses`: each strategy orders another engine's requests as it orders ours."""

from __future__ import annotations

from typing import Any

import pytest

from sagellm.core.errors import ConfigError, UnknownNameError
from sagellm.core.protocols.scheduler_ir import StepFacts
from sagellm.core.types import SLO, Namespace, Request, RequestStatus, SamplingParams, Tokens
from sagellm.engines.guests.hosted_passes import HostedPasses, open_passes
from sagellm.engines.guests.settings import SchedulingSettings


class FakeKV:
    """A host in which nothing is cached, but what a test says."""

    block_size, num_blocks = 4, 100

    def __init__(self) -> None:
        self.free, self.cached, self.held = 100, dict[str, int](), dict[str, int]()

    def num_free(self) -> int:
        return self.free

    def num_cached(self, request_id: str) -> int:
        return self.cached.get(request_id, 0)

    def num_held(self, request_id: str) -> int:
        return self.held.get(request_id, 1)


def hosted(strategy: str, **options: dict[str, Any]) -> tuple[HostedPasses, FakeKV]:
    kv = FakeKV()
    return HostedPasses(strategy, options, kv, max_num_seqs=4, max_batched_tokens=64), kv


def enter(passes: HostedPasses, name: str, **values: Any) -> None:
    length = values.pop("length", 8)
    tokens = Tokens([ord(name[0])] * length)
    passes.enter(Request(name, tokens, SamplingParams(max_tokens=9), arrival_s=1.0, **values))


def test_higher_priority_goes_first_and_is_preempted_last() -> None:
    passes, _ = hosted("priority")
    for name, priority in (("a", 0), ("b", 5), ("c", 1)):
        enter(passes, name, priority=priority)
    assert passes.order(1.0, ["a", "b", "c"], []).waiting == ["b", "c", "a"]
    order = passes.order(2.0, ["b"], ["a", "c"])
    assert order.running == ["c", "a"]
    assert passes.states["a"].status is RequestStatus.RUNNING


def test_tenants_get_fair_shares() -> None:
    passes, _ = hosted("fair", fairness={"quantum": 0})
    names = [f"a{i}" for i in range(3)] + ["b0"]
    for name in names:
        enter(passes, name, namespace=Namespace(tenant=name[0]))
    assert passes.order(1.0, names, []).waiting[:2] == ["a0", "b0"]


def test_the_nearest_deadline_goes_first() -> None:
    passes, _ = hosted("slo")
    for name, goal_s in (("a", 30.0), ("b", 5.0), ("c", None)):
        enter(passes, name, slo=SLO(ttft_s=goal_s))
    assert passes.order(2.0, ["a", "b", "c"], []).waiting[0] == "b"


def test_what_is_cached_goes_first() -> None:
    passes, kv = hosted("throughput")
    kv.cached = {"b": 4}
    for name in "abc":
        enter(passes, name)
    assert passes.order(1.0, ["a", "b", "c"], []).waiting == ["b", "a", "c"]


def test_a_prompt_that_another_computes_waits_for_it_if_asked() -> None:
    passes, _ = hosted("fair", prefix_cache_aware={"min_shared": 16, "max_defer_s": 2.0})
    for name in ("a1", "a2"):
        enter(passes, name, length=60)
    order = passes.order(1.0, ["a1", "a2"], [])
    assert (order.waiting, order.deferred) == (["a1"], ["a2"])
    passes.progressed("a1", 60, 61)
    assert passes.order(1.1, ["a2"], ["a1"]).waiting == ["a2"]


@pytest.mark.parametrize(("rule", "last"), [("last", "c"), ("newest", "c"), ("most_blocks", "b")])
def test_where_memory_is_short_the_rule_chooses_the_victim(rule: str, last: str) -> None:
    passes, kv = hosted("fifo", memory_aware_preemption={"victims": rule})
    kv.held = {"a": 9, "b": 5, "c": 2}
    for name in "abc":
        enter(passes, name)
    assert passes.order(1.0, [], ["a", "b", "c"]).running == ["a", "b", "c"]
    kv.free = 2
    assert passes.order(2.0, [], ["a", "b", "c"]).running[-1] == last
    assert passes.order(3.0, [], ["a"]).running == ["a"]


def test_the_states_follow_the_host() -> None:
    passes, _ = hosted("adaptive")
    enter(passes, "a")
    state = passes.states["a"]
    passes.order(1.0, ["a"], [])
    passes.order(2.0, [], ["a"])
    assert state.scheduled_s == 2.0
    passes.stepped(StepFacts(0.1, 0, 8))
    passes.progressed("a", 8, 9)
    assert (state.num_computed, state.num_output_tokens) == (8, 1)
    passes.order(3.0, ["a"], [])  # the host has preempted it
    assert (state.num_preemptions, state.num_computed) == (1, 0)
    passes.ended("a", whole=True)
    assert state.status is RequestStatus.FINISHED
    passes.ended("a", whole=False)
    assert not passes.states


def test_requests_that_are_not_known_keep_their_places() -> None:
    """At the end of each step's order they would starve, and be preempted first."""
    passes, _ = hosted("priority")
    for name, priority in (("b", 0), ("c", 5), ("d", 0), ("e", 5)):
        enter(passes, name, priority=priority)
    order = passes.order(1.0, ["x", "b", "y", "c"], ["z", "d", "e"])
    assert order == (["x", "c", "y", "b"], [], ["z", "e", "d"])


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"strategy": "vllm-like"}, ConfigError, "admits by itself"),
        ({"strategy": "best"}, UnknownNameError, "adaptive, fair"),
        ({"strategy": "fair", "options": {"slo_aware": {}}}, UnknownNameError, "has no pass"),
        ({"options": {"priority_based": {"preempt": True}}}, ConfigError, "leave it out"),
        ({"polcy": "fair"}, ConfigError, "use strategy, options"),
    ],
)
def test_wrong_settings(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SchedulingSettings.of(given)


def test_every_strategy_but_that_of_vllm_is_open() -> None:
    for strategy in ("fifo", "priority", "slo", "adaptive", "throughput", "fair"):
        assert open_passes(strategy, {})[1] == "last"
