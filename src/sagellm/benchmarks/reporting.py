"""What every benchmark writes: its environment, JSON files, tables and plots."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import rich.table
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape

import sagellm
from sagellm.core.cores import usable_cores
from sagellm.core.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CPUINFO = Path("/proc/cpuinfo")
PLAIN_WIDTH = 200
"""Columns where the output is no terminal and COLUMNS is not set."""
PLOTS_EXTRA = "plots"
PLOT_DPI = 120
PLOT_COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bb5566", "#004488")
_GAP = 2
_NAMES_SHARE = 0.6
_LEAST_NAME = 4


@dataclass(frozen=True, slots=True)
class Environment:
    """Machine, software and time of a measurement. `commit` is None outside a git checkout. `clean` is
    true if the package has no uncommitted change."""

    date: str
    cpu: str
    cores: int
    system: str
    python: str
    sagellm: str
    commit: str | None
    clean: bool


def environment(date: datetime | None = None) -> Environment:
    """Describes this machine and this package at `date`, now by default."""
    commit, clean = _checkout(Path(sagellm.__file__).parent)
    return Environment(
        date=(date or datetime.now(UTC)).isoformat(timespec="seconds"),
        cpu=cpu_model(CPUINFO.read_text(encoding="utf-8") if CPUINFO.exists() else ""),
        cores=usable_cores(),
        system=platform.system(),
        python=platform.python_version(),
        sagellm=sagellm.__version__,
        commit=commit,
        clean=clean,
    )


def cpu_model(cpuinfo: str) -> str:
    """Returns the model name in /proc/cpuinfo, or the platform's name of the CPU."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _checkout(package: Path) -> tuple[str | None, bool]:
    """Returns the commit of `package`, and whether the package has no uncommitted change. An installed
    package may lie in a folder that belongs to another checkout, which does not track it."""
    tracked = _git(package, "ls-files", "--error-unmatch", "__init__.py")
    commit = _git(package, "rev-parse", "HEAD") if tracked else None
    return commit, commit is not None and _git(package, "status", "--porcelain", "--", ".") == ""


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


# -- files


def check_writable(path: Path) -> None:
    """Raises `ConfigError` before a long measurement if `path` cannot be written after it."""
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}: name a file in a folder that exists")


def check_folder(folder: Path, verb: str = "write") -> None:
    """Raises `ConfigError` if `folder` neither exists nor can be made. `verb` is for the message."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"cannot {verb} into {folder}: it is a file, name a folder")
    if not folder.parent.is_dir():
        raise ConfigError(f"cannot {verb} into {folder}: there is no folder {folder.parent}")


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes the values in their order; raises `ConfigError` naming the file."""
    try:
        path.write_text(json.dumps(values, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


# -- plots


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty matplotlib figure of that size in inches; needs no display. Raises
    `MissingExtraError` if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("drawing plots", PLOTS_EXTRA) from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figures(folder: Path, figures: Mapping[str, Figure]) -> list[Path]:
    """Writes each figure as NAME.png and returns the paths; raises `ConfigError` naming the folder."""
    paths = []
    try:
        folder.mkdir(exist_ok=True)
        for name, figure in figures.items():
            paths.append(folder / f"{name}.png")
            figure.savefig(paths[-1], dpi=PLOT_DPI, metadata={"Software": None})
    except OSError as error:
        raise ConfigError(f"cannot draw into {folder}: {error.strerror}") from error
    return paths


# -- tables


def format_number(value: float | None, missing: str = "") -> str:
    """Formats with three significant digits or more: 0.123, 1.23, 12.3, 123, 12,345. Returns `missing` for
    None."""
    if value is None:
        return missing
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text that fits any terminal without cutting cells; rich prints it. The first `num_names`
    columns name the row, the others are figures. A table that is too wide for the terminal is split: each
    part repeats the names and has some of the figures. Long names are wrapped."""

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
        """Returns the table in Markdown below its title; figures are aligned to the right."""
        names = self.num_names
        rules = ["---" if index < names else "---:" for index in range(len(self.columns))]
        rows = (self.columns, rules, *self.rows)
        lines = [f"| {' | '.join(map(_markdown_text, cells))} |" for cells in rows]
        return "\n".join([f"**{_markdown_text(self.title)}**", "", *lines])

    def _part(self, title: str, indexes: Sequence[int], widths: Sequence[int]) -> rich.table.Table:
        gap = (0, _GAP, 0, 0)
        part = rich.table.Table(title=title, title_justify="left", box=None, pad_edge=False, padding=gap)
        for index in indexes:
            justify: Literal["left", "right"] = "left" if index < self.num_names else "right"
            width = widths[index] - _GAP
            part.add_column(escape(self.columns[index]), width=width, overflow="fold", justify=justify)
        for row in self.rows:
            part.add_row(*(escape(row[index]) for index in indexes))
        return part

    def _widths(self, width: int) -> list[int]:
        """Returns the width of each column with the gap after it. If the whole table does not fit into
        `width`, headers are wrapped between their words and the names get at most `_NAMES_SHARE` of it."""

        def widest(index: int, header: Sequence[str]) -> int:
            return max(map(cell_len, [*header, *(row[index] for row in self.rows)])) + _GAP

        widths = [widest(index, [name]) for index, name in enumerate(self.columns)]
        if sum(widths) <= width + _GAP:
            return widths
        names = widths[: self.num_names]
        figures = [
            widest(index, name.split() or [""])
            for index, name in enumerate(self.columns[self.num_names :], self.num_names)
        ]
        most = int(width * _NAMES_SHARE) if figures else width + _GAP
        most = max(most, width + _GAP - sum(figures))
        while sum(names) > most and max(names) > _LEAST_NAME + _GAP:
            names[names.index(max(names))] -= 1
        room = max(width - sum(names), _LEAST_NAME)
        return [*names, *(min(figure, room + _GAP) for figure in figures)]

    def _parts(self, widths: Sequence[int], room: int) -> Iterator[list[int]]:
        """Yields figure columns, as many at a time as `room` holds."""
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
    """Returns standard output, as wide as the terminal or COLUMNS. Otherwise any table fits."""
    terminal = Console()
    columns = os.environ.get("COLUMNS", "")
    if terminal.is_terminal or (columns.isdecimal() and int(columns)):
        return terminal
    return Console(width=PLAIN_WIDTH)


def print_tables(tables: Iterable[Table], *, markdown: bool = False) -> None:
    """Prints to standard output, with an empty line between tables."""
    terminal = console()
    for number, table in enumerate(tables):
        if number:
            print()
        if markdown:
            print(table.as_markdown())
        else:
            terminal.print(table)


def _markdown_text(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")
