"""Rows, files and plots of a sweep."""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sagellm.benchmarks.replay.block_trace import BlockTrace, block_trace
from sagellm.benchmarks.replay.outputs import (
    CAUSES,
    FORMAT,
    as_row,
    check_out,
    headline,
    manifest,
    tables,
    write,
)
from sagellm.benchmarks.replay.plots import check_plots, draw, miss_ratio, reuse_times
from sagellm.benchmarks.replay.sweep import ReplayResult, ReplaySweepPlan, run_sweep
from sagellm.benchmarks.reporting import environment
from sagellm.benchmarks.traces import read_trace
from sagellm.core.errors import ConfigError, MissingExtraError

GOLDEN = Path(__file__).parents[1] / "golden" / "traces"
PLAN = ReplaySweepPlan(("lru", "arc", "optimum"), ("2%", "10%"))


@pytest.fixture(scope="module")
def chat() -> BlockTrace:
    return block_trace(read_trace(GOLDEN / "chat.jsonl"))


@pytest.fixture(scope="module")
def results(chat: BlockTrace) -> list[ReplayResult]:
    return run_sweep(chat, PLAN)


@pytest.fixture(scope="module")
def explained(chat: BlockTrace) -> list[ReplayResult]:
    return run_sweep(chat, dataclasses.replace(PLAN, causes=True))


@pytest.fixture
def made_by(chat: BlockTrace) -> dict[str, Any]:
    return manifest(chat, PLAN, environment(datetime.now(UTC)))


def test_a_row_holds_every_figure(results: list[ReplayResult], explained: list[ReplayResult]) -> None:
    row, other = as_row(results[1]), as_row(explained[1])
    assert (row["policy"], row["capacity"], row["seed"]) == ("lru", "10%", None)
    assert row["block_ratio"] == row["hit_blocks"] / row["blocks"]
    assert (row["cpu_s"] is None, row["missed_cold"]) == (False, None)
    assert (other["cpu_s"], other["missed_cold"] > 0) == (None, True)
    assert row.keys() == other.keys()
    assert sum(other[f"missed_{cause}"] for cause in CAUSES) == other["blocks"] - other["hit_blocks"]


def test_json_has_a_manifest(
    chat: BlockTrace, results: list[ReplayResult], made_by: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "r.json"
    write(path, made_by, results)
    read = json.loads(path.read_text())
    assert read["format"] == FORMAT
    assert read["rows"] == [as_row(one) for one in results]
    described = read["manifest"]
    assert described["trace"]["sha256"] == chat.sha256
    assert len(chat.sha256) == 64
    assert described["configuration"]["capacities"] == ["2%", "10%"]
    assert {"commit", "clean", "sagellm", "cpu", "python"} <= described["environment"].keys()


def test_csv_has_a_row_per_result(
    results: list[ReplayResult], made_by: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "r.csv"
    write(path, made_by, results)
    with path.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [row["policy"] for row in rows] == ["lru", "lru", "arc", "arc", "optimum", "optimum"]
    assert float(rows[0]["block_ratio"]) == results[0].block_ratio
    assert (rows[0]["seed"], rows[-1]["evicted"]) == ("", "")


def test_parquet_keeps_types_and_the_manifest(
    results: list[ReplayResult], explained: list[ReplayResult], made_by: dict[str, Any], tmp_path: Path
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    for number, some in enumerate((results, explained)):
        path = tmp_path / f"{number}.parquet"
        write(path, made_by, some)
        read = parquet.read_table(path)
        assert read.to_pylist() == [as_row(one) for one in some]
        assert (str(read.schema.field("seed").type), str(read.schema.field("of_gap").type)) == (
            "int64",
            "double",
        )
        assert json.loads(read.schema.metadata[b"sagellm"])["manifest"]["trace"] == made_by["trace"]


def test_files_that_cannot_be_written_are_refused_before_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"name it \*.json, \*.csv, \*.parquet"):
        check_out(tmp_path / "r.txt")
    with pytest.raises(ConfigError, match="in a folder that exists"):
        check_out(tmp_path / "no" / "r.csv")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="it is a file"):
        check_plots(tmp_path / "file")
    with pytest.raises(ConfigError, match="there is no folder"):
        check_plots(tmp_path / "no" / "plots")
    for missing in ("pyarrow", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingExtraError, match=r"writing Parquet .*\[plots\]"):
        check_out(tmp_path / "r.parquet")
    with pytest.raises(MissingExtraError, match=r"drawing plots .*\[plots\]"):
        check_plots(tmp_path)


def test_tables_show_speed_or_causes(
    chat: BlockTrace, results: list[ReplayResult], explained: list[ReplayResult]
) -> None:
    assert headline(chat).endswith(f"hits {chat.infinite_ratio:.2%}")
    [fast] = tables(results)
    assert fast.columns[-3:] == ("µs/evicted", "in evict", "M accesses/s")
    slow, causes = tables(explained)
    assert slow.columns[-1] == "evicted"
    assert [*causes.columns[3:]] == [f"{cause} %" for cause in CAUSES]
    assert len(causes.rows) == 4


def test_seeds_are_shown_where_there_are_several(results: list[ReplayResult]) -> None:
    lru = results[0]
    several = [dataclasses.replace(lru, case=dataclasses.replace(lru.case, seed=seed)) for seed in (1, 2)]
    [shown] = tables(several)
    assert [row[2] for row in shown.rows] == ["1", "2"]


def test_plots(
    chat: BlockTrace, results: list[ReplayResult], explained: list[ReplayResult], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    plain = draw(tmp_path / "plain", chat, results)
    assert [path.stem for path in plain] == ["miss_ratio", "heat_map", "reuse_time"]
    with_causes = draw(tmp_path / "causes", chat, explained)
    assert with_causes[-1].stem == "miss_causes"
    for path in (*plain, *with_causes):
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size < 150_000
    assert draw(tmp_path / "again", chat, results)[0].read_bytes() == plain[0].read_bytes()


def test_the_curve_shows_the_results(chat: BlockTrace, results: list[ReplayResult]) -> None:
    pytest.importorskip("matplotlib")
    [axes] = miss_ratio(chat, results).axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert set(lines) == {"lru", "arc", "optimum", "never evicts"}
    misses = np.asarray(lines["arc"].get_ydata(), dtype=float)
    assert misses == pytest.approx([100 * (1 - one.block_ratio) for one in results[2:4]])


def test_reuse_times_are_since_the_last_use(chat: BlockTrace) -> None:
    seconds = reuse_times(chat)
    assert len(seconds) == sum(chat.bound)
    assert min(seconds) >= 0
    requests = chat.requests
    second = next(number for number, found in enumerate(chat.bound) if found)
    first = next(one for one in requests if one.ids[0] == requests[second].ids[0])
    assert seconds[0] <= requests[second].time_s - first.time_s
