"""Writes the results of a sweep as a table, CSV, Parquet or JSON."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sagellm.benchmarks.replay.block_trace import BlockTrace
from sagellm.benchmarks.replay.sweep import ReplayResult, ReplaySweepPlan
from sagellm.benchmarks.reporting import (
    PLOTS_EXTRA,
    Environment,
    Table,
    check_writable,
    format_number,
    write_json,
)
from sagellm.core.errors import ConfigError, MissingExtraError
from sagellm.core.protocols.prefix_cache import MissCounts

if TYPE_CHECKING:
    from sagellm.benchmarks.checkpoints.replayer import CheckpointPlan

FORMAT = "sagellm-replay/1"

CAUSES = MissCounts._fields
RATIOS = ("block_ratio", "token_ratio", "request_ratio", "saved_ratio", "of_gap")
SPEEDS = ("cpu_s", "us_per_evicted", "us_in_evict", "accesses_per_s")
TEXTS, REALS = ("policy", "capacity"), ("prefill_s", "saved_s", *RATIOS, *SPEEDS)
"""Types of columns in Parquet files, where a column may be empty in every row; the others are counts."""


def as_row(result: ReplayResult) -> dict[str, Any]:
    """Returns one result flat, by column; None for a missing figure. Ratios are 0 to 1."""
    case, misses = result.case, result.misses
    return {
        "policy": case.policy,
        "capacity": case.capacity.text,
        "capacity_blocks": case.capacity.num_blocks,
        "seed": case.seed,
        **dataclasses.asdict(result.measures),
        **{name: getattr(result, name) for name in RATIOS},
        "evicted": result.num_evicted,
        **{name: getattr(result, name) for name in SPEEDS},
        **{f"missed_{cause}": getattr(misses, cause) if misses else None for cause in CAUSES},
    }


def manifest(
    trace: BlockTrace, plan: ReplaySweepPlan | CheckpointPlan, environment: Environment
) -> dict[str, Any]:
    """Describes what was replayed, how, by which code and on which machine."""
    return {
        "trace": {
            "name": trace.name,
            "format": trace.format,
            "sha256": trace.sha256,
            "block_tokens": trace.block_tokens,
            **trace.counts(),
        },
        "configuration": dataclasses.asdict(plan),
        "environment": dataclasses.asdict(environment),
    }


# -- files


def check_out(path: Path) -> None:
    """Raises, before the sweep, the `ConfigError` or `MissingExtraError` of `write`."""
    check_writable(path)
    if path.suffix not in WRITERS:
        raise ConfigError(f"cannot write {path}: name it {', '.join(f'*{suffix}' for suffix in WRITERS)}")
    if path.suffix == ".parquet":
        _pyarrow()


def write(path: Path, made_by: Mapping[str, Any], results: Sequence[ReplayResult]) -> None:
    """Writes a row per result, in the form that the suffix names. The manifest `made_by` is a part of
    JSON, and `sagellm` in the metadata of Parquet; CSV cannot hold it."""
    try:
        WRITERS[path.suffix](path, made_by, [as_row(result) for result in results])
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error


def _write_json(path: Path, made_by: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    write_json(path, {"format": FORMAT, "manifest": made_by, "rows": rows})


def _write_csv(path: Path, made_by: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _write_parquet(path: Path, made_by: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    pyarrow = _pyarrow()
    described = json.dumps({"format": FORMAT, "manifest": made_by})
    counts = [name for name in rows[0] if name not in (*TEXTS, *REALS)]
    types = {pyarrow.string(): TEXTS, pyarrow.int64(): counts, pyarrow.float64(): REALS}
    columns = [(name, kind) for kind, names in types.items() for name in names]
    made = pyarrow.Table.from_pylist(list(rows), pyarrow.schema(columns, {"sagellm": described}))
    pyarrow.parquet.write_table(made, path)


def _pyarrow() -> Any:
    try:
        importlib.import_module("pyarrow.parquet")
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise MissingExtraError("writing Parquet", PLOTS_EXTRA) from error


Writer = Callable[[Path, Mapping[str, Any], Sequence[Mapping[str, Any]]], None]
WRITERS: Mapping[str, Writer] = {".json": _write_json, ".csv": _write_csv, ".parquet": _write_parquet}


# -- tables


def headline(trace: BlockTrace) -> str:
    """Describes the trace in one line."""
    return (
        f"{trace.name}: {len(trace.requests):,} requests, {trace.num_blocks:,} blocks of "
        f"{trace.block_tokens} tokens, {trace.num_unique:,} unique; a cache that never evicts hits "
        f"{trace.infinite_ratio:.2%}"
    )


def tables(results: Sequence[ReplayResult]) -> list[Table]:
    """Hits and speed and, if causes were asked for, why blocks were missing."""
    shown = [Table("what was hit", *_hits(results), num_names=2)]
    rows = []
    for result in results:
        if result.misses is not None:
            missing = sum(result.misses)
            shares = [_percent(count / missing if missing else None, digits=1) for count in result.misses]
            rows.append([result.case.policy, result.case.capacity.text, _number(missing), *shares])
    if rows:
        columns = ("policy", "capacity", "missing blocks", *(f"{cause} %" for cause in CAUSES))
        shown.append(Table("why blocks were missing", columns, rows, num_names=2))
    return shown


def _hits(results: Sequence[ReplayResult]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Returns columns and rows. The seed is shown if there are several."""
    seeds = len({result.case.seed for result in results} - {None}) > 1
    timed = any(result.cpu_s is not None for result in results)
    columns = (
        "policy", "capacity", *(("seed",) if seeds else ()), "blocks", "hit %", "of gap %", "token %",
        "request %", "saved s %", "evicted",
        *(("µs/evicted", "in evict", "M accesses/s") if timed else ()),
    )  # fmt: skip
    rows = []
    for result in results:
        case = result.case
        row = [case.policy, case.capacity.text]
        row += [_number(case.seed)] if seeds else []
        row += [_number(case.capacity.num_blocks), _percent(result.block_ratio)]
        row += [_percent(result.of_gap, digits=0), _percent(result.token_ratio)]
        row += [_percent(result.request_ratio), _percent(result.saved_ratio), _number(result.num_evicted)]
        if timed:
            speed = result.accesses_per_s
            row += [format_number(result.us_per_evicted, "-"), format_number(result.us_in_evict, "-")]
            row += [format_number(speed / 1e6 if speed is not None else None, "-")]
        rows.append(tuple(row))
    return columns, rows


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _percent(ratio: float | None, *, digits: int = 2) -> str:
    return "-" if ratio is None else f"{100 * ratio:.{digits}f}"
