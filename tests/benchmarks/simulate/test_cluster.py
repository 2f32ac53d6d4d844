"""The driver on a stand-in whose steps take 10 ms: latencies by hand, turns, cut-offs, nobody lost."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sagellm.benchmarks.simulate.cluster import Cluster, RequestOutcome
from sagellm.benchmarks.simulate.hardware import hardware
from sagellm.benchmarks.simulate.instance import PATIENCE_S, Instance
from sagellm.benchmarks.simulate.simulation import ClusterLayout, ServiceGoals, build_cluster, simulate
from sagellm.benchmarks.simulate.workload import (
    Arrivals,
    RequestMaker,
    SimulatedWorkload,
    WorkloadSpec,
    workload,
)
from sagellm.benchmarks.traces import Trace
from sagellm.core.blocks import cdiv
from sagellm.core.config import Config
from sagellm.core.errors import BookkeepingError, ConfigError
from sagellm.core.plan import Draft
from sagellm.core.protocols.scheduler_ir import SchedulingView
from sagellm.engines.engine import Engine
from sagellm.engines.simulator.fast_forward import SimulatedEngine
from tests.benchmarks.simulate.stand_in import STEP_S, VOCAB, StandIn, config, request, served, trace

near: Any = pytest.approx


def busy_trace(count: int = 60, seed: int = 7) -> Trace:
    """Requests of all lengths, some of which share prefixes."""
    draw = random.Random(seed)
    made = []
    for number in range(count):
        length = draw.randint(1, 60)
        ids = [draw.randint(0, 2) * 100 + place for place in range(cdiv(length, 8))]
        made.append(request(number * 0.02, length, draw.randint(1, 25), ids, session=str(number % 7)))
    return trace(*made)


# -- latencies


def test_a_request_alone() -> None:
    [one] = served(trace(request(3.0, 20, 3))).served
    assert one.outcome is RequestOutcome.FINISHED
    assert (one.arrival_s, one.scheduled_s) == (0.0, 0.0), "time begins with the first arrival"
    assert one.first_token_s == near(2 * STEP_S), "20 tokens are two chunks of at most 16"
    assert one.finished_s == near(4 * STEP_S)
    assert one.num_output_tokens == 3


def test_a_request_that_arrives_during_a_step_waits_for_its_end() -> None:
    first, second = served(trace(request(0, 8, 2), request(0.005, 8, 2))).served
    assert (first.first_token_s, first.finished_s) == (near(0.01), near(0.02))
    assert (second.arrival_s, second.scheduled_s) == (0.005, near(0.01))
    assert (second.first_token_s, second.finished_s) == (near(0.02), near(0.03))


def test_an_idle_instance_begins_at_the_arrival() -> None:
    result = served(trace(request(0, 4, 1), request(5.0, 4, 1)))
    assert result.served[1].first_token_s == near(5.01)
    assert result.figures["utilisation"] == near(0.02 / 5.01)


def test_a_shared_prefix_is_not_computed_again() -> None:
    result = served(trace(request(0, 16, 1, [1, 2]), request(1, 16, 1, [1, 2]), request(2, 16, 1, [1, 3])))
    assert [one.num_cached for one in result.served] == [0, 12, 8]
    assert result.figures["hit_ratio"] == near(20 / 48)
    assert result.figures["prefill_tokens"] == 48 - 20


def test_ids_of_two_namespaces_share_nothing() -> None:
    made = trace(request(0, 16, 1, [1, 2], namespace="a"), request(1, 16, 1, [1, 2], namespace="b"))
    assert [one.num_cached for one in served(made).served] == [0, 0]


# -- memory


def test_what_a_preemption_loses_is_counted() -> None:
    made = trace(request(0, 8, 16), request(0, 8, 16))
    result = served(made, machine=StandIn(blocks=8))
    figures = result.figures
    assert figures["requests_finished"] == 2
    assert figures["preemptions"] == sum(one.num_preemptions for one in result.served) >= 1
    assert figures["prefill_tokens"] == 16 + figures["recomputed_tokens"] + figures["preemptions"], (
        "of a request in decode all but the last token had been computed"
    )
    assert figures["reprefill_ratio"] == near(figures["recomputed_tokens"] / figures["prefill_tokens"])


def test_token_times_are_those_of_the_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through preemptions and chunks, against a list that is kept token by token."""
    seen: dict[str, list[float]] = defaultdict(list)
    step = Engine.step

    def listening(self: Engine) -> Any:
        outputs = step(self)
        for output in outputs:
            seen[output.request_id] += [self.clock.now()] * len(output.new_token_ids)
        return outputs

    monkeypatch.setattr(Engine, "step", listening)
    chosen, machine = config(), StandIn(blocks=24)
    work = workload(busy_trace(), WorkloadSpec(), machine.max_model_len(chosen))
    cluster = build_cluster(chosen, machine, ClusterLayout())
    cluster.run(work, RequestMaker(work, VOCAB))
    [instance] = cluster.instances
    ends = np.frombuffer(instance.step_log.ends_s)
    assert sum(instance.step_log.preemptions.values()) > 3
    assert {name: instance.token_times.of(name, ends).tolist() for name in seen} == seen


# -- turns, cut-offs, rejections


def test_the_next_turn_comes_after_the_answer_and_a_pause() -> None:
    made = trace(
        request(0, 8, 2, session="a"),
        request(0.001, 8, 1, session="a", meta={"think_time": 1.5}),
        request(0.002, 8, 1, session="a"),
    )
    first, second, third = served(made, spec=WorkloadSpec(closed_loop=True)).served
    assert first.finished_s == near(0.02)
    assert (second.arrival_s, second.finished_s) == (near(1.52), near(1.53))
    assert third.arrival_s == second.finished_s


def test_agents_begin_the_next_session_when_one_has_ended() -> None:
    made = trace(*(request(9.0 * at, 8, 2, session=name) for at, name in enumerate("aabc")))
    spec = WorkloadSpec(closed_loop=True, agents=2, think_s=0.0)
    first, second, other, last = served(made, spec=spec).served
    assert (first.arrival_s, other.arrival_s) == (0.0, 0.0)
    assert second.arrival_s == first.finished_s
    assert last.arrival_s == other.finished_s, "before the turns of the first session have ended"


@pytest.mark.parametrize("router", ["random", "least_loaded", "cost"])
def test_instances_that_run_by_themselves_do_what_they_do_in_turn(
    router: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each up to the next event, against the earliest of all one step at a time."""
    layout = ClusterLayout(3, router=router, report_s=0.05, event_delay_s=0.01)
    made = busy_trace(80)
    apart = served(made, layout=layout)
    monkeypatch.setattr(Cluster, "_is_coupled", lambda self: True)
    in_turn = served(made, layout=layout)
    assert apart.served == in_turn.served
    assert apart.figures == in_turn.figures


def test_until_sets_the_state_of_every_request() -> None:
    made = trace(
        request(0, 8, 2),
        request(0, 8, 50, session="a"),
        request(0, 8, 50),
        request(0.1, 8, 1, session="a"),
        request(9.0, 8, 1),
    )
    result = served(
        made,
        spec=WorkloadSpec(closed_loop=True),
        goals=ServiceGoals(until_s=0.2),
        scheduler__max_num_seqs=2,
    )
    outcomes = [one.outcome for one in result.served]
    assert outcomes == [
        RequestOutcome.FINISHED,
        RequestOutcome.RUNNING,
        RequestOutcome.RUNNING,
        RequestOutcome.NOT_SENT,
        RequestOutcome.NOT_SENT,
    ]
    assert result.served[1].scheduled_s == 0.0
    short = served(made, goals=ServiceGoals(until_s=0.005), scheduler__max_num_seqs=2)
    assert short.served[2].outcome is RequestOutcome.WAITING
    assert short.figures["requests_waiting"] == 1


def test_what_the_engine_refuses_is_rejected_with_its_reason() -> None:
    class Boastful(StandIn):
        def max_model_len(self, config: Config) -> int:
            return 10_000

    made = trace(request(0, 50, 1, session="a"), request(0, 8, 1, session="a"))
    first, second = served(
        made, machine=Boastful(blocks=10), spec=WorkloadSpec(closed_loop=True, think_s=0.0)
    ).served
    assert first.outcome is RequestOutcome.REJECTED
    assert "maximum context length is 40 tokens, but the prompt has 50" in first.reason
    assert second.outcome is RequestOutcome.FINISHED, "the session goes on"


class NobodyPass:
    """Lets nobody in."""

    name = "nobody"

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        draft.chunks.clear()


class LaterPass:
    """Lets nobody in before a moment."""

    name = "later"

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        if draft.step.now_s < 2.0:
            draft.chunks.clear()


def passes(last: str) -> dict[str, Any]:
    return {"scheduler__passes": ("chunked_prefill", "memory_aware_preemption", f"{__name__}:{last}")}


def test_an_engine_that_never_computes_is_reported_as_stalled() -> None:
    result = served(trace(request(0, 8, 1), request(1, 8, 1)), **passes("NobodyPass"))
    assert [one.outcome for one in result.served] == [RequestOutcome.WAITING] * 2
    assert all("stalled" in one.reason for one in result.served)
    assert result.figures["ttft_s_mean"] is None
    assert PATIENCE_S > 10


def test_time_passes_for_a_scheduler_that_waits() -> None:
    [one] = served(trace(request(0, 8, 1)), **passes("LaterPass")).served
    assert one.scheduled_s is not None
    assert 2.0 <= one.scheduled_s < 4.1


def test_a_lost_request_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Instance, "take_ended", lambda self: self.ended.clear() or [])
    with pytest.raises(BookkeepingError, match="engines hold 0 requests, the books of the simulation 1"):
        served(trace(request(0, 8, 1)))


# -- several instances, determinism


def test_instances_run_beside_each_other() -> None:
    made = trace(request(0, 16, 4), request(0, 16, 4))
    both = served(made, layout=ClusterLayout(2, router="round-robin"))
    assert [one.prefill for one in both.served] == ["instance-1", "instance-2"]
    assert [one.finished_s for one in both.served] == [near(0.04)] * 2


def run(seed: int, **layout: Any) -> tuple[Any, ...]:
    spec = WorkloadSpec(Arrivals("bursty", rate=20.0), seed=seed)
    machine = StandIn(
        blocks=40, step_s=lambda plan: 0.003 + 0.001 * plan.num_tokens, network_bytes_per_s=4000
    )
    result = served(busy_trace(), spec=spec, machine=machine, layout=ClusterLayout(**layout))
    assert result.figures["requests_finished"] == 60
    return result.served, result.figures


@pytest.mark.parametrize(
    "layout",
    [{}, {"instances": 3}, {"instances": 2, "router": "least-loaded"}, {"disaggregate": (2, 2)}],
)
def test_the_same_seed_gives_the_same_floats(layout: dict[str, Any]) -> None:
    assert run(1, **layout) == run(1, **layout)
    assert run(1, **layout)[0] != run(2, **layout)[0]


@pytest.mark.parametrize("layout", [{}, {"instances": 2}, {"disaggregate": (1, 1)}])
def test_steps_that_are_taken_at_once_are_those_taken_one_by_one(
    layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, chosen = hardware("l4", "llama-3.2-1b"), config(kv__num_blocks=30)
    made = trace(*(request(0.1 * at, 10 + at % 40, 10 + at % 50) for at in range(60)))
    work = workload(made, WorkloadSpec(Arrivals(rate=11.0)), machine.max_model_len(chosen))
    fast_forward, num_steps = SimulatedEngine.fast_forward, []

    def counting(self: SimulatedEngine, until_s: float) -> Any:
        done = fast_forward(self, until_s)
        num_steps.extend([] if done is None else [done.num_steps])
        return done

    monkeypatch.setattr(SimulatedEngine, "fast_forward", counting)
    at_once = simulate("x", chosen, work, machine, ClusterLayout(**layout))
    monkeypatch.setattr(SimulatedEngine, "fast_forward", lambda self, until_s: None)
    singly = simulate("x", chosen, work, machine, ClusterLayout(**layout))
    assert sum(num_steps) > 50
    assert at_once.figures["preemptions"] > 0 or layout
    assert at_once.served == singly.served
    assert at_once.figures == singly.figures
    for name, step_log in at_once.step_logs.items():
        assert step_log.ends_s == singly.step_logs[name].ends_s
        assert step_log.running == singly.step_logs[name].running


@pytest.mark.parametrize("roles", [["prefill"], ["decode"], ["both", "prefill"], []])
def test_roles_that_make_no_cluster(roles: list[Any]) -> None:
    chosen, machine = config(), StandIn()
    instances = [Instance(str(at), chosen, machine.backend, role) for at, role in enumerate(roles)]
    with pytest.raises(ConfigError, match="one for prefill and one for decode"):
        Cluster(instances)


def test_a_workload_is_not_used_up() -> None:
    chosen, machine = config(), StandIn()
    work: SimulatedWorkload = workload(busy_trace(5), WorkloadSpec(), machine.max_model_len(chosen))
    runs = [
        build_cluster(chosen, machine, ClusterLayout()).run(work, RequestMaker(work, VOCAB)) for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert replace(runs[0][0]) == runs[1][0]
