"""Simulations with memory below the device: their figures, and the same ones each time."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sagellm.benchmarks.simulate.experiment import SimulationSetup, preset_config
from sagellm.benchmarks.simulate.hardware import hardware
from sagellm.benchmarks.simulate.instance import Instance
from sagellm.benchmarks.simulate.metrics import SLOPair
from sagellm.benchmarks.simulate.outputs import as_row, tables
from sagellm.benchmarks.simulate.simulation import ClusterLayout, SimulationResult, simulate
from sagellm.benchmarks.simulate.workload import Arrivals, WorkloadSpec, workload
from sagellm.core.types import Request, SamplingParams, Tokens
from tests.benchmarks.simulate.stand_in import config, request, trace

MACHINE = hardware("rtx-4090", "llama-3.1-8b")
TURNS = trace(
    *(
        request(2.0 * at, 512 + 16 * (at // 6), 40, [100 * (at % 6) + i for i in range(64)])
        for at in range(24)
    )
)
"""Six prompts of 512 tokens, each four times with another end; the pool holds two."""
SIZES: dict[str, dict[str, Any]] = {
    "host": {"kv__host_gb": 2.0},
    "disk": {"kv__disk_gb": 2.0, "kv__dir": "nothing is written"},
}


def run(layout: ClusterLayout | None = None, **settings: object) -> SimulationResult:
    chosen = config(kv__num_blocks=80, kv__block_size=16, scheduler__max_batched_tokens=1024, **settings)
    work = workload(TURNS, WorkloadSpec(Arrivals()), MACHINE.max_model_len(chosen))
    return simulate("test", chosen, work, MACHINE, layout)


@pytest.mark.parametrize(("name", "tier", "other"), [("host", "dram", "nvme"), ("disk", "nvme", "dram")])
def test_prompts_that_the_device_has_evicted_come_back(name: str, tier: str, other: str) -> None:
    without, found = run().figures, run(**SIZES[name]).figures
    assert without["hit_ratio"] < 0.05
    assert found["hit_ratio"] > 0.7
    assert found["kv_waits"] == 18  # all but the first six
    assert found[f"loaded_blocks_{tier}"] == 18 * 32
    assert found[f"stored_blocks_{tier}"] > 6 * 32
    assert found[f"loaded_blocks_{other}"] == without["kv_waits"] == 0
    assert found["ttft_s_mean"] < without["ttft_s_mean"]


def test_the_host_is_asked_before_the_disk() -> None:
    found = run(**SIZES["host"], **SIZES["disk"]).figures
    assert (found["loaded_blocks_dram"], found["loaded_blocks_nvme"]) == (18 * 32, 0)


def test_the_same_arguments_give_the_same_figures() -> None:
    first, second = (run(**SIZES["host"]) for _ in range(2))
    assert first.figures == second.figures
    assert first.served == second.served


def test_prefill_and_decode_instances_have_tiers_of_their_own() -> None:
    found = run(ClusterLayout(disaggregate=(1, 1)), **SIZES["host"])
    assert found.figures["requests_finished"] == 24
    assert found.figures["loaded_blocks_dram"] > 0


def test_tables_show_tiers_where_there_are_any() -> None:
    slos = [SLOPair(1, 100)]
    for result, expected in ((run(), False), (run(**SIZES["host"]), True)):
        *_, work = tables([result], slos)
        assert ("from host" in work.columns) is expected
        assert as_row(result)["kv_waits"] == result.figures["kv_waits"]


def test_a_disk_tier_needs_no_folder() -> None:
    chosen = preset_config("fifo", {"kv.disk_gb": 1.0})
    assert SimulationSetup(MACHINE, settings={"kv.disk_gb": 1.0}).config("fifo") == chosen


def test_an_idle_instance_loads_what_stored_prompts_share() -> None:
    """Not in the second after a request, in which another one may come."""
    for pause_s, num_cached in ((0.5, 0), (60.0, 32)):
        chosen = config(kv__num_blocks=80, kv__block_size=16, **SIZES["host"])
        instance = Instance("a", chosen, MACHINE.backend)
        for number in range(3):
            instance.submit(prompt(number), 0.0)
            while instance.busy:
                instance.advance(math.inf, math.inf)
        instance.engine.clear_cache()
        instance.submit(prompt(9), instance.clock.now() + pause_s)
        assert instance.engine.kv.index.num_cached == num_cached


def prompt(number: int) -> Request:
    """All begin with the same 512 tokens."""
    tokens = Tokens([*range(512), *range(1000 * number, 1000 * number + 64)])
    return Request(str(number), tokens, SamplingParams(max_tokens=4, ignore_eos=True))
