"""`sagellm trace`: what it prints, what it writes, and how it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sagellm import serving
from sagellm.benchmarks.traces import read_trace
from sagellm.cli.trace import assignments, read_prompts
from sagellm.core.blocks import cdiv
from sagellm.core.errors import ConfigError
from sagellm.core.events import RequestReceived

GOLDEN = Path(__file__).parents[1] / "golden" / "traces"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 2500, "input_length": 1100, "output_length": 7, "hash_ids": [1, 2, 3]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("command", [[], ["info"], ["convert"], ["synth"], ["record"]])
def test_help(cli: Any, command: list[str]) -> None:
    assert cli("trace", *command, "--help").exit_code == 0


def test_info_prints_the_figures_and_writes_them(cli: Any, trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "info.json"
    result = cli("trace", "info", str(trace), "--out", str(out))
    assert result.exit_code == 0, result.stderr
    shown = dict(re.split(r"\s{2,}", line.strip()) for line in result.stdout.splitlines()[2:])
    assert shown["format"] == "mooncake"
    assert (shown["requests"], shown["blocks"], shown["unique blocks"]) == ("2", "5", "3")
    assert (shown["infinite cache ratio"], shown["input tokens"]) == ("40.00%", "2,100")
    assert json.loads(out.read_text())["infinite_cache_ratio"] == 0.4


def test_skipped_lines_are_told(cli: Any, trace: Path) -> None:
    trace.write_text(trace.read_text() + "{}\n" * 12)
    result = cli("trace", "info", str(trace), "--on-error", "skip")
    assert result.exit_code == 0
    lines = result.stderr.splitlines()
    assert lines[0] == f"sagellm: {trace}, line 3 is skipped: timestamp is missing; the line has nothing"
    assert (len(lines), lines[-1]) == (11, "sagellm: 12 lines are skipped in all")


def test_options_of_a_format(cli: Any, trace: Path) -> None:
    result = cli("trace", "info", str(trace), "--format", "mooncake", "--option", "block_tokens=100")
    assert result.exit_code == 0, result.stderr
    assert "block tokens" in result.stdout
    assert re.search(r"block tokens +100\s", result.stdout)


def test_convert_there_and_back(cli: Any, tmp_path: Path) -> None:
    moon, ours = tmp_path / "moon.jsonl", tmp_path / "ours.jsonl.xz"
    first = cli("trace", "convert", str(GOLDEN / "chat.jsonl"), "--to", "mooncake", "-o", str(moon))
    assert first.exit_code == 0, first.stderr
    assert first.stdout == f"{moon}: 296 requests, mooncake\n"
    second = cli("trace", "convert", str(moon), "--option", "block_tokens=64", "-o", str(ours))
    assert second.exit_code == 0, second.stderr
    kept, again = read_trace(GOLDEN / "chat.jsonl"), read_trace(ours)
    assert (again.format, again.block_tokens) == ("sagellm", 64)
    assert [r.time_s for r in again.requests] == [r.time_s for r in kept.requests]
    assert [len(r.ids) for r in again.requests] == [len(r.ids) for r in kept.requests]


def test_convert_cuts_tokens_into_blocks(cli: Any, tmp_path: Path) -> None:
    texts, out = tmp_path / "texts", tmp_path / "out"
    said = {"timestamp": 0, "input": "x" * 100, "output": "", "session_id": "s"}
    texts.write_text(json.dumps(said))
    result = cli("trace", "convert", str(texts), "--to", "mooncake", "--block-tokens", "10", "-o", str(out))
    assert result.exit_code == 0, result.stderr
    [request] = read_trace(out).requests
    assert (request.num_input_tokens, request.ids.tolist()) == (25, [0, 1, 2])


def test_synth_writes_what_was_asked_for(cli: Any, tmp_path: Path) -> None:
    out = tmp_path / "t.jsonl"
    given = ["--kind", "shared_prompts", "--seed", "3", "--duration", "60", "--block-tokens", "32"]
    result = cli("trace", "synth", *given, "--tenants", "2,1", "-s", "turns=1.5", "-o", str(out))
    assert result.exit_code == 0, result.stderr
    trace = read_trace(out)
    assert result.stdout == f"{out}: {len(trace.requests)} requests, sagellm\n"
    assert (trace.name, trace.block_tokens) == ("shared_prompts-seed3", 32)
    assert {request.tenant for request in trace.requests} == {"tenant-1", "tenant-2"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["info", "nowhere.jsonl"], "cannot read the trace nowhere.jsonl"),
        (["info", "TRACE", "--on-error", "warn"], "on_error 'warn': 'skip' or 'fail'"),
        (["info", "TRACE", "--format", "nope"], "unknown trace_format 'nope'"),
        (["info", "TRACE", "--option", "every"], "--option 'every': write KEY=VALUE"),
        (["info", "TRACE", "--option", "every=2"], "'mooncake' has no option 'every'; it takes block_tokens"),
        (["info", "TRACE", "--block-tokens", "16"], "an id of trace 'trace' stands for 512 tokens"),
        (["info", "TRACE", "-o", "no/such/out"], "name a file in a folder that exists"),
        (["convert", "TRACE", "-o", "no/such/out"], "name a file in a folder that exists"),
        (["convert", "TRACE", "-o", "OUT", "--to", "azure"], "azure is only read; write "),
        (["convert", "TRACE", "-o", "OUT", "--block-tokens", "5"], "has no option 'block_tokens'"),
        (["synth", "-o", "OUT", "--kind", "nope"], "unknown kind of trace 'nope'"),
        (["synth", "-o", "OUT", "--tenants", "8,x"], "--tenants '8,x': write shares, for example 8,1,1"),
        (["synth", "-o", "OUT", "--set", "turn=3"], "a profile has no 'turn'"),
        (["synth", "-o", "OUT", "--set", "seed=3"], "--set 'seed=3': it has an option of its own"),
        (["record", "nowhere", "-o", "OUT"], "cannot read the prompts in nowhere"),
        (["record", "TRACE", "-o", "no/such/out"], "name a file in a folder that exists"),
    ],
)
def test_what_is_refused_is_explained(
    cli: Any, trace: Path, tmp_path: Path, arguments: list[str], text: str
) -> None:
    names = {"TRACE": str(trace), "OUT": str(tmp_path / "out")}
    result = cli("trace", *(names.get(one, one) for one in arguments))
    assert result.exit_code == 2
    assert text in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_values_of_options_are_json_or_text() -> None:
    assert assignments("--option", ["a=1", "b = 0.5", "c=x=y", 'd="2"']) == {
        "a": 1, "b": 0.5, "c": "x=y", "d": "2",
    }  # fmt: skip


def test_prompts_are_lines(tmp_path: Path) -> None:
    path, messages = tmp_path / "prompts", [{"role": "user", "content": "hi"}]
    path.write_text(f'plain\n\n{{"prompt": "two\\nlines"}}\n{json.dumps({"messages": messages})}\n')
    assert read_prompts(path) == ["plain", "two\nlines", messages]


@pytest.mark.parametrize("line", ["{", '{"prompt": 3}', '{"text": "x"}', '{"messages": []}'])
def test_a_line_that_is_no_prompt(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts"
    path.write_text(f"x\n{line}\n")
    with pytest.raises(ConfigError, match='line 2: a JSON line has a "prompt"'):
        read_prompts(path)
    path.write_text("\n")
    with pytest.raises(ConfigError, match="holds no prompt"):
        read_prompts(path)


def test_record_runs_the_model_and_writes_what_it_was_asked(cli: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    prompts, out = tmp_path / "prompts", tmp_path / "out.jsonl"
    prompts.write_text("Tell me a story about a small red boat on the sea.\n" * 2)
    given = ["--max-tokens", "3", "--num-blocks", "64", "--block-size", "8"]
    result = cli("trace", "record", str(prompts), "-o", str(out), *given)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{out}: 2 requests, sagellm\n"
    trace = read_trace(out)
    first, second = trace.requests
    assert trace.block_tokens == 8
    assert first.ids == second.ids
    assert len(first.ids) == cdiv(first.num_input_tokens, 8)
    assert 1 <= first.num_output_tokens <= 3


def test_serve_records(cli: Any, made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder listens on the bus that the engine gets, and its file is closed when the server ends."""
    listened: list[bool] = []

    def build(config: Any, *, events: Any, progress: Any) -> Any:
        listened.append(events.wants(RequestReceived))
        return made.build(config, progress=progress)

    monkeypatch.setattr(serving, "serve", lambda llm, server, **options: None)
    monkeypatch.setattr("sagellm.engines.build.build_llm", build)
    out = tmp_path / "out.jsonl"
    result = cli("serve", "--port", "0", "--record-trace", str(out), "--block-size", "32")
    assert result.exit_code == 0, result.stderr
    assert json.loads(out.read_text()) == {"sagellm_trace": 1, "block_tokens": 32, "name": "out"}
    assert listened == [True]
    refused = cli("serve", "--port", "0", "--record-trace", str(tmp_path))
    assert refused.exit_code == 2
    assert "cannot record to" in refused.stderr
    assert len(made) == 1
