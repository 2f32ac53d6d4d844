"""The simulator against measurements: vLLM 0.19 serving Llama-3.1-8B on two GPUs, 300 requests each.

Fitted to the first 150 by arrival, judged on the others: mean TPOT within 3 %, mean TTFT within 8 %.

The files hold lengths and times, no tokens: prompts are taken to share nothing. Admissions agree with that:
on the smaller device requests enter until their whole prompts fill the pool, and then nobody does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from sagellm.engines.build import build_engine
from sagellm.engines.simulator.backend import num_kv_blocks
from sagellm.engines.simulator.calibrate import calibrate
from sagellm.engines.simulator.cost_model import CostModel
from sagellm.engines.simulator.devices import device
from sagellm.engines.simulator.measured import (
    RequestTiming,
    SimulatedRun,
    compare,
    read_measured,
    simulate,
)
from sagellm.engines.simulator.models import MODELS
from tests.engines.simulator.worlds import config

pytestmark = pytest.mark.traces

MODEL = MODELS["llama-3.1-8b"]
NUM_FITTED = 150
LIMITS = {"TPOT": 0.03, "TTFT": 0.08}


class Case(NamedTuple):
    """A file, its device, what is recorded of the engine; without blocks: what the device has room for."""

    file: str
    device: str
    max_num_seqs: int
    num_blocks: int | None = None


CASES = (
    Case("vllm_requests_RTX4090_llama31_8b", "rtx4090", 256, 2588),
    Case("vllm_requests_RTXPRO6000_llama31_8b", "rtx-pro-6000", 128),
)


def recording(file: str) -> list[RequestTiming]:
    folder = os.environ.get("SAGELLM_TRACES")
    if not folder:
        pytest.skip("SAGELLM_TRACES names no folder of traces")
    return read_measured(Path(folder) / f"{file}.jsonl.xz")


ALL_KNOWN, FEW_KNOWN = "all-arrivals-known", "only-150-known"


@pytest.mark.parametrize(
    ("case", "rest_is_known"),
    [
        pytest.param(CASES[0], False, id=f"{CASES[0].device}-{FEW_KNOWN}"),
        pytest.param(CASES[1], True, id=f"{CASES[1].device}-{ALL_KNOWN}"),
        pytest.param(CASES[0], True, id=f"{CASES[0].device}-{ALL_KNOWN}", marks=pytest.mark.slow),
        pytest.param(CASES[1], False, id=f"{CASES[1].device}-{FEW_KNOWN}", marks=pytest.mark.slow),
    ],
)
def test_the_second_half_is_foreseen(case: Case, *, rest_is_known: bool) -> None:
    card, rows = device(case.device), case.max_num_seqs
    blocks = case.num_blocks or num_kv_blocks(CostModel(card, MODEL), max_num_seqs=rows)
    chosen = config(kv__num_blocks=blocks, scheduler__max_num_seqs=rows, scheduler__max_batched_tokens=2048)

    def run(requests: Sequence[RequestTiming], model: CostModel) -> SimulatedRun:
        return simulate(requests, model, chosen, build_engine)

    requests = recording(case.file)
    known = requests if rest_is_known else requests[:NUM_FITTED]
    found = calibrate(known, CostModel(card, MODEL), run, num_fitted=NUM_FITTED, open_end=not rest_is_known)
    final = run(requests, found.cost_model)
    print(f"\n{case.device}, {blocks} blocks, {found.cost_model.coefficients}")
    for part, name in ((slice(NUM_FITTED), "fitted"), (slice(NUM_FITTED, None), "judged")):
        for row in compare(requests[part], final.timings[part]):
            pair = f"{row.measured_s:.4f} s, {row.simulated_s:.4f} s"
            print(f"{name} {row.latency} {row.statistic}: {pair}, {row.error:+.2%}")
            if name == "judged" and row.statistic == "mean":
                assert abs(row.error) < LIMITS[row.latency], row


def test_a_model_that_was_not_measured_on_the_same_device() -> None:
    """Fitted to the dense 8B model on one device; judged on a mixture of experts on two."""
    device_ = device(CASES[1].device)
    dense, experts = CostModel(device_, MODEL), CostModel(device_, MODELS["qwen3-30b-a3b"], data_parallel=2)
    known = recording(CASES[1].file)
    of_one = config(
        kv__num_blocks=num_kv_blocks(dense, max_num_seqs=128),
        scheduler__max_num_seqs=128,
        scheduler__max_batched_tokens=2048,
    )
    found = calibrate(known, dense, lambda some, model: simulate(some, model, of_one, build_engine))
    judged = recording("vllm_requests_RTXPRO6000_Qwen3-30B-A3B-Instruct-2507")
    blocks = num_kv_blocks(experts, max_num_seqs=256, max_batched_tokens=4096)
    of_two = config(
        kv__num_blocks=blocks,
        scheduler__max_num_seqs=256,
        scheduler__max_batched_tokens=4096,
        scheduler__pass_options={"vllm_like": {"long_prefill_tokens": 2048}},
    )
    model = replace(experts, coefficients=found.cost_model.coefficients)
    run = simulate(judged, model, of_two, build_engine)
    means = {row.latency: row.error for row in compare(judged, run.timings) if row.statistic == "mean"}
    assert abs(means["TPOT"]) < 0.10
    assert abs(means["TTFT"]) < 0.20
