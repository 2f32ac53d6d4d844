"""`sagellm bench lifetime`: what it prints, what it writes, and how it refuses."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sagellm.cli.bench import Output, lifetime
from sagellm.cli.commands import app
from sagellm.core.errors import ConfigError, UnknownNameError
from tests import quick_commands  # noqa: F401


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    write_traces(tmp_path)
    return tmp_path


def write_traces(folder: Path) -> None:
    """A small trace of lengths, which follow the prompt's, and one of blocks."""
    chance = random.Random(0)
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for number in range(400):
        length = chance.choice((100, 900))
        time = f"2023-11-16 18:{number // 60:02}:{number % 60:02}.000000"
        lines.append(f"{time},{length},{length // 10 + chance.randrange(5)}")
    (folder / "azure2023_conv.csv").write_text("\n".join(lines) + "\n")
    blocks = [
        {"timestamp": 1000 * n, "input_length": 1024, "output_length": 9, "hash_ids": [n % 50, 100 + n % 70]}
        for n in range(400)
    ]
    (folder / "mooncake_conversation.jsonl").write_text("\n".join(map(json.dumps, blocks)) + "\n")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "lifetime", *arguments])


def test_it_prints_tables_and_writes_all_figures(traces: Path) -> None:
    out = traces / "out.json"
    result = run(
        "--traces", str(traces), "--workload", "azure_conv", "--workload", "reuse_mooncake_conversation",
        "--out", str(out),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    for shown in ("best constant", "statistical", "reuse_table", "AUC", "Brier"):
        assert shown in result.output
    values = json.loads(out.read_text())
    assert values["format"] == "sagellm.bench.lifetime/1"
    assert values["settings"]["part"] == "test"
    assert values["splits"] == {"azure_conv": "by time", "reuse_mooncake_conversation": "by time"}
    rows = {row["predictor"]: row for row in values["lengths"]}
    assert rows["statistical"]["against_constant"] < -0.5
    assert set(rows["statistical"]["score"]["coverage"]) == {"0.1", "0.25", "0.5", "0.75", "0.9"}
    assert {row["moment"] for row in values["reuse"]} == {"at use", "at rest"}
    assert len(values["reuse"][0]["score"]["bins"]) == 10


def test_predicting_later_leaves_fewer_requests(traces: Path) -> None:
    out = traces / "out.json"
    result = run("--traces", str(traces), "--workload", "azure_conv", "--after", "50", "--out", str(out))
    assert result.exit_code == 0, result.output
    values = json.loads(out.read_text())
    assert 20 < values["lengths"][0]["score"]["num_samples"] < 60


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"workload": ["azure"]}, UnknownNameError, "azure_conv"),
        ({"predictor": ["oracle"]}, UnknownNameError, "statistical"),
        ({"part": "all"}, ConfigError, "train, validation, test"),
        ({"after": -1}, ConfigError, "0 or more"),
        ({"workload": ["azure_conv"], "traces": Path("nowhere")}, ConfigError, "no file azure2023_conv"),
        ({"out": Path("nowhere") / "out.json"}, ConfigError, "cannot write"),
    ],
)
def test_what_cannot_be_is_refused_with_what_could(
    given: dict[str, Any], error: type[Exception], text: str
) -> None:
    settings: dict[str, Any] = {"traces": None, "workload": None, "predictor": None, "out": None}
    settings |= {"part": "test", "after": 0} | given
    wrapped: Any = getattr(lifetime, "__wrapped__", lifetime)
    output = Output(settings.pop("out"), markdown=False)
    with pytest.raises(error, match=text):
        wrapped(**settings, output=output)
