"""Tables on a narrow terminal: nothing is cut, every header and every cell can be read."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from sagellm.benchmarks.reporting import PLAIN_WIDTH, Table, console

WORDS = st.text("abcdefgh", min_size=1, max_size=9)
NAMES = st.lists(WORDS, min_size=1, max_size=4).map(" ".join)
FIGURES = st.text("0123456789.,%", min_size=0, max_size=12)


def shown(table: Table, width: int = 80) -> list[str]:
    printer = Console(width=width)
    with printer.capture() as captured:
        printer.print(table)
    return captured.get().splitlines()


@st.composite
def tables(draw: st.DrawFn) -> Table:
    num_names, num_figures = draw(st.integers(1, 4)), draw(st.integers(0, 16))
    columns = draw(st.lists(NAMES, min_size=num_names + num_figures, max_size=num_names + num_figures))
    rows = [
        [*(draw(NAMES) for _ in range(num_names)), *(draw(FIGURES) for _ in range(num_figures))]
        for _ in range(draw(st.integers(0, 4)))
    ]
    return Table("title", columns, rows, num_names)


def test_markdown_escapes_what_would_be_read_as_markup() -> None:
    table = Table("a | title", ["name", "value"], [["x|y", "1"], ["*a_b*", "2"]], num_names=1)
    assert table.as_markdown().splitlines() == [
        r"**a \| title**",
        "",
        "| name | value |",
        "| --- | ---: |",
        r"| x\|y | 1 |",
        r"| \*a\_b\* | 2 |",
    ]


@given(tables())
def test_whatever_the_columns_nothing_is_cut(table: Table) -> None:
    lines = shown(table)
    text = "\n".join(lines)
    assert "…" not in text
    assert all(len(line) <= 80 for line in lines)
    figures = [row[index] for row in table.rows for index in range(table.num_names, len(table.columns))]
    words = [word for name in table.columns[table.num_names :] for word in name.split()]
    found = re.findall(r"\S+", text)
    assert all(one in found for one in [*filter(None, figures), *words])


def test_where_it_fits_a_row_is_a_line() -> None:
    table = Table("t", ("name", "two words"), [("a", "1"), ("b", "2")], 1)
    lines = ["t", "name  two words", "a             1", "b             2"]
    assert [line.rstrip() for line in shown(table)] == lines


def test_each_part_repeats_the_names() -> None:
    columns = ("policy", *(f"figure {n}" for n in range(20)))
    lines = shown(Table("hits", columns, [("lru", *(str(n) for n in range(20)))], 1), width=60)
    parts = [line for line in lines if line.startswith("lru")]
    assert len(parts) > 1
    assert [n for line in parts for n in line.split()[1:]] == [str(n) for n in range(20)]
    assert sum(line.startswith("(continued)") for line in lines) == len(parts) - 1


def test_markup_is_text() -> None:
    assert any("[bold]x" in line for line in shown(Table("t", ("[red]",), [("[bold]x",)], 1)))


@pytest.mark.parametrize(("columns", "width"), [("80", 80), ("", PLAIN_WIDTH), ("no", PLAIN_WIDTH)])
def test_the_width_is_that_of_columns(monkeypatch: pytest.MonkeyPatch, columns: str, width: int) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert console().width == width
