"""`sagellm replay`: what it prints, what it writes, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sagellm.core.registry import registry

CHAT = Path(__file__).parents[1] / "golden" / "traces" / "chat.jsonl"


def rows(text: str) -> list[list[str]]:
    """The cells of the first table."""
    table = text.split("what was hit")[1].split("why blocks were missing")[0]
    return [line.split() for line in table.splitlines()[2:] if line.strip()]


def test_help(cli: Any) -> None:
    assert cli("replay", "--help").exit_code == 0


def test_defaults(cli: Any, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    result = cli("replay", str(CHAT), "--jobs", "1", "--out", str(out))
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("chat-seed0: ")
    shown = rows(result.stdout)
    expected = ["lru", "optimum"]
    if "adaptive" in registry("policy").names():
        expected.insert(1, "adaptive")
    sizes = ["0.5%", "1%", "2%", "5%", "10%", "25%"]
    assert [row[:2] for row in shown] == [[policy, size] for policy in expected for size in sizes]
    written = json.loads(out.read_text())
    assert [f"{100 * one['block_ratio']:.2f}" for one in written["rows"]] == [row[3] for row in shown]
    assert written["manifest"]["configuration"]["seeds"] == [0]
    assert result.stderr == "", "no bar where there is no terminal"


def test_what_is_asked_for_is_run(cli: Any, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    arguments = ["--policy", "s3fifo", "--policy", "lru", "--capacity", "50"]
    arguments += ["--option", "s3fifo.small_share=0.5"]
    arguments += ["--warmup", "10%", "--premature-s", "5", "--seconds-per-token", "1e-3", "--seed", "7"]
    result = cli("replay", str(CHAT), *arguments, "--causes", "-j", "1", "-o", str(out))
    assert result.exit_code == 0, result.stderr
    assert [row[:3] for row in rows(result.stdout)][:2] == [["s3fifo", "50", "50"], ["lru", "50", "50"]]
    assert "why blocks were missing" in result.stdout
    configuration = json.loads(out.read_text())["manifest"]["configuration"]
    assert configuration["options"] == {"s3fifo": {"small_share": 0.5}}
    assert (configuration["warmup"], configuration["premature_s"], configuration["causes"]) == (
        "10%",
        5.0,
        True,
    )
    assert (configuration["seeds"], configuration["seconds_per_token"]) == ([7], 1e-3)


def test_options_without_a_dot_are_the_formats(cli: Any, tmp_path: Path) -> None:
    path = tmp_path / "moon.jsonl"
    line = {"timestamp": 0, "input_length": 20, "output_length": 5, "hash_ids": [1, 2]}
    path.write_text(json.dumps(line) + "\n{}\n")
    arguments = ["--policy", "lru", "--capacity", "9", "--on-error", "skip", "-j", "1"]
    result = cli("replay", str(path), *arguments, "--format", "mooncake", "--option", "block_tokens=10")
    assert result.exit_code == 0, result.stderr
    assert "2 blocks of 10 tokens" in result.stdout
    assert "line 2 is skipped" in result.stderr


def test_plots_are_named(cli: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = cli(
        "replay", str(CHAT), "--policy", "lru", "--capacity", "1%", "-j", "1", "--plots", str(tmp_path / "p")
    )
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[-1] == str(tmp_path / "p" / "reuse_time.png")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--policy", "nope"], "unknown policy 'nope'"),
        (["--capacity", "0"], "capacity '0': write blocks from 1 on"),
        (["--warmup", "x"], "warm-up 'x'"),
        (["--out", "r.txt"], "name it *.json, *.csv, *.parquet"),
        (["--option", "lru.x=1"], "has no option 'x'"),
        (["--option", "lru"], "write KEY=VALUE"),
        (["--jobs", "0"], "at least one"),
        (["--seed", "x"], "--seed 'x': write a whole number"),
        (["--on-error", "x"], "'skip' or 'fail'"),
        (["--block-tokens", "5"], "stands for 64 tokens"),
        (["--checkpoints", "value"], "--checkpoints needs --groups"),
        (["--groups", "x"], "write qwen3-next or nemotron-h"),
        (["--groups", "qwen3-next", "--checkpoints", "x"], "no rule 'x'"),
        (["--groups", "qwen3-next", "--policy", "lru"], "leave out the option for policies"),
        (["--groups", "qwen3-next", "--plots", "p"], "leave out --plots"),
        (["--groups", "qwen3-next", "--out", "r.parquet"], "name it *.json, *.csv"),
    ],
)
def test_what_is_refused_is_explained(cli: Any, arguments: list[str], text: str) -> None:
    result = cli("replay", str(CHAT), *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert text in result.stderr


def test_checkpoints_of_a_hybrid_model(cli: Any, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    names = ("--checkpoints", "value", "--checkpoints", "every-4096", "--checkpoints", "bound")
    result = cli("replay", str(CHAT), "--groups", "qwen3-next", *names, "--capacity", "50%", "-o", str(out))
    assert result.exit_code == 0, result.stderr
    assert "of bound %" in result.stdout
    written = json.loads(out.read_text())
    assert written["manifest"]["configuration"]["groups"]["state_bytes"] == 77_266_944
    assert [row["policy"] for row in written["rows"]] == ["value", "every-4096", "bound"]
    value, every, bound = (row["hit_tokens"] for row in written["rows"])
    assert every < value < bound
