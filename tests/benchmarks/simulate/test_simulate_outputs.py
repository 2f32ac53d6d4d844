"""Tables, files and plots of simulations."""

from __future__ import annotations

import csv
import io
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sagellm.benchmarks.reporting import environment
from sagellm.benchmarks.simulate.capacity import RateProbe, SustainedRate
from sagellm.benchmarks.simulate.experiment import SimulationSetup, preset_config
from sagellm.benchmarks.simulate.hardware import hardware
from sagellm.benchmarks.simulate.metrics import SLOPair
from sagellm.benchmarks.simulate.outputs import (
    FORMAT,
    as_row,
    check_writable_folder,
    headlines,
    manifest,
    tables,
    write,
)
from sagellm.benchmarks.simulate.plots import check_plots, draw
from sagellm.benchmarks.simulate.simulation import ClusterLayout, ServiceGoals, SimulationResult
from sagellm.benchmarks.simulate.workload import Arrivals, WorkloadSpec
from sagellm.core.config import PRESETS
from sagellm.core.errors import ConfigError, MissingExtraError, UnknownNameError
from tests.benchmarks.simulate.stand_in import StandIn, request, served, trace

SLOS = (SLOPair(0.05, 11), SLOPair(1, 100))
COLUMNS = (
    "trace", "preset", "rate", "request", "session", "tenant", "priority", "prompt_tokens", "arrival_s",
    "outcome", "reason", "prefill", "decode", "num_output_tokens", "num_cached", "num_preemptions",
    "scheduled_s", "first_token_s", "ready_s", "finished_s", "ttft_s", "tpot_s", "e2e_s",
)  # fmt: skip
BENCH = SimulationSetup(StandIn(), goals=ServiceGoals(SLOS, price_per_hour=2.0))


def result(rate: float, preset: str, **given: Any) -> SimulationResult:
    made = trace(
        request(0, 8, 3, [1], session="a"), request(1, 20, 2, [1, 2, 3]), request(2, 8, 1), request(3, 9, 4)
    )
    spec = WorkloadSpec(Arrivals(rate=rate), high_priority_share=0.5)
    return served(made, spec=spec, goals=BENCH.goals, preset=preset, **given)


@pytest.fixture(scope="module")
def results() -> list[SimulationResult]:
    return [result(rate, preset) for rate in (1.0, 50.0) for preset in ("one", "other")]


@pytest.fixture
def made_by(results: list[SimulationResult]) -> dict[str, Any]:
    capacities = {"one": SustainedRate(3.0, (RateProbe(3.0, 0.0),))}
    return manifest(BENCH, results, environment(datetime.now(UTC)), None, capacities)


def test_a_row_holds_every_figure(results: list[SimulationResult]) -> None:
    row = as_row(results[2])
    assert (row["preset"], row["rate"], row["requests"]) == ("one", pytest.approx(50.0), 4)
    assert row["requests_finished"] == 4
    names = ("ttft_s", "tpot_s", "itl_s", "e2e_s")
    assert {f"{name}_{kind}" for name in names for kind in ("mean", "p50", "p90", "p95", "p99")} <= row.keys()
    assert {"goodput_0.05s_11ms", "hit_ratio", "reprefill_ratio", "utilisation"} <= row.keys()
    assert list(row)[-3:] == ["wall_s", "cpu_s", "requests_per_wall_s"]


def test_files(results: list[SimulationResult], made_by: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    check_writable_folder(folder)
    paths = write(folder, made_by, results)
    assert [path.name for path in paths] == ["results.json", "requests.csv"]
    written = json.loads(paths[0].read_text())
    assert written["format"] == FORMAT
    assert [row["preset"] for row in written["rows"]] == ["one", "other", "one", "other"]
    told = written["manifest"]
    assert told["workloads"][0]["rate"] == pytest.approx(1.0)
    assert told["layout"]["roles"] == {"instance-1": "both"}
    assert told["presets"]["one"]["kv"]["block_size"] == 4
    assert told["kv_blocks"] == {"one": 1000, "other": 1000}
    assert told["capacities"]["one"]["rate"] == 3.0
    assert "api_key" not in paths[0].read_text()
    with paths[1].open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == 16
    assert tuple(rows[0]) == COLUMNS
    assert (rows[0]["request"], rows[0]["outcome"], rows[0]["session"]) == ("0", "finished", "a")
    assert float(rows[0]["ttft_s"]) == pytest.approx(0.01)
    assert rows[2]["tpot_s"] == "", "an answer of one token has none"
    assert float(rows[3]["e2e_s"]) == results[0].served[3].finished_s - results[0].served[3].arrival_s  # type: ignore[operator]


def test_a_request_that_did_not_come_far(tmp_path: Path) -> None:
    made = trace(request(0, 8, 30), request(0, 8, 30), request(5, 8, 1))
    cut = served(made, goals=ServiceGoals(until_s=0.1), scheduler__max_num_seqs=1)
    paths = write(tmp_path, {}, [cut])
    with paths[1].open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [row["outcome"] for row in rows] == ["running", "waiting", "not sent"]
    assert (rows[2]["arrival_s"], rows[2]["ttft_s"], rows[0]["finished_s"]) == ("", "", "")


def test_tables_show_what_is_in_the_rows(results: list[SimulationResult]) -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    for one in tables(results, SLOS):
        console.print(one)
    text = console.export_text()
    assert "TTFT s" in text
    assert "0.05 s, 11 ms" in text
    assert text.count("other") == 6
    first, *others = headlines(BENCH, results)
    assert first == (
        "none on stand-in (tensor parallel 1), 1 x 1,000 KV blocks, prefill and decode together, "
        "router prefix_aware"
    )
    assert len(others) == 2
    assert "50.0 requests/s" in others[1]


def test_plots(results: list[SimulationResult], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    check_plots(tmp_path / "p")
    paths = draw(tmp_path / "p", results, SLOS)
    assert [path.name for path in paths] == ["latency_cdf.png", "timeline.png", "goodput.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    apart = [result(5.0, "x", layout=ClusterLayout(disaggregate=(1, 1)))]
    assert [path.name for path in draw(tmp_path / "q", apart, SLOS)] == ["latency_cdf.png", "timeline.png"]


def test_plots_of_nothing_that_finished(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cut = served(trace(request(0, 8, 30)), goals=ServiceGoals(until_s=0.005))
    assert len(draw(tmp_path, [cut], SLOS)) == 2


def test_plots_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"pip install .*\[plots\]"):
        check_plots(tmp_path)


def test_folders_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="it is a file, name a folder"):
        check_writable_folder(tmp_path / "file")
    with pytest.raises(ConfigError, match="there is no folder"):
        check_writable_folder(tmp_path / "no" / "folder")


# -- presets and hardware


def test_presets_are_configurations() -> None:
    assert "throughput" in PRESETS
    chosen = preset_config("low_latency", {"kv.block_size": 32})
    assert (chosen.scheduler.max_num_seqs, chosen.kv.block_size) == (16, 32)
    assert preset_config("default").scheduler.max_num_seqs == 1024
    with pytest.raises(UnknownNameError, match=r"unknown preset 'trouput'. Did you mean 'throughput'"):
        preset_config("trouput")
    with pytest.raises(ConfigError, match=r"unknown key 'kv.blok_size'"):
        preset_config("default", {"kv.blok_size": 1})


def test_hardware_describes_itself(tmp_path: Path) -> None:
    cost = tmp_path / "cost.json"
    cost.write_text(json.dumps({"coefficients": {"step_s": 0.5}}))
    machine = hardware("h100-80g", "llama-3.1-8b", cost_file=cost)
    chosen = preset_config("default")
    assert machine.described()["coefficients"]["step_s"] == 0.5
    assert machine.described()["coefficients_from"] == "cost.json"
    assert 20_000 < machine.num_blocks(chosen) < 35_000
    assert machine.max_model_len(chosen) == 131_072
    small = preset_config("default", {"kv.num_blocks": 100})
    assert (machine.num_blocks(small), machine.max_model_len(small)) == (100, 1600)


@pytest.mark.parametrize("text", ["{", "[1]", '{"coefficients": 1}', '{"speed": 1}'])
def test_coefficients_that_are_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "cost.json").write_text(text)
    with pytest.raises(ConfigError):
        hardware("h100-80g", "llama-3.1-8b", cost_file=tmp_path / "cost.json")
