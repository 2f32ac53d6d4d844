"""The control plane of a fleet in the simulator: what its router knows, when, and what becomes of that."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest

from sagellm.benchmarks.simulate.cluster import RequestOutcome
from sagellm.benchmarks.simulate.metrics import SLOPair
from sagellm.benchmarks.simulate.simulation import (
    ClusterLayout,
    ServiceGoals,
    SimulationResult,
    build_cluster,
)
from sagellm.benchmarks.simulate.workload import RequestMaker, WorkloadSpec, workload
from sagellm.core.clock import ManualClock
from sagellm.core.config import Config
from sagellm.core.errors import ConfigError, UnknownNameError
from sagellm.core.protocols.engine import InferenceBackend
from sagellm.core.protocols.router import Placement
from sagellm.core.types import Request, Tokens
from tests.benchmarks.simulate.stand_in import (
    STEP_S,
    VOCAB,
    FixedStepBackend,
    StandIn,
    config,
    request,
    served,
    trace,
)

TURNS = trace(*(request(1.0 * at, 400, 1, list(range(50))) for at in range(4)))


def places(result: SimulationResult) -> list[str]:
    return [one.prefill[-1] for one in result.served]


def test_an_unknown_router_is_explained() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'round_robin'"):
        ClusterLayout(router="roundrobin")
    with pytest.raises(UnknownNameError, match="unknown admission"):
        ClusterLayout(admission="first")


@pytest.mark.parametrize("router", ["prefix_aware", "cost", "llm_d"])
def test_a_conversation_stays_where_its_prefix_is(router: str) -> None:
    result = served(TURNS, layout=ClusterLayout(2, router=router))
    assert set(places(result)) == {"1"}
    apart = served(TURNS, layout=ClusterLayout(2, router="round-robin"))
    assert places(apart) == ["1", "2", "1", "2"]
    assert apart.figures["hit_ratio"] < result.figures["hit_ratio"]


def test_the_index_of_the_fleet_is_that_of_the_engines() -> None:
    """Fed by events alone, through evictions, it knows what each engine's own index has."""
    machine, chosen = StandIn(blocks=120), config()
    made = trace(*(request(0.05 * at, 100, 3, [at % 7, at % 5, *range(10)]) for at in range(120)))
    work = workload(made, WorkloadSpec(), machine.max_model_len(chosen))
    cluster = build_cluster(chosen, machine, ClusterLayout(3, router="cost"))
    cluster.run(work, RequestMaker(work, VOCAB))
    control = cluster.control
    control.index.check()
    for number in range(0, 120, 7):
        one = RequestMaker(work, VOCAB).make(number, 0.0, 1)
        expected = [instance.num_cached(one) for instance in cluster.instances]
        most = (len(one.tokens) - 1) // 4 * 4
        assert [min(prefix.num_device_tokens, most) for prefix in control.cached(one, math.inf)] == expected
    assert any(instance.report(0.0).eviction_count for instance in cluster.instances)


def test_events_take_their_time() -> None:
    quick = served(TURNS, layout=ClusterLayout(2, router="prefix_aware"))
    late = served(
        trace(*(request(0.4 * at, 400, 1, list(range(50))) for at in range(3))),
        layout=ClusterLayout(2, event_delay_s=0.5),
    )
    assert set(places(quick)) == {"1"}
    assert late.figures["requests_finished"] == 3


def test_a_burst_between_two_reports() -> None:
    burst = trace(*(request(0.0, 64, 4) for _ in range(8)))
    old = served(burst, layout=ClusterLayout(2, router="least_loaded", report_s=1.0))
    assert set(places(old)) == {"1"}, "the present state would have been seen only a second later"
    counted = served(burst, layout=ClusterLayout(2, router="cost", report_s=1.0))
    assert sorted(places(counted)) == ["1"] * 4 + ["2"] * 4


def test_queued_tokens_are_those_that_the_engine_lacks() -> None:
    cluster = build_cluster(config(), StandIn(), ClusterLayout())
    [instance] = cluster.instances
    prompt = Request("1", Tokens(range(40)), scripted_output=3)
    instance.submit(prompt, 0.0)
    counts = []
    for _ in range(4):
        instance._step(1.0)
        counts.append(instance.report(0.0).num_queued_tokens)
    assert counts == [24, 8, 0, 0]
    instance.submit(replace(prompt, request_id="2"), 1.0)
    assert instance.report(0.0).num_queued_tokens == 40 - 36, "36 tokens are cached"
    assert instance.report(0.0).step_s == pytest.approx(0.01)


# -- fetching, separation, admission


def test_a_prefix_is_fetched_from_a_peer() -> None:
    router = {
        "name": "cost", "fetch": True, "transfer_token_s": 1e-6, "transfer_latency_s": 1e-4,
        "prefill_token_s": 1e-2,
    }  # fmt: skip
    made = trace(
        request(0, 80, 1, list(range(10))),
        *(request(1.0, 80, 30, list(range(10))) for _ in range(6)),
    )
    machine = StandIn(network_bytes_per_s=1e6)
    found = served(made, machine=machine, layout=ClusterLayout(2, router=router))
    assert found.figures["requests_finished"] == 7
    assert set(places(found)) == {"1", "2"}
    assert found.figures["hit_ratio"] > 0.8, "the second instance never computed the prompt"
    computed = [int(sum(log.prefill_tokens)) for log in found.step_logs.values()]
    assert computed[1] < 80


@dataclass(frozen=True)
class Measured(StandIn):
    """Its instances say what a prompt token takes."""

    def backend(self, clock: ManualClock, config: Config) -> InferenceBackend:
        made = super().backend(clock, config)
        assert isinstance(made, FixedStepBackend)
        made._capability = replace(made._capability, prefill_token_s=STEP_S / 16)
        return made


class OnFirst:
    """Sends all to the first instance."""

    reads_cache = True

    def place(self, request: Any, instances: Any, cached: Any) -> Placement:
        return Placement(instances[0].instance_id, instances[0].instance_id)

    def observe(self, instance_id: str, latencies_s: Any) -> None:
        """Nothing is learned."""


def test_hot_prefixes_are_copied_to_instances_that_compute_little() -> None:
    machine, chosen = Measured(network_bytes_per_s=1e6), config()
    made = trace(*(request(0.05 * at, 88, 5, [*range(10), 100 + at]) for at in range(120)))
    work = workload(made, WorkloadSpec(), machine.max_model_len(chosen))
    router = "tests.benchmarks.simulate.test_control:OnFirst"
    settings: list[dict[str, Any] | None] = [None, {}]
    first, second = (
        build_cluster(chosen, machine, ClusterLayout(2, router=router, replication=options))
        for options in settings
    )
    counts = []
    for cluster in (first, second):
        served_requests = cluster.run(work, RequestMaker(work, VOCAB))
        assert all(one.outcome is RequestOutcome.FINISHED for one in served_requests)
        counts.append(cluster.instances[1].num_cached(RequestMaker(work, VOCAB).make(0, 0.0, 1)))
        cluster.control.index.check()
    assert first.control.replicator is None
    replicator = second.control.replicator
    assert replicator is not None
    replicator.check()
    assert replicator.num_copies >= replicator.num_arrived >= 1
    assert counts == [0, 80]
    assert not len(second.instances[1].step_log), "nothing was computed there"


@pytest.mark.parametrize("policy", ["never", "always", "threshold", "cost", "adaptive"])
def test_hybrid_instances_do_both(policy: str) -> None:
    made = trace(*(request(0.05 * at, 10 + 40 * (at % 3), 6) for at in range(30)))
    layout = ClusterLayout(3, hybrid=True, router={"name": "cost", "separation": policy})
    found = served(made, layout=layout, goals=ServiceGoals((SLOPair(1, 20),)))
    assert found.figures["requests_finished"] == 30
    separated = sum(one.ready_s is not None for one in found.served)
    assert {"never": separated == 0, "always": separated == 30}.get(policy, True)


def test_adaptive_is_whole_where_separation_gains_nothing() -> None:
    """Bit for bit: hybrid instances that all serve whole requests are as good as those that always do."""
    made = trace(*(request(0.05 * at, 10 + 40 * (at % 3), 6) for at in range(80)))
    adaptive = {"name": "cost", "separation": "adaptive"}
    layouts = ClusterLayout(3, router="cost"), ClusterLayout(3, hybrid=True, router=adaptive)
    whole, found = (served(made, layout=each, goals=ServiceGoals((SLOPair(9, 900),))) for each in layouts)
    assert found.served == whole.served


def test_short_prompts_bypass_the_prefill_instance() -> None:
    router = {"name": "cost", "separation": {"name": "threshold", "tokens": 40}}
    made = trace(request(0, 20, 3), request(1, 60, 3))
    short, long = served(made, layout=ClusterLayout(disaggregate=(1, 1), router=router)).served
    assert (short.prefill, short.decode) == ("decode-1", "decode-1")
    assert (long.prefill, long.decode) == ("prefill-1", "decode-1")


def test_hybrid_has_no_fixed_parts() -> None:
    with pytest.raises(ConfigError, match="leave out disaggregate"):
        ClusterLayout(hybrid=True, disaggregate=(1, 1))
    with pytest.raises(ConfigError, match="report_s is a number of seconds"):
        ClusterLayout(report_s=-1.0)


def run(strategy: str, gap_s: float = 0.01, **given: Any) -> SimulationResult:
    made = trace(*(request(gap_s * at, 30, 10) for at in range(60)))
    return served(made, layout=ClusterLayout(2, router="cost", admission=strategy), **given)


@pytest.mark.parametrize("strategy", ["fifo", "priority", "slo", "cost", "adaptive"])
def test_admission_delays_and_loses_nobody(strategy: str) -> None:
    found = run(strategy)
    assert found.figures["requests_finished"] == 60
    assert found.served == run(strategy).served


def test_what_still_waits_at_the_end_is_waiting() -> None:
    found = run("fifo", gap_s=0.0, goals=ServiceGoals(until_s=0.1))
    outcomes = [one.outcome for one in found.served]
    assert outcomes.count(RequestOutcome.WAITING) > 60 - 2 * (8 + 8)
    assert not found.figures["requests_rejected"]
