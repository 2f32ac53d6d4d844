"""Coefficients are found again in timings that the simulator made with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sagellm.cli.calibrate import calibrate as command
from sagellm.core.errors import ConfigError
from sagellm.engines.simulator.calibrate import MIN_REQUESTS, PRIORS, calibrate
from sagellm.engines.simulator.cost_model import Coefficients, CostModel, StepShape
from sagellm.engines.simulator.devices import device
from sagellm.engines.simulator.measured import LENGTHS, TIMES, RequestTiming, SimulatedRun
from sagellm.engines.simulator.models import MODELS
from tests.engines.simulator.worlds import arrivals, measured, serve

TRUTH = Coefficients(
    weight_bandwidth=0.7,
    kv_bandwidth=0.6,
    compute=0.55,
    chunk_attention=0.3,
    overlap=1.6,
    step_s=4e-3,
    chunk_step_s=9e-3,
    row_s=2e-5,
)
TRUE_MODEL = CostModel(device("a100"), MODELS["llama-3.1-8b"], TRUTH)
START = replace(TRUE_MODEL, coefficients=Coefficients())


def errors(one: Sequence[RequestTiming], run: SimulatedRun) -> tuple[float, float]:
    ttft = sum(twin.ttft_s for twin in run.timings) / sum(row.ttft_s for row in one) - 1
    tpot = sum(twin.tpot_s for twin in run.timings) / sum(row.tpot_s for row in one) - 1
    return ttft, tpot


def test_what_made_the_data_is_found_again() -> None:
    wanted = arrivals(60, rate=12.0)
    truth = measured(wanted, serve(wanted, TRUE_MODEL))
    before = errors(truth, serve(wanted, START))
    found = calibrate(truth, START, serve)
    after = errors(truth, serve(wanted, found.cost_model))
    assert min(map(abs, before)) > 0.10, "the defaults were meant to be wrong"
    assert max(map(abs, after)) < 0.03
    assert found.errors == pytest.approx(after[::-1], abs=1e-9)
    # Reading weights and what a step costs at least cannot be told apart; their sum can.
    assert found.cost_model.coefficients.compute == pytest.approx(TRUTH.compute, rel=0.05)
    for shape in (StepShape(4, 2000), StepShape(25, 15000), StepShape(10, 6000, ((0, 1500),))):
        assert found.cost_model.step_s(shape) == pytest.approx(TRUE_MODEL.step_s(shape), rel=0.03)


def test_it_holds_for_a_load_that_was_not_measured() -> None:
    wanted = arrivals(60, rate=12.0)
    found = calibrate(measured(wanted, serve(wanted, TRUE_MODEL), noise_s=0.004), START, serve)
    other = arrivals(40, rate=5.0, seed=9, mean_prompt=1500)
    truth = measured(other, serve(other, TRUE_MODEL))
    assert max(map(abs, errors(truth, serve(other, found.cost_model)))) < 0.05


def test_preemptions_do_not_mislead_it() -> None:
    def tight(requests: Sequence[RequestTiming], model: CostModel) -> SimulatedRun:
        return serve(requests, model, num_blocks=300)

    wanted = arrivals(60, rate=12.0, seed=3)
    truth = measured(wanted, tight(wanted, TRUE_MODEL))
    found = calibrate(truth, START, tight, rounds=8)
    assert max(map(abs, errors(truth, tight(wanted, found.cost_model)))) < 0.03


@pytest.mark.parametrize("open_end", [False, True])
def test_the_first_half_tells_of_the_second(*, open_end: bool) -> None:
    wanted = arrivals(80, rate=12.0, seed=4)
    truth = measured(wanted, serve(wanted, TRUE_MODEL))
    known = truth[:40] if open_end else truth
    found = calibrate(known, START, serve, num_fitted=40, open_end=open_end, rounds=8)
    assert found.num_requests == 40
    assert max(map(abs, errors(truth, serve(wanted, found.cost_model)))) < 0.03


def test_timings_of_the_rest_are_not_read() -> None:
    wanted = arrivals(40, rate=6.0)
    truth = measured(wanted, serve(wanted, TRUE_MODEL))
    spoilt = truth[:20] + [replace(one, first_token_s=1e6, last_token_s=2e6) for one in truth[20:]]
    fits = [calibrate(data, START, serve, num_fitted=20, rounds=3) for data in (truth, spoilt)]
    assert fits[0] == fits[1]


def test_the_same_data_give_the_same_coefficients_within_their_bounds() -> None:
    wanted = arrivals(30, rate=8.0)
    impossible = replace(
        TRUE_MODEL, coefficients=replace(TRUTH, compute=5.0, weight_bandwidth=3.0, step_s=0.0)
    )
    truth = measured(wanted, serve(wanted, impossible))
    one, other = (calibrate(truth, START, serve, rounds=4) for _ in range(2))
    assert one == other
    for name, value in one.cost_model.coefficients.as_dict().items():
        assert PRIORS[name].low <= value * (1 + 1e-9)
        assert value <= PRIORS[name].high * (1 + 1e-9)


def test_too_few_requests_are_refused() -> None:
    wanted = arrivals(20, rate=6.0)
    with pytest.raises(ConfigError, match=f"9 requests to fit to: at least {MIN_REQUESTS}"):
        calibrate(wanted, START, serve, num_fitted=9)


def written(path: Path, requests: Sequence[RequestTiming]) -> Path:
    keys = (*LENGTHS, *TIMES)
    fields = (
        "num_prompt_tokens",
        "num_output_tokens",
        "arrival_s",
        "queued_s",
        "scheduled_s",
        "first_token_s",
    )
    rows = [[getattr(one, name) for name in (*fields, "last_token_s")] for one in requests]
    path.write_text("".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows))
    return path


OPTIONS: dict[str, Any] = {"device": "a100", "model": "llama-3.1-8b", "debug": True, "rounds": 3}


def run_command(requests: Path, **options: Any) -> None:
    defaults: dict[str, Any] = {
        "fit": None,
        "open_end": False,
        "synchronous": False,
        "preset": None,
        "prefix_caching": None,
    }
    defaults |= {"prior": None, "max_error": 0.25}
    sizes = ("num_blocks", "block_size", "max_num_seqs", "max_batched_tokens")
    names = (*sizes, "tensor_parallel", "data_parallel")
    defaults |= dict.fromkeys((*names, "memory_utilization"))
    command(**({"requests": requests} | defaults | OPTIONS | options))


def test_the_command_writes_what_simulate_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = arrivals(30, rate=6.0)
    path = written(tmp_path / "requests.jsonl", measured(wanted, serve(wanted, TRUE_MODEL)))
    out = tmp_path / "cost.json"
    run_command(path, out_file=out, fit=20, max_num_seqs=32, num_blocks=4000)
    record = json.loads(out.read_text())
    assert (record["device"], record["model"], record["num_blocks"]) == ("a100-80g", "llama-3.1-8b", 4000)
    assert Coefficients.of(record["coefficients"]) != Coefficients()
    assert record["fitted"]["num_requests"] == 20
    printed = capsys.readouterr().out
    assert "Requests that were judged" in printed
    assert "4,000 blocks of 16 tokens, as given" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fit": 31}, r"--fit 31: .* holds 30 requests"),
        ({"device": "h900"}, "no device 'h900'"),
        ({"num_blocks": 0}, "--num-blocks 0: it must be positive"),
        ({"max_error": float("nan")}, "--max-error nan: it must be positive"),
        ({"memory_utilization": 1.5}, "--memory-utilization 1.5: at most 1"),
        ({"out_file": Path("nowhere") / "cost.json"}, "cannot write"),
    ],
)
def test_the_command_explains_what_is_wrong(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    path = written(tmp_path / "requests.jsonl", arrivals(30, rate=6.0))
    with pytest.raises(ConfigError, match=message):
        run_command(path, **({"out_file": tmp_path / "cost.json"} | options))


def test_what_the_measurements_do_not_determine_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = arrivals(40, rate=12.0)
    fast = replace(TRUE_MODEL, coefficients=replace(TRUTH, compute=9.0, weight_bandwidth=9.0, step_s=0.0))
    path = written(tmp_path / "requests.jsonl", measured(wanted, serve(wanted, fast)))
    out = tmp_path / "cost.json"
    run_command(path, out_file=out, max_num_seqs=32, num_blocks=4000, rounds=12, max_error=9.0)
    fitted = json.loads(out.read_text())["fitted"]
    assert {"expert_bandwidth", "link_bandwidth", "link_latency"} <= set(fitted["not_determined"])
    assert "compute" not in fitted["not_determined"]
    assert "compute" in fitted["on_a_bound"]
    printed = capsys.readouterr().out
    assert "not determined, so near what is usual" in printed
    assert "on the bound of what is plausible, so doubtful: " in printed


def test_a_fit_that_fails_is_an_error_and_writes_nothing(tmp_path: Path) -> None:
    wanted = arrivals(30, rate=6.0)
    truth = measured(wanted, serve(wanted, replace(TRUE_MODEL, model=MODELS["llama-3.1-70b"])))
    path, out = written(tmp_path / "requests.jsonl", truth), tmp_path / "cost.json"
    with pytest.raises(ConfigError, match=r"no coefficients reproduce these timings: .* nothing is written"):
        run_command(path, out_file=out, model="qwen3-0.6b", max_num_seqs=32, num_blocks=4000)
    assert not out.exists()


def test_another_calibration_of_the_device_narrows_the_next(tmp_path: Path) -> None:
    wanted = arrivals(40, rate=12.0)
    path = written(tmp_path / "requests.jsonl", measured(wanted, serve(wanted, TRUE_MODEL)))
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    run_command(path, out_file=first, max_num_seqs=32, num_blocks=4000, rounds=8)
    run_command(path, out_file=second, max_num_seqs=32, num_blocks=4000, prior=first)
    known, again = (json.loads(one.read_text())["fitted"]["log_sigmas"] for one in (first, second))
    assert "compute" not in json.loads(second.read_text())["fitted"]["not_determined"]
    assert again["compute"] < known["compute"] < PRIORS["compute"].log_sigma
    with pytest.raises(ConfigError, match="coefficients of a100-80g do not hold for rtx4090"):
        run_command(path, out_file=second, device="rtx4090", prior=first)
