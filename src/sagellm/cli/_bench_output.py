"""Where the results of `sagellm bench` go: a table or Markdown on standard output, JSON in a file."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import typer

from sagellm.cli._options import OptionGroup, option

if TYPE_CHECKING:
    from sagellm.benchmarks.reporting import Table


@dataclass(frozen=True, slots=True)
class Output(OptionGroup):
    """`--out` and `--markdown`."""

    out: Path | None
    markdown: bool

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        written = typer.Option("--out", "-o", metavar="FILE", help="Write the results there as JSON.")
        return [
            option("out", Path, written),
            option("markdown", bool, typer.Option("--markdown", help="Print the tables as Markdown.")),
        ]

    @classmethod
    def take(cls, given: dict[str, Any]) -> Self:
        return cls(given.pop("out"), bool(given.pop("markdown")))

    def check(self) -> None:
        """Raise `ConfigError` now rather than after a long measurement."""
        from sagellm.benchmarks.reporting import check_writable

        if self.out is not None:
            check_writable(self.out)

    def show(self, tables: Iterable[Table], values: Mapping[str, Any]) -> None:
        """Write the values, if a file is given, then print the tables."""
        from sagellm.benchmarks.reporting import show

        show(tables, values, self.out, markdown=self.markdown)
