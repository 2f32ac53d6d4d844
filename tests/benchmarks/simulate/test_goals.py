"""Presets under more load than they can serve: goals are met without giving up throughput."""

from __future__ import annotations

from random import Random

from sagellm.benchmarks.simulate.experiment import SimulationSetup
from sagellm.benchmarks.simulate.hardware import hardware
from sagellm.benchmarks.simulate.metrics import SLOPair
from sagellm.benchmarks.simulate.simulation import ServiceGoals
from sagellm.benchmarks.simulate.workload import Arrivals, WorkloadSpec
from sagellm.benchmarks.traces import Trace, TraceRequest
from sagellm.core.types import Namespace, Tokens

GOAL = SLOPair(10, 30)


def long_prompts(number: int) -> Trace:
    """Lengths like those of long conversations, at random times, two in a second."""
    random, time_s, requests = Random(3), 0.0, []
    for _ in range(number):
        time_s += random.expovariate(2.0)
        answer = 1 + int(random.expovariate(1 / 350))
        prompt = min(60_000, int(random.lognormvariate(9.0, 0.8)))
        requests.append(TraceRequest(time_s, Tokens(), Namespace(), prompt, answer))
    return Trace("long-prompts", "test", 16, tuple(requests))


def test_short_steps_do_not_cost_the_throughput_of_an_overloaded_engine() -> None:
    settings = {"scheduler.max_num_seqs": 1024, "scheduler.max_batched_tokens": 8192}
    bench = SimulationSetup(
        hardware("h100-80g", "llama-3.1-8b"), goals=ServiceGoals((GOAL,)), settings=settings
    )
    presets = ("vllm-like", "adaptive")
    work = bench.workload(long_prompts(400), WorkloadSpec(Arrivals(rate=1.8)), presets)
    plain, adaptive = (bench.run(preset, work).figures for preset in presets)
    assert adaptive["requests_per_s"] > 0.9 * plain["requests_per_s"]
    attained = f"attained_{GOAL.name}"
    assert adaptive[attained] > plain[attained] + 0.1
