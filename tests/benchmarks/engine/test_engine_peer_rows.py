"""Rows of the harness: three forms of file, medians, ratios, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sagellm.benchmarks.engine.peer_rows import EngineFigure, compare, read_peers, read_rows
from sagellm.core.errors import ConfigError

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "2026-11-20-engines-S.json"
RATE = EngineFigure("decode-8", "b8", "decode_tps", "tok/s", 120.0, higher_is_better=True)
TIME = EngineFigure("multi-turn", "d", "total", "s", 5.0, higher_is_better=False)


def row(engine: str = "vllm", workload: str = "b8", **more: Any) -> dict[str, Any]:
    return {"engine": engine, "model": "S", "threads": 2, "workload": workload, "rep": 0, **more}


ROWS = [
    row(decode_tps=50.0),
    row(decode_tps=60.0),
    row(decode_tps=200.0),
    row(error="RuntimeError: gone"),
    row("llamacpp", decode_tps=240.0, rss_mb=500),
    row("llamacpp", "d", total=10.0, hit=None),
]


def as_lines(rows: list[dict[str, Any]]) -> str:
    return "== vllm S threads 2\n" + "\n".join(map(json.dumps, rows)) + "\n"


@pytest.mark.parametrize("text", [as_lines(ROWS), json.dumps(ROWS), json.dumps({"date": "x", "rows": ROWS})])
def test_three_forms_of_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    assert read_rows(path) == ROWS


def test_one_row_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS[0]))
    assert read_rows(path) == ROWS[:1]


def test_ratios_say_how_many_times_better() -> None:
    found = {(one.figure.title, one.peer): (one.peer_value, one.ratio) for one in compare([RATE, TIME], ROWS)}
    assert found == {
        ("decode-8", "vllm"): (60.0, 2.0),
        ("decode-8", "llamacpp"): (240.0, 0.5),
        ("multi-turn", "llamacpp"): (10.0, 2.0),
    }


def test_nothing_to_divide_by() -> None:
    [one] = compare([RATE], [row(decode_tps=0.0)])
    assert one.ratio is None


def test_the_committed_results_of_the_harness_are_read() -> None:
    rows = read_peers([RESULTS], "S", 2)
    peers = {one.peer for one in compare([RATE, TIME], rows)}
    assert {"hf", "sagellm"} <= peers


def test_rows_of_another_model_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([*ROWS, {**row(), "model": "M"}, {**row(), "threads": 1}]))
    assert read_peers([path], "S", 2) == ROWS
    assert len(read_peers([path], "S", 1)) == 1
    with pytest.raises(ConfigError, match=r"no rows of model X with 2 threads; it has M with 2 threads, S"):
        read_peers([path], "X", 2)


@pytest.mark.parametrize(
    "text",
    ["", "nonsense", "[]", "{}", "[1, 2]", '{"rows": 3}', '[{"engine": "a"}]', '{"engine": ', '{"a": 1}\n{'],
)
def test_a_file_without_rows(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"rows\.json has no rows of.* engine, model, workload"):
        read_rows(path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ConfigError, match=f"cannot read {path}"):
            read_rows(path)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"cannot read .*binary"):
        read_rows(binary)
