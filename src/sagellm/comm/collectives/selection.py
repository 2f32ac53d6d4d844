"""Which backend and algorithm carries out an operation, by its size: a measured table.

A table is JSON: for each operation, rows of the largest size in bytes and a way; the last row has no size.
`selection.json` beside this file was measured on two ranks; `measure.py` writes one for another machine.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sagellm.comm.collectives.metrics import CollectiveKind
from sagellm.core.errors import ConfigError, nearest
from sagellm.core.files import read_text

FORMAT = "sagellm.collectives.table/1"
ONE_SHOT, TWO_SHOT, SHARED, TORCH = (
    "shared_memory.one_shot", "shared_memory.two_shot", "shared_memory", "torch_distributed",
)  # fmt: skip
WAYS: Mapping[CollectiveKind, tuple[str, ...]] = {
    CollectiveKind.ALL_REDUCE: (ONE_SHOT, TWO_SHOT, TORCH),
    CollectiveKind.ALL_GATHER: (SHARED, TORCH),
    CollectiveKind.REDUCE_SCATTER: (SHARED, TORCH),
    CollectiveKind.BROADCAST: (SHARED, TORCH),
    CollectiveKind.ALL_TO_ALL: (SHARED, TORCH),
}
"""The ways of each operation. Without shared memory, all are carried out by torch."""
DEFAULT_PATH = Path(__file__).with_name("selection.json")


@dataclass(frozen=True, slots=True)
class SelectionTable:
    """For each operation: sizes up to which ways hold, and the ways.

    The sizes ascend; there is one way more than sizes.
    """

    rows: Mapping[CollectiveKind, tuple[tuple[int, ...], tuple[str, ...]]]

    def __post_init__(self) -> None:
        for kind, known in WAYS.items():
            if kind not in self.rows:
                raise ConfigError(f"the table of collectives has no rows for {kind.value}")
            sizes, ways = self.rows[kind]
            if list(sizes) != sorted(set(sizes)) or len(ways) != len(sizes) + 1:
                raise ConfigError(
                    f"the table of collectives, {kind.value}: sizes must ascend, and the last row have none"
                )
            for way in ways:
                if way not in known:
                    raise ConfigError(
                        f"the table of collectives, {kind.value}: no way {way!r}.{nearest(way, known)}"
                    )

    def way(self, kind: CollectiveKind, num_bytes: int) -> str:
        sizes, ways = self.rows[kind]
        return ways[bisect_left(sizes, num_bytes)]

    def as_json(self) -> dict[str, Any]:
        rows = {
            kind.value: [list(row) for row in zip((*sizes, None), ways, strict=True)]
            for kind, (sizes, ways) in self.rows.items()
        }
        return {"format": FORMAT, "rows": rows}

    @classmethod
    def of_json(cls, value: Any) -> SelectionTable:
        """Raises `ConfigError` for anything but what `as_json` gives."""
        try:
            if value["format"] != FORMAT:
                raise ConfigError(f"the table of collectives has format {value['format']!r}, not {FORMAT!r}")
            rows = {}
            for name, listed in value["rows"].items():
                sizes, ways = [size for size, _ in listed[:-1]], [way for _, way in listed]
                if listed[-1][0] is not None or not all(type(size) is int for size in sizes):
                    raise ConfigError(
                        f"the table of collectives, {name}: the last row must have size null, the others "
                        "whole numbers"
                    )
                rows[CollectiveKind(name)] = tuple(sizes), tuple(ways)
        except (TypeError, KeyError, ValueError, IndexError, AttributeError) as error:
            raise ConfigError(f"no table of collectives: {error!r}") from error
        return cls(rows)

    @classmethod
    def read(cls, path: Path | None = None) -> SelectionTable:
        """The table in a file, or the one that comes with sageLLM."""
        path = path or DEFAULT_PATH
        try:
            return cls.of_json(json.loads(read_text(path)))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read as a table of collectives: {error}") from error

    @classmethod
    def fastest(cls, medians: Mapping[CollectiveKind, Mapping[int, Mapping[str, float]]]) -> SelectionTable:
        """The table of measured seconds, by operation, size in bytes and way.

        Between two measured sizes with different ways, the border is their geometric mean.
        """
        rows = {}
        for kind, by_size in medians.items():
            sizes: list[int] = []
            ways: list[str] = []
            measured: Sequence[int] = sorted(by_size)
            for place, size in enumerate(measured):
                best = min(by_size[size], key=lambda way, size=size: by_size[size][way])  # type: ignore[misc]
                if ways and ways[-1] != best:
                    sizes.append(int(math.sqrt(measured[place - 1] * size)))
                    ways.append(best)
                elif not ways:
                    ways.append(best)
            rows[kind] = tuple(sizes), tuple(ways)
        return cls(rows)
