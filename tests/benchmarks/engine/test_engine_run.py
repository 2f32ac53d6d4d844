"""The whole of it on a small random model: rows, figures, tables, a cold start, what does not fit."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.console import Console

from sagellm.benchmarks.engine.cold_start import cold_start
from sagellm.benchmarks.engine.peer_rows import read_peers
from sagellm.benchmarks.engine.run import EngineBenchPlan, EngineBenchReport, run, tables
from sagellm.benchmarks.engine.shapes import SHAPES, write_model
from sagellm.benchmarks.engine.workloads import (
    DECODE,
    LONG_CONTEXT,
    OFFLINE,
    PREFILL,
    SECONDS,
    EqualWorkload,
    MixedWorkload,
    MultiTurnWorkload,
    ThroughputWorkload,
)
from sagellm.benchmarks.reporting import environment
from sagellm.core.clock import MonotonicClock
from sagellm.core.config import Config
from sagellm.core.errors import ConfigError, SageError
from sagellm.engines.build import load_config

SMALL = (
    EqualWorkload("prefill-40", "a40", *PREFILL, 40, 1),
    EqualWorkload("decode-8", "b8", *DECODE, 12, 6, batch=8),
    MixedWorkload("offline", "c", *OFFLINE, 5, prompt_tokens=(5, 20), output_tokens=(2, 9)),
    MultiTurnWorkload("multi-turn", "d", SECONDS, 2, together=2, turns=3, new_tokens=(20, 30), num_outputs=4),
    ThroughputWorkload("throughput", "t", *OFFLINE, 4, (5, 20)),
    EqualWorkload("long-context", "e", *LONG_CONTEXT, 500, 3),
)
NAMES = [workload.name for workload in SMALL]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("model")
    write_model(SHAPES["tiny"].changed(vocab_size=1000, hidden_size=64), folder)
    wanted = {"model.name": str(folder), "model.max_model_len": 400, "kv.num_blocks": 200}
    return load_config(cli={**wanted, "engine.threads": 1, "engine.kernels": "off"}, environ={}).config


def report_of(config: Config, names: list[str], repeats: int = 2) -> EngineBenchReport:
    return EngineBenchReport(
        EngineBenchPlan(config, "T", names, repeats, SMALL), environment(datetime(2026, 1, 2, tzinfo=UTC))
    )


@pytest.fixture(scope="module")
def report(config: Config) -> EngineBenchReport:
    made = report_of(config, NAMES)
    said: list[str] = []
    run(made, on_run=said.append)
    assert said[:2] == ["loading the model", "prefill-40, 1 of 2"]
    return made


def test_every_workload_that_fits_runs_repeats_times(report: EngineBenchReport) -> None:
    assert {name: len(runs) for name, runs in report.by_workload().items()} == dict.fromkeys(NAMES[:-1], 2)
    assert list(report.left_out) == ["long-context"]
    assert "needs a context of 503 tokens; here are 400" in report.left_out["long-context"]
    for one in report.measured:
        assert one.value > 0
        assert one.overhead is not None
        assert 0 < one.overhead < 1
        assert one.roofline is not None
        assert 0 < one.roofline < 1
        assert one.num_steps
    turns = [one.values["hit"] for one in report.measured if one.name == "multi-turn"]
    assert all(0.3 < share < 0.9 for share in turns)


def test_figures_are_medians(report: EngineBenchReport) -> None:
    figures = {one.title: one for one in report.figures()}
    runs = [one.value for one in report.measured if one.name == "offline"]
    assert figures["offline"].value == pytest.approx(sum(runs) / 2)
    assert (figures["offline"].unit, figures["offline"].higher_is_better) == ("tok/s", True)
    assert 50 < figures["resident memory after decode-8"].value < 5000


def test_a_run_can_be_compared_with_itself(report: EngineBenchReport, tmp_path: Path) -> None:
    path = tmp_path / "ours.json"
    path.write_text(json.dumps(report.as_json()))
    again = EngineBenchReport(report.plan, report.environment, read_peers([path], "T", 1), report.measured)
    comparisons = again.comparisons()
    assert {one.figure.title for one in comparisons} == {one.title for one in report.figures()}
    assert all(one.ratio == pytest.approx(1.0, abs=0.01) for one in comparisons)
    assert "sagellm" in shown(again)


def test_the_json_has_settings_but_no_paths(report: EngineBenchReport) -> None:
    values = report.as_json()
    assert values["format"] == "sagellm.bench.engine/1"
    assert values["settings"] == {
        "model.max_model_len": 400, "kv.num_blocks": 200, "engine.threads": 1, "engine.kernels": "off",
    }  # fmt: skip
    assert values["capability"]["num_blocks"] == 200
    assert str(report.plan.config.model.name) not in json.dumps(values)


def test_the_table(report: EngineBenchReport) -> None:
    text = shown(report)
    assert "model T, 1 threads" in text
    assert all(name in text for name in NAMES[:-1])
    assert "beside peers" not in text


def shown(report: EngineBenchReport) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        for table in tables(report):
            console.print(table)
    return captured.get()


def test_a_cold_start_in_a_process_of_its_own(config: Config) -> None:
    made = report_of(config, ["cold-start"], repeats=1)
    run(made)
    [one] = made.measured
    parts = [one.values[name] for name in ("start_s", "import_s", "load_s", "first_s")]
    assert all(part > 0 for part in parts)
    assert sum(parts) == pytest.approx(one.value)
    assert one.overhead is None
    assert "cold-start" in shown(made)


def test_a_failed_cold_start_gives_the_reason(config: Config) -> None:
    gone = config.model_copy(update={"model": config.model.model_copy(update={"name": "./none"})})
    with pytest.raises(SageError, match=r"cold start failed: .*none"):
        cold_start(gone, MonotonicClock())


def test_what_cannot_be_measured(config: Config) -> None:
    with pytest.raises(ConfigError, match="--repeats 0: measure at least once"):
        report_of(config, NAMES, repeats=0)
    with pytest.raises(ConfigError, match="no workload is left"):
        report_of(config, [])
