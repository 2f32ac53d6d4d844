"""The results of a sweep as a table, and as CSV, Parquet or JSON with a manifest."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sagellm.benchmarks.replay.block_trace import BlockTrace
from sagellm.benchmarks.replay.sweep import ReplayResult, ReplaySweepPlan
from sagellm.benchmarks.reporting import Environment, Table, check_writable, format_number, write_json
from sagellm.core.errors import ConfigError, MissingExtraError
from sagellm.core.protocols.prefix_cache import MissCounts

FORMAT = "sagellm-replay/1"
EXTRA = "plots"
CAUSES = MissCounts._fields


def as_row(result: ReplayResult) -> dict[str, Any]:
    """One result flat, by column; None where there is no such figure. Ratios are 0 to 1."""
    case, misses = result.case, result.misses
    return {
        "policy": case.policy,
        "capacity": case.capacity.text,
        "capacity_blocks": case.capacity.num_blocks,
        "seed": case.seed,
        **dataclasses.asdict(result.measures),
        "block_ratio": result.block_ratio,
        "token_ratio": result.token_ratio,
        "request_ratio": result.request_ratio,
        "saved_ratio": result.saved_ratio,
        "of_gap": result.of_gap,
        "evicted": result.num_evicted,
        "cpu_s": result.cpu_s,
        "us_per_evicted": result.us_per_evicted,
        "us_in_evict": result.us_in_evict,
        "accesses_per_s": result.accesses_per_s,
        **{f"missed_{cause}": getattr(misses, cause) if misses else None for cause in CAUSES},
    }


def manifest(trace: BlockTrace, plan: ReplaySweepPlan, environment: Environment) -> dict[str, Any]:
    """What was replayed, how, by which code and where."""
    return {
        "trace": {
            "name": trace.name,
            "format": trace.format,
            "sha256": trace.sha256,
            "block_tokens": trace.block_tokens,
            "requests": len(trace.requests),
            "blocks": trace.num_blocks,
            "unique_blocks": trace.num_unique,
            "infinite_cache_ratio": trace.infinite_ratio,
        },
        "configuration": dataclasses.asdict(plan),
        "environment": dataclasses.asdict(environment),
    }


# -- files


def check_out(path: Path) -> None:
    """Raise now what `write` would raise after the sweep: `ConfigError`, `MissingExtraError`."""
    check_writable(path)
    if path.suffix not in WRITERS:
        raise ConfigError(f"cannot write {path}: name it {', '.join(f'*{suffix}' for suffix in WRITERS)}")
    if path.suffix == ".parquet":
        _pyarrow("pyarrow")


def write(path: Path, made_by: Mapping[str, Any], results: Sequence[ReplayResult]) -> None:
    """A row per result, in the form that the suffix names. `made_by`, the manifest, is a part of JSON, and
    `sagellm` in the metadata of Parquet; CSV has no place for it."""
    try:
        WRITERS[path.suffix](path, made_by, [as_row(one) for one in results])
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error


def _write_json(path: Path, made_by: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    write_json(path, {"format": FORMAT, "manifest": made_by, "rows": rows})


def _write_csv(path: Path, made_by: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _write_parquet(path: Path, made_by: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    pyarrow, parquet = _pyarrow("pyarrow"), _pyarrow("pyarrow.parquet")
    described = json.dumps({"format": FORMAT, "manifest": made_by})
    columns = [pyarrow.field(name, getattr(pyarrow, kind)()) for name, kind in _column_types().items()]
    made = pyarrow.Table.from_pylist(list(rows), pyarrow.schema(columns, {"sagellm": described}))
    parquet.write_table(made, path)


def _column_types() -> dict[str, str]:
    """The Parquet type of each column: one that is empty in every row does not tell."""
    texts = dict.fromkeys(("policy", "capacity"), "string")
    counts: tuple[str, ...] = (
        "capacity_blocks",
        "seed",
        "requests",
        "hit_requests",
        "blocks",
        "hit_blocks",
        "bound_blocks",
    )
    counts += ("tokens", "hit_tokens", "evicted", *(f"missed_{cause}" for cause in CAUSES))
    reals: tuple[str, ...] = (
        "prefill_s",
        "saved_s",
        "block_ratio",
        "token_ratio",
        "request_ratio",
        "saved_ratio",
        "of_gap",
    )
    reals += ("cpu_s", "us_per_evicted", "us_in_evict", "accesses_per_s")
    return texts | dict.fromkeys(counts, "int64") | dict.fromkeys(reals, "float64")


def _pyarrow(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError("writing Parquet", EXTRA) from error


Writer = Callable[[Path, Mapping[str, Any], Sequence[Mapping[str, Any]]], None]
WRITERS: Mapping[str, Writer] = {".json": _write_json, ".csv": _write_csv, ".parquet": _write_parquet}


# -- tables


def headline(trace: BlockTrace) -> str:
    """What is replayed, in one line."""
    return (
        f"{trace.name}: {len(trace.requests):,} requests, {trace.num_blocks:,} blocks of "
        f"{trace.block_tokens} tokens, {trace.num_unique:,} unique; a cache that never evicts hits "
        f"{trace.infinite_ratio:.2%}"
    )


def tables(results: Sequence[ReplayResult]) -> list[Table]:
    """Hits and speed; and where causes were asked for, why blocks were missing."""
    shown = [Table("what was hit", *_hits(results), num_names=2)]
    missed = [one for one in results if one.misses is not None]
    if missed:
        columns = ("policy", "capacity", "missing blocks", *(f"{cause} %" for cause in CAUSES))
        rows = [_misses(one, one.misses) for one in missed if one.misses is not None]
        shown.append(Table("why blocks were missing", columns, rows, num_names=2))
    return shown


def _hits(results: Sequence[ReplayResult]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows. The seed is shown where there are several."""
    seeds = len({one.case.seed for one in results} - {None}) > 1
    timed = any(one.cpu_s is not None for one in results)
    columns: tuple[str, ...] = (
        "policy",
        "capacity",
        *(("seed",) if seeds else ()),
        "blocks",
        "hit %",
        "of gap %",
    )
    columns += ("token %", "request %", "saved s %", "evicted")
    columns += ("µs/evicted", "in evict", "M accesses/s") if timed else ()
    rows = []
    for one in results:
        case = one.case
        row = [case.policy, case.capacity.text]
        row += [_number(case.seed)] if seeds else []
        row += [_number(case.capacity.num_blocks), _percent(one.block_ratio), _percent(one.of_gap, digits=0)]
        row += [_percent(one.token_ratio), _percent(one.request_ratio), _percent(one.saved_ratio)]
        row += [_number(one.num_evicted)]
        if timed:
            speed = one.accesses_per_s
            row += [_figure(one.us_per_evicted), _figure(one.us_in_evict)]
            row += [_figure(speed / 1e6 if speed is not None else None)]
        rows.append(tuple(row))
    return columns, rows


def _misses(result: ReplayResult, misses: MissCounts) -> tuple[str, ...]:
    missing = sum(misses)
    shares = [_percent(count / missing if missing else None, digits=1) for count in misses]
    return (result.case.policy, result.case.capacity.text, _number(missing), *shares)


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _figure(value: float | None) -> str:
    return "-" if value is None else format_number(value)


def _percent(ratio: float | None, *, digits: int = 2) -> str:
    return "-" if ratio is None else f"{100 * ratio:.{digits}f}"
