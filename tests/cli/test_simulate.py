"""`sagellm simulate`: what it prints and writes, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from sagellm.cli.simulate import simulate
from sagellm.core.blocks import cdiv

QUICK = ["--device", "h200", "--model", "llama-3.2-1b", "--rate", "5"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command alone, with an environment that says nothing."""
    monkeypatch.delenv("SAGELLM_TRACES", raising=False)
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command("simulate")(simulate)

    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(app, arguments)

    return invoke


@pytest.fixture
def moon(tmp_path: Path) -> str:
    """60 requests of about 1,000 tokens, pairs of which share a prefix."""
    path = tmp_path / "moon.jsonl"
    lines = [
        {
            "timestamp": 100 * at, "input_length": 1000 + at, "output_length": 1 + at % 5,
            "hash_ids": [at // 2, 100 + at, 200 + at][: cdiv(1000 + at, 512)],
        }
        for at in range(60)
    ]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return str(path)


def test_help(run: Any) -> None:
    assert run("--help").exit_code == 0


def test_presets_are_compared(run: Any, moon: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["--preset", "default", "--preset", "throughput", "--trace", moon, *QUICK, "--price", "2"]
    arguments += ["--slo", "1,100", "--slo", "0.02,5", "--high-priority-share", ".5", "--seed", "3"]
    result = run(*arguments, "--out", str(out))
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("llama-3.2-1b on h200 (tensor parallel 1), 1 x ")
    assert lines[1].startswith("moon: 60 requests (0 left out), trace arrivals, 5.00 requests/s, rate scale ")
    assert "seed 3" in lines[1]
    assert "1 s, 100 ms" in result.stdout
    assert lines[-2:] == [str(out / "results.json"), str(out / "requests.csv")]
    written = json.loads((out / "results.json").read_text())
    assert [row["preset"] for row in written["rows"]] == ["default", "throughput"]
    assert all(row["requests_finished"] == 60 for row in written["rows"])
    assert all(row["hit_ratio"] > 0.2 for row in written["rows"])
    told = written["manifest"]
    assert told["hardware"]["device"] == "h200"
    assert told["workloads"][0]["high_priority_requests"] == 30
    assert told["slos"][1] == {"ttft_s": 0.02, "tpot_ms": 5.0}
    assert told["price_per_hour"] == 2.0


def test_rates_instances_and_plots(run: Any, moon: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    arguments = ["--trace", moon, "--model", "llama-3.2-1b", "--requests", "20", "--disaggregate", "1:1"]
    arguments += ["--rate-scale", "0.5", "--rate-scale", "1", "--network", "1", "--router", "least-loaded"]
    result = run(*arguments, "--out", str(tmp_path / "o"), "--plots", "--set", "kv.block_size=32")
    assert result.exit_code == 0, result.stderr
    assert "2 x " in result.stdout.splitlines()[0]
    assert "prefill and decode apart, router least_loaded" in result.stdout
    assert result.stdout.splitlines()[-1] == str(tmp_path / "o" / "goodput.png")
    told = json.loads((tmp_path / "o" / "results.json").read_text())["manifest"]
    assert told["presets"]["default"]["kv"]["block_size"] == 32
    assert told["layout"]["network_bytes_per_s"] == 1e9
    assert [one["rate_scale"] for one in told["workloads"]] == [0.5, 1.0]
    assert told["workloads"][0]["left_out"]["behind the limit"] == 40


def test_arrivals_are_drawn_and_cut(run: Any, moon: str) -> None:
    drawn = ["--trace", moon, *QUICK, "--arrivals", "bursty", "--cv", "4", "--until", "2"]
    result = run(*drawn)
    assert result.exit_code == 0, result.stderr
    assert "bursty arrivals" in result.stdout
    row = next(line for line in result.stdout.split("work")[1].splitlines() if "default" in line)
    assert int(row.split()[2]) < 60


def test_capacity_is_told(run: Any, moon: str) -> None:
    result = run("--trace", moon, *QUICK, "--capacity")
    assert result.exit_code == 0, result.stderr
    assert "capacity, default: " in result.stdout


def test_a_setting(run: Any, moon: str, tmp_path: Path) -> None:
    setting = tmp_path / "setting.json"
    values = {
        "name": "s", "baseline": "default", "presets": ["default"], "loads": [0.5], "slos": [[1, 100]],
        "model": "llama-3.2-1b", "traces": [{"file": "moon.jsonl"}],
    }  # fmt: skip
    setting.write_text(json.dumps(values))
    result = run("--setting", str(setting), "--traces", str(tmp_path), "--out", str(tmp_path / "o"))
    assert result.exit_code == 0, result.stderr
    written = json.loads((tmp_path / "o" / "results.json").read_text())
    assert written["rows"][0]["load"] == 0.5
    assert written["manifest"]["setting"]["name"] == "s"
    assert "moon.jsonl" in written["manifest"]["capacities"]
    beside = run("--setting", str(setting), "--traces", str(tmp_path), "--rate", "1")
    assert "fixes traces, rates and goals" in beside.stderr
    beside = run("--setting", str(setting), "--traces", str(tmp_path), "--device", "h200")
    assert "leave out device" in beside.stderr
    nowhere = run("--setting", str(setting))
    assert (nowhere.exit_code, nowhere.stdout) == (2, "")
    assert "--traces or SAGELLM_TRACES" in nowhere.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--preset", "adaptif"], "unknown preset 'adaptif'. Did you mean 'adaptive'? There are: "),
        (["--device", "h1000"], "no device 'h1000'. Did you mean 'h100'?"),
        (["--device", "h10"], "no device 'h10'. Did you mean 'h100'?"),
        (["--device", "h100-81g"], "no device 'h100-81g'. Did you mean 'h100-80g'?"),
        (["--device", "a1"], "no device 'a1'. Did you mean 'a10'?"),
        (["--device", "mi300"], "no device 'mi300'. Did you mean 'mi300x'?"),
        (["--model", "lama"], "no model shape 'lama'"),
        (["--slo", "1"], "SLO '1': write seconds"),
        (["--slo", "1;100"], "as in 1,100"),
        (["--rate-scale", "0"], "--rate-scale '0': write a number above 0"),
        (["--rate-scale", "x"], "--rate-scale 'x'"),
        (["--rate", "1", "--rate-scale", "2"], "exclude each other"),
        (["--rate", "-1"], "rate must be greater than 0"),
        (["--arrivals", "poison"], "Did you mean 'poisson'?"),
        (["--disaggregate", "1"], "as in 1:1"),
        (["--disaggregate", "1:1", "--instances", "2"], "exclude each other"),
        (["--instances", "0"], "at least one instance, got 0"),
        (["--router", "ransom"], "unknown router 'ransom'"),
        (["--network", "0"], "bandwidth above 0"),
        (["--closed-loop"], "needs a trace with sessions"),
        (["--think", "1"], "give --closed-loop too"),
        (["--high-priority-share", "2"], "must be 0 to 1"),
        (["--requests", "0"], "at least one request"),
        (["--until", "0"], "more than 0 seconds"),
        (["--price", "-1"], "0 or more"),
        (["--set", "kv.blok_size=1"], "unknown key 'kv.blok_size'"),
        (["--set", "x"], "write KEY=VALUE"),
        (["--plots"], "the folder of --out"),
        (["--out", "/no/such/folder"], "there is no folder"),
        (["--cost", "/no/such/file"], "cannot read the coefficients"),
        (["--setting", "/no/such/file"], "--setting fixes traces"),
        (["--format", "nope"], "nope"),
        (["--seed", "-1"], "a seed is 0 or more"),
        (["--tensor-parallel", "7"], "does not divide"),
        (["--model", "llama-3.1-405b"], "leaves no room for KV"),
    ],
)
def test_what_is_refused_is_explained(run: Any, moon: str, arguments: list[str], text: str) -> None:
    result = run("--trace", moon, *arguments)
    assert result.exit_code == 2, result.stdout
    assert text in result.stderr
    assert result.stdout == ""


def test_a_trace_must_be_there(run: Any) -> None:
    assert "name what to simulate: --trace FILE" in run("--preset", "default").stderr
    missing = run("--trace", "/no/such/trace")
    assert missing.exit_code == 2
    assert "cannot read the trace /no/such/trace" in missing.stderr
