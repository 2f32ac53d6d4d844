"""Reads rows of the peers' harness and compares our figures with them.

A row is `{"engine", "model", "threads", "workload", "rep", ...}` with the figures under their names. A file
holds one row a line, a list of rows, or an object whose `rows` is such a list. Our own result files have that
form too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    found = _parsed(text)
    if found is None or not all(isinstance(row, dict) and _is_row(row) for row in found):
        raise ConfigError(
            f"{path} has no rows of the peers' harness: one JSON object a line, or a list of them, or an "
            f"object whose rows are one, each with {', '.join(NAMED)}"
        )
    return found


def _parsed(text: str) -> list[Any] | None:
    try:
        whole = json.loads(text)
    except ValueError:
        return _parsed_lines(text)
    if isinstance(whole, dict) and "rows" in whole:
        whole = whole["rows"]
    elif isinstance(whole, dict):
        whole = [whole]
    return whole if isinstance(whole, list) and whole else None


def _parsed_lines(text: str) -> list[Any] | None:
    """Skips lines that are no objects: they are remarks of the harness."""
    try:
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")] or None
    except ValueError:
        return None


def _is_row(row: HarnessRow) -> bool:
    return all(isinstance(row.get(name), str) for name in NAMED)


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
    """Compares every figure with every peer that has it, peers in order of appearance."""
    peers = list(dict.fromkeys(str(row["engine"]) for row in rows))
    return [
        EnginePeerComparison(figure, peer, value, _ratio(figure, value))
        for figure in figures
        for peer in peers
        if (value := _median(figure, peer, rows)) is not None
    ]


def _median(figure: EngineFigure, peer: str, rows: Sequence[HarnessRow]) -> float | None:
    values = [
        float(row[figure.key])
        for row in rows
        if (row["engine"], row["workload"]) == (peer, figure.code) and _is_number(row.get(figure.key))
    ]
    return median(values) if values else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _ratio(figure: EngineFigure, peer_value: float) -> float | None:
    above, below = figure.value, peer_value
    if not figure.higher_is_better:
        above, below = below, above
    return above / below if below > 0 else None
