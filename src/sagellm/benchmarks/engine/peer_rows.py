"""Reads rows of the peers' harness and compares our figures with them.

A row is `{"engine", "model", "threads", "workload", "rep", ...}` with the figures under their names. A file
holds one row a line, a list of rows, or an object whose `rows` is such a list. Our own result files have that
form too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from sagellm.core.errors import ConfigError

HarnessRow = Mapping[str, Any]
NAMED = ("engine", "model", "workload")


@dataclass(frozen=True, slots=True)
class EngineFigure:
    """One figure of ours. `key` is the harness's name of the figure in rows of workload `code`."""

    title: str
    code: str
    key: str
    unit: str
    value: float
    higher_is_better: bool


@dataclass(frozen=True, slots=True)
class EnginePeerComparison:
    """One figure beside a peer's median. A `ratio` above 1: ours is better by that factor."""

    figure: EngineFigure
    peer: str
    peer_value: float
    ratio: float | None


def read_rows(path: Path) -> list[HarnessRow]:
    """Returns the rows of a file; raises `ConfigError` naming it."""
    try:
        rows = _parsed(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    valid = [isinstance(row, dict) and all(isinstance(row.get(name), str) for name in NAMED) for row in rows]
    if not rows or not all(valid):
        raise ConfigError(
            f"{path} has no rows of the peers' harness: one JSON object a line, or a list of them, or an "
            f"object whose rows are one, each with {', '.join(NAMED)}"
        )
    return rows


def _parsed(text: str) -> list[Any]:
    """Returns the rows, none for another form. Lines that are no objects are remarks of the harness."""
    try:
        whole = json.loads(text)
    except ValueError:
        try:
            return [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        except ValueError:
            return []
    rows = whole.get("rows", [whole]) if isinstance(whole, dict) else whole
    return rows if isinstance(rows, list) else []


def read_peers(paths: Iterable[Path], model: str, threads: int) -> list[HarnessRow]:
    """Returns the rows of this model and number of threads. Raises `ConfigError` for a file without such
    rows; the message says which rows the file has."""
    chosen = []
    for path in paths:
        rows = read_rows(path)
        fitting = [row for row in rows if row["model"] == model and row.get("threads", threads) == threads]
        if not fitting:
            kinds = sorted({f"{row['model']} with {row.get('threads', '?')} threads" for row in rows})
            raise ConfigError(
                f"{path} has no rows of model {model} with {threads} threads; it has {', '.join(kinds)}: "
                f"choose by --shape or --model and --threads"
            )
        chosen += fitting
    return chosen


def compare(figures: Sequence[EngineFigure], rows: Sequence[HarnessRow]) -> list[EnginePeerComparison]:
    """Compares every figure with the median of every peer that has it. Peers are in order of appearance."""
    comparisons = []
    for figure, peer in product(figures, dict.fromkeys(str(row["engine"]) for row in rows)):
        own = [row.get(figure.key) for row in rows if (row["engine"], row["workload"]) == (peer, figure.code)]
        values = [value for value in own if isinstance(value, int | float) and not isinstance(value, bool)]
        if values:
            value = median(values)
            better, worse = (figure.value, value) if figure.higher_is_better else (value, figure.value)
            ratio = better / worse if worse > 0 else None
            comparisons.append(EnginePeerComparison(figure, peer, value, ratio))
    return comparisons
