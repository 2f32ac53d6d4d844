"""What every benchmark writes: its environment, JSON files and tables."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import rich.table
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape

import sagellm
from sagellm.core.cores import usable_cores
from sagellm.core.errors import ConfigError

CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Environment:
    """Machine, software and day of a measurement. `commit` is None outside a git checkout; `clean` says
    whether the package was as committed."""

    date: str
    cpu: str
    cores: int
    system: str
    python: str
    sagellm: str
    commit: str | None
    clean: bool


def environment(date: datetime) -> Environment:
    """This machine, on that day."""
    commit, clean = _checkout(Path(sagellm.__file__).parent)
    return Environment(
        date=date.isoformat(timespec="seconds"),
        cpu=cpu_model(CPUINFO.read_text(encoding="utf-8") if CPUINFO.exists() else ""),
        cores=usable_cores(),
        system=platform.system(),
        python=platform.python_version(),
        sagellm=sagellm.__version__,
        commit=commit,
        clean=clean,
    )


def cpu_model(cpuinfo: str) -> str:
    """The model name in the kernel's list of processors, or what the platform calls it."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _checkout(package: Path) -> tuple[str | None, bool]:
    """The commit that `package` is of, and whether nothing in it was changed since.

    An installed package may lie in a folder that belongs to another checkout, which does not track it.
    """
    tracked = _git(package, "ls-files", "--error-unmatch", "__init__.py")
    commit = _git(package, "rev-parse", "HEAD") if tracked else None
    return commit, commit is not None and _git(package, "status", "--porcelain", "--", ".") == ""


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def figure(value: float) -> str:
    """Three significant digits or more: 0.123, 1.23, 12.3, 123, 12,345."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"


def check_writable(path: Path) -> None:
    """Raise `ConfigError` now rather than after a long measurement."""
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}: name a file in a folder that exists")


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write the values, in their order; raises `ConfigError` naming the file."""
    try:
        path.write_text(json.dumps(values, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def show(
    tables: Iterable[Table], values: Mapping[str, Any], out: Path | None, *, markdown: bool = False
) -> None:
    """Write the values to `out`, if it is given, then print the tables; raises as `write_json` does."""
    if out is not None:
        write_json(out, values)
    print_tables(tables, markdown=markdown)


PLAIN_WIDTH = 200
"""Columns where the output is no terminal and COLUMNS is not set."""
_GAP = 2
_NAMES_SHARE = 0.6
_LEAST_NAME = 4


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text. The first `num_names` columns name the row, the others are figures.

    Printed with rich. What is too wide for the terminal is split: each part repeats the names and has some of
    the figures. Names that are long are wrapped.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_names: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        widths = self._widths(options.max_width)
        names = list(range(self.num_names))
        parts = self._parts(widths, options.max_width - sum(widths[: self.num_names]))
        for number, figures in enumerate(parts):
            yield self._part("(continued)" if number else self.title, [*names, *figures], widths)

    def as_markdown(self) -> str:
        """The table in Markdown, its title above it; figures are aligned to the right."""
        names = self.num_names
        rules = ["---" if index < names else "---:" for index in range(len(self.columns))]
        lines = [_markdown_row(cells) for cells in (self.columns, rules, *self.rows)]
        return "\n".join([f"**{_markdown_text(self.title)}**", "", *lines])

    def _part(self, title: str, indexes: Sequence[int], widths: Sequence[int]) -> rich.table.Table:
        made = rich.table.Table(
            title=title, title_justify="left", box=None, pad_edge=False, padding=(0, _GAP, 0, 0)
        )
        for index in indexes:
            name, width = escape(self.columns[index]), widths[index] - _GAP
            is_name = index < self.num_names
            made.add_column(name, width=width, overflow="fold", justify="left" if is_name else "right")
        for row in self.rows:
            made.add_row(*(escape(row[index]) for index in indexes))
        return made

    def _widths(self, width: int) -> list[int]:
        """Of all columns, the gaps after them included.

        Where the whole table does not fit into `width`, headers are wrapped between their words and names
        take at most a share of it.
        """
        widths = [max(map(cell_len, self._cells(index, [name]))) + _GAP for index, name in self._named()]
        if sum(widths) <= width + _GAP:
            return widths
        for index, name in self._named()[self.num_names :]:
            widths[index] = max(map(cell_len, self._cells(index, name.split() or [""]))) + _GAP
        names, figures = widths[: self.num_names], widths[self.num_names :]
        most = int(width * _NAMES_SHARE) if figures else width + _GAP
        most = max(most, width + _GAP - sum(figures))
        while sum(names) > most and max(names) > _LEAST_NAME + _GAP:
            names[names.index(max(names))] -= 1
        room = max(width - sum(names), _LEAST_NAME)
        return [*names, *(min(one, room + _GAP) for one in figures)]

    def _named(self) -> list[tuple[int, str]]:
        return list(enumerate(self.columns))

    def _cells(self, index: int, header: Sequence[str]) -> list[str]:
        return [*header, *(row[index] for row in self.rows)]

    def _parts(self, widths: Sequence[int], room: int) -> Iterator[list[int]]:
        """Indexes of the figures' columns, as many at a time as `room` holds, at least one."""
        part: list[int] = []
        left = room + _GAP
        for index in range(self.num_names, len(self.columns)):
            if part and widths[index] > left:
                yield part
                part, left = [], room + _GAP
            part.append(index)
            left -= widths[index]
        yield part


def console() -> Console:
    """Standard output: as wide as the terminal is, or COLUMNS says; otherwise wide enough for any table."""
    terminal = Console()
    columns = os.environ.get("COLUMNS", "")
    if terminal.is_terminal or (columns.isdecimal() and int(columns)):
        return terminal
    return Console(width=PLAIN_WIDTH)


def print_tables(tables: Iterable[Table], *, markdown: bool = False) -> None:
    """To standard output, with an empty line between them."""
    shown = console()
    for number, one in enumerate(tables):
        if number:
            print()
        if markdown:
            print(one.as_markdown())
        else:
            shown.print(one)


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_markdown_text, cells))} |"


def _markdown_text(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")
