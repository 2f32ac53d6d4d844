"""Run a micro benchmark, alone or in turns with peers; its report, as JSON and as tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
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
from sagellm.core.registry import registry

FORMAT = "sagellm.bench.micro/1"
ROW_COLUMNS = ("", "case", "of", "size", "CPU", "p99", "min", "IQR", "one alone", "wall", "unit", "calls")
COMPARISON_COLUMNS = ("", "our case", "of", "peer", "its case", "size", "ours", "drift", "peer's", "ratio")


@dataclass(slots=True)
class MicroBenchReport:
    """All that was measured so far."""

    benchmark: str
    environment: Environment
    plan: MicroBenchPlan
    rows: list[MicroBenchRow] = field(default_factory=list)
    peer_rows: list[MicroPeerRow] = field(default_factory=list)

    def comparisons(self) -> list[MicroPeerComparison]:
        return compare(self.rows, self.peer_rows)

    def as_json(self) -> dict[str, Any]:
        """The report as JSON values; `FORMAT` says which form."""
        return {
            "format": FORMAT,
            "benchmark": self.benchmark,
            "environment": dataclasses.asdict(self.environment),
            "block_size": BLOCK_SIZE,
            "plan": dataclasses.asdict(self.plan),
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "peer_rows": [dataclasses.asdict(row) for row in self.peer_rows],
            "comparisons": [dataclasses.asdict(one) for one in self.comparisons()],
        }


def check_names(benchmark: MicroBenchmark, plan: MicroBenchPlan, sections: str) -> None:
    """Raise the error of an unknown section, implementation or policy before anything is measured."""
    benchmark.check_sections(sections)
    registry("policy").get(plan.policy)
    for variant in plan.variants:
        benchmark.known.get(variant)


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
    """Measure the sections into `report`: with peers, ours, a peer's, and ours again, section by section, so
    that what else the machine does meets both.

    What was measured before an error stays in the report. `on_section` hears what begins.
    """
    plan = report.plan
    check_names(benchmark, plan, sections)
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


def tables(report: MicroBenchReport) -> Iterator[Table]:
    """Our rows (those of the first turn, where there were several), and the comparisons if there are any."""
    title = f"{report.benchmark}: median thread CPU time per call, block {BLOCK_SIZE}"
    rows = [_row(row) for row in report.rows if row.turn == 0]
    yield Table(title, ROW_COLUMNS, rows, num_names=4)
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


def _comparison(one: MicroPeerComparison) -> list[str]:
    names = [one.section, " + ".join(one.ours), one.variant, one.peer, one.case]
    figures = [format_number(one.value), f"{one.drift:.0%}", format_number(one.peer_value)]
    return [*names, f"{one.size:,}", *figures, "" if one.ratio is None else f"{one.ratio:.2f}"]
