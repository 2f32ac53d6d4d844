"""Azure's LLM inference traces (Patel et al., ISCA 2024): times and lengths as CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from sagellm.benchmarks.traces._parsing import BrokenLineError, IdMap, brief
from sagellm.benchmarks.traces.record import TraceRequest
from sagellm.core.types import Namespace, Tokens

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class AzureFormat:
    """A header with `COLUMNS` (others are ignored), then one request per line. The format has no prompts,
    so `ids` stay empty. Times are UTC, to the microsecond."""

    block_tokens = 1
    title = None
    from_zero = True

    def __init__(self) -> None:
        self._columns: tuple[int, ...] | None = None

    def recognises(self, line: str, record: Mapping[str, Any] | None) -> bool:
        return record is None and set(COLUMNS) <= {cell.strip() for cell in line.split(",")}

    def parse(self, line_number: int, line: str, ids: IdMap) -> Iterable[TraceRequest]:
        cells = _cells(line)
        if self._columns is None:
            self._columns = _column_indexes(cells)
            return
        if len(cells) <= max(self._columns):
            raise BrokenLineError(f"{len(cells)} cells; the header has {', '.join(COLUMNS)}")
        time, num_input, num_output = (cells[column] for column in self._columns)
        yield TraceRequest(
            time_s=_seconds(time),
            ids=Tokens(),
            namespace=Namespace(),
            num_input_tokens=_whole("ContextTokens", num_input),
            num_output_tokens=_whole("GeneratedTokens", num_output),
        )


def _cells(line: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line.rstrip("\r\n")], strict=True), [])]
    except csv.Error as error:
        raise BrokenLineError(f"no CSV: {error}") from error


def _column_indexes(cells: list[str]) -> tuple[int, ...]:
    missing = [name for name in COLUMNS if name not in cells]
    if missing:
        raise BrokenLineError(f"the header lacks {', '.join(missing)}; it has {', '.join(cells)}")
    return tuple(map(cells.index, COLUMNS))


def _seconds(time: str) -> float:
    try:
        moment = datetime.fromisoformat(time)
    except ValueError as error:
        raise BrokenLineError(f"TIMESTAMP must be a date and a time, got {brief(time)}") from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _whole(name: str, cell: str) -> int:
    if not (cell.isascii() and cell.isdecimal()):
        raise BrokenLineError(f"{name} must be a whole number from 0 on, got {brief(cell)}")
    return int(cell)


PLUGIN = AzureFormat
