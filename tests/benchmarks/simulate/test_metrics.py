"""Figures by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from sagellm.benchmarks.simulate.metrics import SLOPair, latency_figures, parse_slo, token_gaps
from sagellm.benchmarks.simulate.simulation import ClusterLayout, ServiceGoals, build_cluster
from sagellm.benchmarks.simulate.workload import RequestMaker, WorkloadSpec, workload
from sagellm.core.errors import BookkeepingError, ConfigError
from tests.benchmarks.simulate.stand_in import VOCAB, StandIn, config, request, served, trace

near: Any = pytest.approx


def test_percentiles() -> None:
    found = latency_figures("x", np.array([4.0, 1.0, math.nan, 2.0, 3.0]))
    assert (found["x_mean"], found["x_p50"]) == (2.5, 2.5)
    assert (found["x_p90"], found["x_p99"]) == (near(3.7), near(3.97))
    assert set(latency_figures("x", np.array([math.nan])).values()) == {None}


def test_every_figure_of_a_small_run() -> None:
    """Two requests side by side: steps of 8 + 8, then 2 tokens, then 1; and one after a pause, alone."""
    made = trace(request(0, 8, 2), request(0, 8, 3), request(0.97, 8, 1))
    slos = (SLOPair(0.01, 10), SLOPair(1, 5))
    found = served(made, goals=ServiceGoals(slos, price_per_hour=3600.0)).figures
    assert found["requests_finished"] == 3
    assert found["duration_s"] == near(0.98)
    assert (found["ttft_s_mean"], found["ttft_s_p99"]) == (near(0.01), near(0.01))
    assert (found["tpot_s_mean"], found["itl_s_p90"]) == (near(0.01), near(0.01))
    assert found["e2e_s_mean"] == near((0.02 + 0.03 + 0.01) / 3)
    assert found["wait_s_mean"] == near(0)
    assert found["ttft_s_high_p50"] is None
    assert (found["prompt_tokens"], found["output_tokens"]) == (24, 6)
    assert found["requests_per_s"] == near(3 / 0.98)
    assert found["output_tokens_per_s"] == near(6 / 0.98)
    assert found["total_tokens_per_s"] == near(30 / 0.98)
    assert (found["steps"], found["prefill_tokens"]) == (4, 24)
    assert found["batch_efficiency"] == near((16 + 2 + 1 + 8) / (4 * 16))
    assert found["batch_efficiency_loaded"] is None, "nobody ever waited"
    assert found["utilisation"] == near(0.04 / 0.98)
    assert found["cost_per_million_output_tokens"] == near(0.98 / 6 * 1e6)
    assert found["cost_per_million_tokens"] == near(0.98 / 30 * 1e6)


def test_goodput_needs_both_goals() -> None:
    made = trace(request(0, 8, 2), request(0, 8, 1), request(0.001, 8, 2))
    slos = (SLOPair(0.011, 11), SLOPair(0.02, 11), SLOPair(0.02, 9))
    found = served(made, goals=ServiceGoals(slos)).figures
    assert found["goodput_0.011s_11ms"] == near(2 / 0.03), "the third waits for a step first"
    assert found["attained_0.02s_11ms"] == 1.0
    assert found["goodput_0.02s_9ms"] == near(1 / 0.03), "an answer of one token has no second"


def test_efficiency_under_load_counts_steps_that_leave_somebody_waiting() -> None:
    made = trace(*(request(0, 16, 1) for _ in range(3)), request(0.0, 4, 1))
    found = served(made).figures
    assert found["batch_efficiency_loaded"] == near(1.0)
    assert found["batch_efficiency"] == near((3 * 16 + 4) / (4 * 16))


def test_instances_share_time_and_cost() -> None:
    made = trace(request(0, 8, 1), request(0, 8, 1))
    found = served(
        made, layout=ClusterLayout(2, router="round-robin"), goals=ServiceGoals((), price_per_hour=3600.0)
    ).figures
    assert found["utilisation"] == near(1.0)
    assert found["cost_per_million_output_tokens"] == near(2 * 0.01 / 2 * 1e6)
    wide = served(made, machine=StandIn(num_devices=4), goals=ServiceGoals((), price_per_hour=3600.0)).figures
    assert wide["cost_per_million_output_tokens"] == near(4 * 0.01 / 2 * 1e6)


def test_high_priority_has_figures_of_its_own() -> None:
    made = trace(request(0, 100, 1), request(0, 8, 1))
    spec = WorkloadSpec(high_priority_share=1.0, high_priority_below=50)
    found = served(made, spec=spec, scheduler__passes=("priority_based",)).figures
    assert found["ttft_s_high_mean"] == near(0.01)
    assert found["ttft_s_mean"] > 0.03


def test_the_span_begins_with_the_first_arrival() -> None:
    assert served(trace(request(100.0, 8, 1)), machine=StandIn()).figures["duration_s"] == near(0.01)


def test_other_tokens_than_the_plans_have_are_an_error() -> None:
    chosen, machine = config(), StandIn()
    work = workload(trace(request(0, 8, 2)), WorkloadSpec(), machine.max_model_len(chosen))
    cluster = build_cluster(chosen, machine, ClusterLayout())
    [one] = cluster.run(work, RequestMaker(work, VOCAB))
    one.num_output_tokens = 3
    with pytest.raises(BookkeepingError, match="request 0 drew 3 tokens, the steps' plans have 2"):
        token_gaps(cluster.instances, [one])


@pytest.mark.parametrize("text", ["", "1", "1,2,3", "a,1", "0,1", "1,-1", "inf,1", "nan,1"])
def test_slos_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="as in 1,100"):
        parse_slo(text)


def test_slos() -> None:
    assert parse_slo("1,100") == SLOPair(1.0, 100.0)
    assert parse_slo(" 0.5, 20") == SLOPair(0.5, 20.0)
    assert SLOPair(0.5, 20).name == "0.5s_20ms"


def test_goals_out_of_range() -> None:
    with pytest.raises(ConfigError, match="price per device hour"):
        ServiceGoals(price_per_hour=-1)
    with pytest.raises(ConfigError, match="more than 0 seconds"):
        ServiceGoals(until_s=0)
    assert ServiceGoals().request_slo.tpot_s == 0.1
    assert ServiceGoals(()).request_slo.ttft_s is None
