"""Writes the results of replays of checkpoints as a table, CSV or JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sagellm.benchmarks.checkpoints.replayer import BOUND, GIB, CheckpointResult
from sagellm.benchmarks.replay.outputs import WRITERS
from sagellm.benchmarks.reporting import Table, check_writable, format_number
from sagellm.core.errors import ConfigError

SUFFIXES = (".json", ".csv")


def check_out(path: Path) -> None:
    """Raises, before the replays, the `ConfigError` of `write`."""
    check_writable(path)
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"cannot write {path}: name it {', '.join(f'*{suffix}' for suffix in SUFFIXES)}")


def write(path: Path, made_by: Mapping[str, Any], results: Sequence[CheckpointResult]) -> None:
    """Writes a row per result; the manifest `made_by` is a part of JSON only."""
    try:
        WRITERS[path.suffix](path, made_by, [as_row(result) for result in results])
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error


def as_row(result: CheckpointResult) -> dict[str, Any]:
    """Returns one result flat, by column; None for a missing figure."""
    return {
        "policy": result.policy,
        "capacity": result.capacity,
        "budget_bytes": result.budget_bytes if math.isfinite(result.budget_bytes) else None,
        "tokens": result.tokens,
        "hit_tokens": result.hit_tokens,
        "token_ratio": result.token_ratio,
        "saved_per_gib": result.saved_per_gib,
        "peak_bytes": result.peak_bytes,
        "peak_checkpoint_bytes": result.peak_checkpoint_bytes,
        "made": result.num_made,
    }


def table(results: Sequence[CheckpointResult]) -> Table:
    """Hits and memory by capacity and policy."""
    most = {result.capacity: result.hit_tokens for result in results if result.policy == BOUND}
    columns = (
        "capacity", "policy", "GiB", "token %", "of bound %", "saved tokens / GiB", "checkpoints GiB", "made",
    )  # fmt: skip
    rows = [
        (
            result.capacity,
            result.policy,
            _gib(result.budget_bytes if math.isfinite(result.budget_bytes) else result.peak_bytes),
            f"{100 * result.token_ratio:.2f}",
            f"{100 * result.hit_tokens / most[result.capacity]:.0f}" if most.get(result.capacity) else "-",
            format_number(result.saved_per_gib, "-"),
            _gib(result.peak_checkpoint_bytes),
            "-" if result.num_made is None else f"{result.num_made:,}",
        )
        for result in results
    ]
    return Table("what was reused", columns, rows, num_names=2)


def _gib(size: float | None) -> str:
    return format_number(None if size is None else size / GIB, "-")
