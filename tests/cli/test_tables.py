"""Every command that prints a table, on a terminal of 80 columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sagellm.benchmarks.http.run import HttpBenchPlan, HttpBenchReport, HttpRun, HttpTarget
from sagellm.benchmarks.reporting import Table, environment
from tests.benchmarks.test_lifetime_report import write_traces
from tests.engines.simulator.test_calibrate import TRUE_MODEL, written
from tests.engines.simulator.worlds import arrivals, measured, serve
from tests.scripted_engine import scripted_llm
from tests.serving.live import serving

GOLDEN = Path(__file__).parent.parent / "golden" / "traces"
CHAT = str(GOLDEN / "chat.jsonl")
COMMANDS: list[Sequence[str]] = [
    ("trace", "info", CHAT),
    ("trace", "info", str(GOLDEN / "tenants.jsonl")),
    ("replay", CHAT, "-j", "1", "--capacity", "5%", "--seed", "0", "--seed", "1"),
    ("replay", CHAT, "-j", "1", "--capacity", "5%", "--causes"),
    ("simulate", "--trace", CHAT, "--requests", "20", "--preset", "vllm-like", "--preset", "adaptive"),
    ("bench", "conversation", "--blocks", "500"),
    ("bench", "fairness", "--capacity", "1%"),
    ("bench", "micro", "prefix_cache", "--quick", "--sections", "a", "--index", "radix"),
    ("bench", "micro", "scheduler_ir", "--quick", "--sections", "e"),
    ("bench", "micro", "kv_pool", "--quick", "--repeats", "1", "--pool", "free_list"),
    ("bench", "lifetime", "--workload", "azure_conv", "--workload", "reuse_mooncake_conversation"),
    ("models",),
    (
        "calibrate",
        "requests.jsonl",
        "--device",
        "a100",
        "--model",
        "llama-3.1-8b",
        "--rounds",
        "2",
        "--fit",
        "20",
        "--num-blocks",
        "4000",
        "--max-error",
        "9",
        "--out",
        "cost.json",
    ),
    ("bench", "engine", "--shape", "tiny", "--only", "decode", "--repeats", "1"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: traces, measured requests, and a cache of models in which one cannot run."""
    write_traces(tmp_path)
    wanted = arrivals(30, rate=6.0)
    written(tmp_path / "requests.jsonl", measured(wanted, serve(wanted, TRUE_MODEL)))
    snapshots = tmp_path / "models--an-organisation-of-some-length--a-model-of-some-length-7b" / "snapshots"
    (snapshots / "1").mkdir(parents=True)
    (snapshots / "1" / "config.json").write_text('{"architectures": ["NoSuchForCausalLM"]}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SAGELLM_TRACES", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    return tmp_path


SLOW = {"kv_pool", "prefix_cache"}
"""Tables that take ten seconds each."""


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "arguments",
    [pytest.param(each, marks=[pytest.mark.slow] if SLOW & {*each} else []) for each in COMMANDS],
    ids=lambda arguments: " ".join(arguments[:3]),
)
def test_no_label_is_cut(cli: Any, monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str]) -> None:
    check_tables(cli, monkeypatch, arguments)


def test_no_label_of_a_server_is_cut(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--answers", "one-token", "--concurrency", "1", "--requests", "1", "--repeats", "1"]
    with serving(scripted_llm()) as live:
        check_tables(cli, monkeypatch, ["bench", "http", "--url", live.url, *given])


def check_tables(cli: Any, monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    tables: list[Table] = []
    original = Table.__rich_console__

    def noted(self: Table, *given: Any) -> Any:
        tables.append(self)
        return original(self, *given)

    monkeypatch.setattr(Table, "__rich_console__", noted)
    result = cli(*arguments)
    assert result.exit_code == 0, result.output
    assert tables
    assert "…" not in result.stdout
    words = set(re.findall(r"\S+", result.stdout))
    for table in tables:
        names = [row[index] for row in table.rows for index in range(table.num_names)]
        labels = {word for label in [*table.columns, *names] for word in label.split()}
        assert {word for word in labels if len(word) < 16} <= words


def test_the_report_of_a_server_is_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 80 columns, with figures that are as wide as they get."""
    monkeypatch.setenv("COLUMNS", "80")
    plan = HttpBenchPlan(["one-token"], [1024], repeats=3)
    report = HttpBenchReport(
        plan, HttpTarget("sagellm", "", "demo"), environment(datetime(2026, 11, 22, tzinfo=UTC))
    )
    report.runs = [HttpRun("one-token", True, 1024, 400, 12345.6, 12345.6, 12345.6, 12345.6, 123456.0)] * 3
    out = StringIO()
    Console(file=out, width=80).print(*report.tables())
    assert "(continued)" not in out.getvalue()
    assert "medians of 3 runs" in out.getvalue()
    assert "requests/s" in out.getvalue()
