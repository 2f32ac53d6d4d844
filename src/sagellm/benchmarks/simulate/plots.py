"""Plots of simulations as PNG files. matplotlib is imported where it draws, without a display."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sagellm.benchmarks.simulate.course import Course
from sagellm.benchmarks.simulate.metrics import LatencyColumns, SLOPair
from sagellm.benchmarks.simulate.outputs import check_folder
from sagellm.benchmarks.simulate.simulation import SimulationResult
from sagellm.core.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 120
EXTRA = "plots"
COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bb5566", "#004488")
STYLES = ("-", "--", ":", "-.")
PANELS = {
    "ttft_s": "time to first token, s",
    "tpot_s": "time per output token, s",
    "e2e_s": "end to end, s",
}
MOST_POINTS = 2000
"""Of a line over time; a longer one is thinned."""


def check_plots(folder: Path) -> None:
    """Raise now what `draw` would raise after the simulation: `ConfigError`, `MissingExtraError`."""
    _figure(1, 1)
    check_folder(folder)


def draw(folder: Path, results: Sequence[SimulationResult], slos: Sequence[SLOPair]) -> list[Path]:
    """The files written, a set for each trace: latency_cdf and timeline at its highest rate; where there are
    several rates, goodput."""
    paths = []
    traces = list(dict.fromkeys(one.workload.trace.name for one in results))
    for trace in traces:
        own = [one for one in results if one.workload.trace.name == trace]
        fastest = max(one.workload.rate for one in own)
        shown = [one for one in own if one.workload.rate == fastest]
        made = {"latency_cdf": latency_cdf(shown), "timeline": timeline(shown)}
        if len({one.workload.rate for one in own}) > 1 and slos:
            made["goodput"] = goodput(own, slos)
        prefix = f"{trace}_" if len(traces) > 1 else ""
        paths += [_save(folder / f"{prefix}{name}.png", figure) for name, figure in made.items()]
    return paths


def _save(path: Path, figure: Figure) -> Path:
    try:
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, dpi=DPI, metadata={"Software": None})
    except OSError as error:
        raise ConfigError(f"cannot draw into {path.parent}: {error.strerror}") from error
    return path


def latency_cdf(results: Sequence[SimulationResult]) -> Figure:
    """The share of finished requests at or under each latency: TTFT, TPOT, E2E; a line per preset."""
    figure = _figure(10.5, 3.8)
    grid = figure.subplots(1, len(PANELS), sharey=True)
    for axes, (name, label) in zip(grid, PANELS.items(), strict=True):
        for number, one in enumerate(results):
            values = getattr(LatencyColumns.of(one.served, one.workload), name)
            values = np.sort(values[~np.isnan(values)])
            shares = 100 * np.arange(1, len(values) + 1) / max(len(values), 1)
            keep = _thin(len(values))
            axes.plot(values[keep], shares[keep], label=one.preset, **_line(number))
        axes.set_xlabel(label)
        _by_magnitude(axes)
    grid[0].set_ylabel("requests, %")
    _title(figure, results)
    grid[-1].legend(frameon=False, fontsize=8, loc="lower right")
    return figure


def _by_magnitude(axes: Axes) -> None:
    """A logarithmic axis, where there are values to spread."""
    low, high = axes.dataLim.intervalx
    if 0 < low * 1.001 < high < np.inf:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")


def timeline(results: Sequence[SimulationResult]) -> Figure:
    """Over time, a column per preset: requests running and waiting, tokens per step, KV blocks. Each instance
    has lines of its own."""
    figure = _figure(1.5 + 4.2 * len(results), 6.4)
    grid = figure.subplots(3, len(results), sharex="col", sharey="row", squeeze=False)
    for column, one in enumerate(results):
        for number, (name, course) in enumerate(one.courses.items()):
            _draw_course(grid[:, column], course, name, number, several=len(one.courses) > 1)
        grid[0, column].set_title(one.preset, loc="left", fontsize=9)
        grid[-1, column].set_xlabel("seconds")
    for axes, label in zip(grid[:, 0], ("requests", "tokens in a step", "KV blocks"), strict=True):
        axes.set_ylabel(label)
    for axes in grid[:, -1]:
        axes.legend(frameon=False, fontsize=7, loc="upper right")
    _title(figure, results)
    return figure


def _draw_course(grid: np.ndarray, course: Course, name: str, number: int, *, several: bool) -> None:
    ends = np.frombuffer(course.ends_s, np.float64)
    keep, prefix = _thin(len(ends)), f"{name} " if several else ""
    tokens = np.frombuffer(course.prefill_tokens, np.int64) + np.frombuffer(course.decode_tokens, np.int64)
    running = np.frombuffer(course.running, np.int64)
    waiting = np.frombuffer(course.waiting, np.int64)
    seen = np.frombuffer(course.kv_steps, np.int64)
    active = np.frombuffer(course.kv_active, np.int64)
    cached = np.frombuffer(course.kv_cached, np.int64)
    some = _thin(len(seen))
    one, other = COLORS[2 * number % len(COLORS)], COLORS[(2 * number + 1) % len(COLORS)]
    thin = {"linewidth": 0.9}
    grid[0].plot(ends[keep], running[keep], label=f"{prefix}running", color=one, **thin)
    grid[0].plot(ends[keep], waiting[keep], label=f"{prefix}waiting", color=other, **thin)
    grid[1].plot(ends[keep], tokens[keep], ".", ms=1.5, label=f"{prefix}tokens", color=one)
    grid[2].plot(ends[seen][some], active[some], label=f"{prefix}in use", color=one, **thin)
    grid[2].plot(ends[seen][some], (active + cached)[some], label=f"{prefix}and cached", color=other, **thin)


def goodput(results: Sequence[SimulationResult], slos: Sequence[SLOPair]) -> Figure:
    """Requests per second that met an SLO pair, by the rate of arrivals: a panel per pair, a line per
    preset."""
    figure = _figure(1.5 + 3.4 * len(slos), 3.8)
    grid = figure.subplots(1, len(slos), squeeze=False)[0]
    for axes, slo in zip(grid, slos, strict=True):
        for number, preset in enumerate(dict.fromkeys(one.preset for one in results)):
            own = sorted((one for one in results if one.preset == preset), key=lambda one: one.workload.rate)
            met = [one.figures[f"goodput_{slo.name}"] or 0.0 for one in own]
            axes.plot(
                [one.workload.rate for one in own], met, marker="o", ms=3.5, label=preset, **_line(number)
            )
        axes.set_title(f"TTFT {slo.ttft_s:g} s, TPOT {slo.tpot_ms:g} ms", loc="left", fontsize=9)
        axes.set_xlabel("arrivals per second")
        _from_zero(axes)
    grid[0].set_ylabel("requests per second that meet both")
    grid[-1].legend(frameon=False, fontsize=8)
    figure.suptitle(results[0].workload.trace.name, x=0.01, ha="left")
    return figure


def _from_zero(axes: Axes) -> None:
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)


def _title(figure: Figure, results: Sequence[SimulationResult]) -> None:
    work = results[0].workload
    figure.suptitle(f"{work.trace.name}: {work.rate:.3g} requests per second", x=0.01, ha="left")


def _line(number: int) -> dict[str, str]:
    return {"color": COLORS[number % len(COLORS)], "linestyle": STYLES[number // len(COLORS) % len(STYLES)]}


def _thin(count: int) -> np.ndarray:
    """At most `MOST_POINTS` places, the first and the last among them."""
    return np.unique(np.linspace(0, max(count - 1, 0), min(count, MOST_POINTS)).astype(np.int64))


def _figure(width: float, height: float) -> Figure:
    """An empty one, of so many inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("drawing plots", EXTRA) from error
    return Figure(figsize=(width, height), layout="constrained")
