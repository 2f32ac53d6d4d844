"""Tables for people: laid out so that nothing is cut, however narrow the terminal is."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import rich.table
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape

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
