"""`sagellm bench micro collectives`: shared memory beside gloo, in turns.

Sizes are in KB. In each round every way is called many times in a row, and its time is the median of these
calls. Values are medians over the rounds, a ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

from sagellm.benchmarks.micro.cases import (
    MicroBenchmark,
    MicroBenchPlan,
    MicroBenchRow,
    Section,
    Stopwatch,
)
from sagellm.comm.collectives.measure import (
    AUTO,
    BF16,
    COPY_SLOT,
    COPY_WHOLE,
    INT8,
    KB,
    MeasurementPlan,
    measure,
)
from sagellm.comm.collectives.metrics import CollectiveKind, bus_factor
from sagellm.comm.collectives.selection import TORCH, WAYS
from sagellm.core.errors import UnknownNameError, nearest

WORLD_SIZES = {"2": 2, "3": 3, "4": 4}
"""The names of the variants are numbers of ranks."""
MOST_ROUNDS = 25
BUS = "bus bandwidth of auto"
BESIDE_GLOO = "gloo / auto"
BESIDE_COPY, BESIDE_SLOT = f"{COPY_WHOLE} / auto", f"{COPY_SLOT} / auto"


def _check_ranks(name: str) -> None:
    if name not in WORLD_SIZES:
        raise UnknownNameError(f"cannot measure {name!r} ranks.{nearest(name, WORLD_SIZES)}")


def _section(letter: str, *kinds: CollectiveKind) -> Section:
    def section(plan: MicroBenchPlan, stopwatch: Stopwatch) -> Iterator[MicroBenchRow]:
        for variant in plan.variants:
            measured = MeasurementPlan(
                kinds,
                plan.buffers_kb,
                min(plan.repeats, MOST_ROUNDS),
                plan.repeats,
                with_limits=True,
                with_wire_formats=True,
            )
            for kind, by_size in measure(WORLD_SIZES[variant], measured).items():
                for num_bytes, ways in by_size.items():
                    yield from _rows(letter, kind, num_bytes, variant, ways)

    return section


def _rows(
    letter: str, kind: CollectiveKind, num_bytes: int, variant: str, ways: Mapping[str, list[float]]
) -> Iterator[MicroBenchRow]:
    def row(case: str, unit: str, value: float) -> MicroBenchRow:
        return MicroBenchRow(letter, f"{kind.value}: {case}", num_bytes // KB, variant, unit, round(value, 6))

    for way in (*WAYS[kind], AUTO, BF16, INT8, COPY_WHOLE, COPY_SLOT):
        if way in ways:
            yield row(way, "us", 1e6 * statistics.median(ways[way]))
    for case, way in ((BESIDE_GLOO, TORCH), (BESIDE_COPY, COPY_WHOLE), (BESIDE_SLOT, COPY_SLOT)):
        if way in ways:
            ratios = [other / own for other, own in zip(ways[way], ways[AUTO], strict=True)]
            yield row(case, "x", statistics.median(ratios))
    factor = bus_factor(kind, WORLD_SIZES[variant])
    yield row(BUS, "GB/s", factor * num_bytes / statistics.median(ways[AUTO]) / 1e9)


BENCHMARK = MicroBenchmark(
    "collectives",
    lambda: ["2"],
    _check_ranks,
    {
        "r": _section("r", CollectiveKind.ALL_REDUCE),
        "o": _section("o", *(kind for kind in WAYS if kind is not CollectiveKind.ALL_REDUCE)),
    },
)
