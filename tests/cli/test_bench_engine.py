"""`sagellm bench engine`: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sagellm.benchmarks.engine.shapes import SHAPES, write_model

QUICK = ("--repeats", "1", "--threads", "1", "--set", "engine.kernels=off", "--num-blocks", "600")


def test_random_weights_are_measured_beside_rows_and_gone(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.json"
    peer = {"engine": "otherllm", "model": "T", "threads": 1, "workload": "b1", "rep": 0, "decode_tps": 1.0}
    rows.write_text(json.dumps(peer))
    given = ("--shape", "tiny", "--only", "decode-1,prefill-512", "--compare", str(rows), "-o", str(out))
    result = cli("bench", "engine", *given, *QUICK)
    assert result.exit_code == 0, result.stderr
    assert "otherllm" in result.stdout
    values = json.loads(out.read_text())
    assert [row["workload"] for row in values["rows"]] == ["a512", "b1"]
    [comparison] = values["comparisons"]
    assert comparison["ratio"] == pytest.approx(values["rows"][1]["decode_tps"], rel=0.01)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "rows.jsonl"]


def test_a_model_by_its_folder(cli: Any, tmp_path: Path) -> None:
    folder, out = tmp_path / "mine", tmp_path / "out.json"
    folder.mkdir()
    write_model(SHAPES["tiny"].changed(vocab_size=1000, hidden_size=64), folder)
    given = ("--model", str(folder), "--only", "b1,long-context", "-o", str(out), "--max-model-len", "300")
    result = cli("bench", "engine", *given, *QUICK)
    assert result.exit_code == 2
    assert result.stderr.startswith("sagellm: long-context needs a context of 16448 tokens; here are 300")
    assert "left out: long-context" in result.stdout
    values = json.loads(out.read_text())
    assert (values["model"], [row["workload"] for row in values["rows"]]) == ("mine", ["b1"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--shape", "XL"], "there is no shape 'XL': use S, M, 8B, tiny, gemma3"),
        (["--shape", "S", "--model", "m"], "leave out --model, or --shape"),
        (["--only", "nope"], "there is no workload 'nope': use cold-start"),
        (["--only", ""], "there is no workload ''"),
        (["--repeats", "0"], "--repeats 0: measure at least once"),
        (["--shape", "S", "--compare", "none.json"], "cannot read none.json"),
        (["--out", "no/such/folder/out.json"], "name a file in a folder that exists"),
        (["--threads", "0"], "engine.threads"),
        (["--model", "./no-such-folder", "--only", "decode-1"], "no-such-folder"),
        (["--model", "./no-such-folder", "--only", "cold-start"], "cold start failed"),
    ],
)
def test_what_it_refuses(cli: Any, arguments: list[str], text: str) -> None:
    result = cli("bench", "engine", *arguments)
    assert result.exit_code == 2
    assert text in result.stderr
    assert result.stderr.count("\n") == 1
    assert not result.stdout
