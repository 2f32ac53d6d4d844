"""`sagellm cache overlap`: of a trace, of prompts, of the folder of a disk tier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sagellm.core.types import Request, SamplingParams, Tokens

GOLDEN = Path(__file__).parents[1] / "golden" / "traces"
DOCUMENT = "\n" + " ".join(f"word{number}" for number in range(60))


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()[3:]]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": DOCUMENT, "cache_salt": "a"},
        {"messages": [{"role": "user", "content": f"Read this:{DOCUMENT}"}], "cache_salt": "a"},
        {"prompt": f"And this.{DOCUMENT}", "cache_salt": "b", "session_id": "s"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_prompts_are_compared_in_any_position(cli: Any, prompts: Path, tmp_path: Path) -> None:
    written = tmp_path / "counts.json"
    result = cli("cache", "overlap", str(prompts), "--slice-tokens", "8", "--out", str(written))
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("prompts: 3 texts, ")
    assert [row[0] for row in rows(result.stdout)] == ["8"]
    [share] = json.loads(written.read_text())["shares"]
    assert share["in_namespace"] == 56, "whole slices of the first text, whose rest is shorter than one"
    assert share["anywhere"] == 2 * share["in_namespace"]
    assert share["in_session"] == 0


def test_the_tokenizer_can_be_named(cli: Any, prompts: Path) -> None:
    words = cli("cache", "overlap", str(prompts)).stdout
    cut = cli("cache", "overlap", str(prompts), "--option", "tokenizer=bytes").stdout
    assert words != cut
    assert [row[0] for row in rows(words)] == ["16", "64", "256", "1,024"]


def test_the_folder_of_a_disk_tier(cli: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from sagellm.engines.build import build_engine, load_config

    folder = tmp_path / "kv"
    settings = {"kv.disk_gb": 0.05, "kv.dir": str(folder)}
    document = list(range(100, 164))
    engine = build_engine(load_config(cli=settings, environ={}).config)
    try:
        for number, before in enumerate(([], [7] * 16)):
            prompt = Tokens([*before, *document, 5])
            engine.add(Request(f"r{number}", prompt, SamplingParams(max_tokens=1)))
            while engine.has_work():
                engine.step()
        tiers = engine.kv.tiers
        assert tiers is not None
        while not tiers.is_idle:
            tiers.wait(1.0)
            tiers.poll()
        live = cli("cache", "overlap", str(folder), "--slice-tokens", "16")
    finally:
        engine.close()
    assert live.exit_code == 0, live.output
    after = cli("cache", "overlap", str(folder), "--slice-tokens", "16")
    assert after.stdout == live.stdout
    assert f"{folder}: 2 texts, 144 tokens" in live.stdout
    assert rows(live.stdout)[0][:2] == ["16", "44.4"], "64 of 144 tokens are held twice"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([str(GOLDEN / "chat.jsonl")], "cannot show reuse in other positions"),
        ([str(GOLDEN)], "holds no KV blocks: name the kv.dir"),
        ([str(GOLDEN / "chat.jsonl"), "--slice-tokens", "0"], "--slice-tokens 0: at least 1"),
        ([str(GOLDEN / "none.jsonl")], "cannot read the trace"),
    ],
)
def test_what_is_refused(cli: Any, arguments: list[str], message: str) -> None:
    result = cli("cache", "overlap", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_an_unwritable_file_is_refused_first(cli: Any, prompts: Path) -> None:
    result = cli("cache", "overlap", str(prompts), "--out", "/nowhere/x.json")
    assert result.exit_code == 2
    assert "name a file in a folder that exists" in result.output
