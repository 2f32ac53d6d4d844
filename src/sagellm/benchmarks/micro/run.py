"""Runs a micro benchmark, alone or in turns with peers; reports JSON and tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sagellm.benchmarks.micro.cases import (
    BLOCK_SIZE,
    MicroBenchmark,
    MicroBenchPlan,
    MicroBenchRow,
    Stopwatch,
)
from sagellm.benchmarks.micro.peers import MicroPeerComparison, MicroPeerRow, Peer, compare
from sagellm.benchmarks.reporting import Environment, Table, format_number
from sagellm.core.errors import ConfigError
from sagellm.core.registry import registry

FORMAT = "sagellm.bench.micro/1"
ROW_COLUMNS = ("", "case", "of", "size", "CPU", "p99", "min", "IQR", "one alone", "wall", "unit", "calls")
COMPARISON_COLUMNS = ("", "our case", "of", "peer", "its case", "size", "ours", "drift", "peer's", "ratio")


@dataclass(slots=True)
class MicroBenchReport:
    """All rows so far."""

    benchmark: str
    environment: Environment
    plan: MicroBenchPlan
    rows: list[MicroBenchRow] = field(default_factory=list)
    peer_rows: list[MicroPeerRow] = field(default_factory=list)

    def comparisons(self) -> list[MicroPeerComparison]:
        return compare(self.rows, self.peer_rows)

    def as_json(self) -> dict[str, Any]:
        """Returns the report as JSON values of form `FORMAT`."""
        return {
            "format": FORMAT,
            "benchmark": self.benchmark,
            "environment": dataclasses.asdict(self.environment),
            "block_size": BLOCK_SIZE,
            "plan": dataclasses.asdict(self.plan),
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "peer_rows": [dataclasses.asdict(row) for row in self.peer_rows],
            "comparisons": [dataclasses.asdict(comparison) for comparison in self.comparisons()],
        }


def run(
    benchmark: MicroBenchmark,
    report: MicroBenchReport,
    sections: str,
    *,
    peers: Sequence[Peer] = (),
    quick: bool = False,
    stopwatch: Stopwatch | None = None,
    on_section: Callable[[str], None] = lambda what: None,
) -> None:
    """Measures the sections into `report`; rows before an error are kept. With peers, each section runs in
    turns: ours, a peer's, ours again, so that other load of the machine affects both. `on_section` is
    called with the name of what begins. Raises the error of an unknown section, implementation or policy
    before it measures."""
    plan = report.plan
    unknown = [letter for letter in sections if letter not in benchmark.sections]
    if unknown or not sections:
        known = ", ".join(benchmark.sections)
        raise ConfigError(f"{benchmark.name} has no section {''.join(unknown)!r}; it has {known}")
    registry("policy").get(plan.policy)
    for variant in plan.variants:
        benchmark.check(variant)
    stopwatch = stopwatch or Stopwatch(plan.repeats)

    def ours(letter: str, turn: int) -> None:
        on_section(f"section {letter}: {', '.join(plan.variants)}")
        for row in benchmark.sections[letter](plan, stopwatch):
            report.rows.append(dataclasses.replace(row, turn=turn))

    for letter in sections:
        ours(letter, 0)
        for turn, peer in enumerate(peers):
            on_section(f"section {letter}: {peer.name}")
            report.peer_rows += peer.measure(letter, quick=quick, turn=turn)
            ours(letter, turn + 1)


def tables(
    report: MicroBenchReport, own: Mapping[str, Callable[[Sequence[MicroBenchRow]], Table]] | None = None
) -> Iterator[Table]:
    """Returns our rows of the first turn, and the comparisons if there are any.

    `own`: tables of their own for the rows of some sections.
    """
    makers, first = own or {}, [row for row in report.rows if row.turn == 0]
    title = f"{report.benchmark}: median thread CPU time per call, block {BLOCK_SIZE}"
    if rows := [_row(row) for row in first if row.section not in makers]:
        yield Table(title, ROW_COLUMNS, rows, num_names=4)
    for letter, make in makers.items():
        if found := [row for row in first if row.section == letter]:
            yield make(found)
    comparisons = report.comparisons()
    if comparisons:
        title = "ours beside peers, one call at a time; a ratio below 1: ours is faster, or smaller"
        yield Table(title, COMPARISON_COLUMNS, [*map(_comparison, comparisons)], num_names=6)


def _row(row: MicroBenchRow) -> list[str]:
    names = [row.section, row.case, row.variant, f"{row.size:,}"]
    if row.timing is None:
        return [*names, format_number(row.value), "", "", "", "", "", row.unit, ""]
    cpu, calls = row.timing.cpu, f"{row.timing.samples} x {row.timing.calls_per_sample}"
    figures = (cpu.median, cpu.p99, cpu.min, cpu.iqr, row.timing.single, row.timing.wall.median)
    return [*names, *map(format_number, figures), row.unit, calls]


def _comparison(row: MicroPeerComparison) -> list[str]:
    names = [row.section, " + ".join(row.ours), row.variant, row.peer, row.case, f"{row.size:,}"]
    ours, drift, peers = format_number(row.value), f"{row.drift:.0%}", format_number(row.peer_value)
    return [*names, ours, drift, peers, "" if row.ratio is None else f"{row.ratio:.2f}"]
