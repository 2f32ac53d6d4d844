"""Draws plots of simulations as PNG files; needs no display."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sagellm.benchmarks.reporting import PLOT_COLORS, new_figure, save_figures
from sagellm.benchmarks.simulate.instance import StepLog
from sagellm.benchmarks.simulate.metrics import SLOPair, finished, latencies
from sagellm.benchmarks.simulate.outputs import check_writable_folder
from sagellm.benchmarks.simulate.simulation import SimulationResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


STYLES = ("-", "--", ":", "-.")
PANELS = {
    "ttft_s": "time to first token, s",
    "tpot_s": "time per output token, s",
    "e2e_s": "end to end, s",
}
MOST_POINTS = 2000
"""The limit for a line over time; longer lines are thinned."""


def check_plots(folder: Path) -> None:
    """Raises, before the simulation, the `ConfigError` or `MissingExtraError` of `draw`."""
    new_figure(1, 1)
    check_writable_folder(folder)


def draw(folder: Path, results: Sequence[SimulationResult], slos: Sequence[SLOPair]) -> list[Path]:
    """Draws a set for each trace; returns the files written. A set is latency_cdf and timeline at the
    trace's highest rate and, if there are several rates, goodput."""
    paths = []
    traces = list(dict.fromkeys(result.workload.trace.name for result in results))
    for trace in traces:
        own = [result for result in results if result.workload.trace.name == trace]
        fastest = max(result.workload.rate for result in own)
        shown = [result for result in own if result.workload.rate == fastest]
        made = {"latency_cdf": latency_cdf(shown), "timeline": timeline(shown)}
        if len({result.workload.rate for result in own}) > 1 and slos:
            made["goodput"] = goodput(own, slos)
        prefix = f"{trace}_" if len(traces) > 1 else ""
        paths += save_figures(folder, {prefix + name: figure for name, figure in made.items()})
    return paths


def latency_cdf(results: Sequence[SimulationResult]) -> Figure:
    """Share of finished requests at or under each TTFT, TPOT and E2E. A line per preset."""
    figure = new_figure(10.5, 3.8)
    grid = figure.subplots(1, len(PANELS), sharey=True)
    for axes, (name, label) in zip(grid, PANELS.items(), strict=True):
        for number, result in enumerate(results):
            values = latencies(finished(result.served), name)
            values = np.sort(values[~np.isnan(values)])
            shares = 100 * np.arange(1, len(values) + 1) / max(len(values), 1)
            keep = _thin(len(values))
            axes.plot(values[keep], shares[keep], label=result.preset, **_line(number))
        axes.set_xlabel(label)
        _by_magnitude(axes)
    grid[0].set_ylabel("requests, %")
    _title(figure, results)
    grid[-1].legend(frameon=False, fontsize=8, loc="lower right")
    return figure


def _by_magnitude(axes: Axes) -> None:
    """Sets a logarithmic axis if the values differ."""
    low, high = axes.dataLim.intervalx
    if 0 < low * 1.001 < high < np.inf:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")


def timeline(results: Sequence[SimulationResult]) -> Figure:
    """Running and waiting requests, tokens per step and KV blocks over time. Each preset is a column. Each
    instance has lines of its own."""
    figure = new_figure(1.5 + 4.2 * len(results), 6.4)
    grid = figure.subplots(3, len(results), sharex="col", sharey="row", squeeze=False)
    for column, result in enumerate(results):
        for number, (name, step_log) in enumerate(result.step_logs.items()):
            _draw_steps(grid[:, column], step_log, name, number, several=len(result.step_logs) > 1)
        grid[0, column].set_title(result.preset, loc="left", fontsize=9)
        grid[-1, column].set_xlabel("seconds")
    for axes, label in zip(grid[:, 0], ("requests", "tokens in a step", "KV blocks"), strict=True):
        axes.set_ylabel(label)
    for axes in grid[:, -1]:
        axes.legend(frameon=False, fontsize=7, loc="upper right")
    _title(figure, results)
    return figure


def _draw_steps(grid: np.ndarray, step_log: StepLog, name: str, number: int, *, several: bool) -> None:
    ends, prefix = np.asarray(step_log.ends_s), f"{name} " if several else ""
    keep, sampled = _thin(len(ends)), _thin(len(step_log.kv_steps))
    kv_ends = ends[np.asarray(step_log.kv_steps)]
    active = np.asarray(step_log.kv_active)
    resident = active + np.asarray(step_log.kv_cached)
    color, other_color = (PLOT_COLORS[(2 * number + half) % len(PLOT_COLORS)] for half in (0, 1))
    for axes, times, chosen, values, label, line_color in (
        (grid[0], ends, keep, np.asarray(step_log.running), "running", color),
        (grid[0], ends, keep, np.asarray(step_log.waiting), "waiting", other_color),
        (grid[2], kv_ends, sampled, active, "in use", color),
        (grid[2], kv_ends, sampled, resident, "and cached", other_color),
    ):
        axes.plot(times[chosen], values[chosen], label=f"{prefix}{label}", color=line_color, linewidth=0.9)
    grid[1].plot(ends[keep], step_log.num_tokens()[keep], ".", ms=1.5, label=f"{prefix}tokens", color=color)


def goodput(results: Sequence[SimulationResult], slos: Sequence[SLOPair]) -> Figure:
    """Requests per second that met an SLO pair, by arrival rate. A panel per pair, a line per preset."""
    figure = new_figure(1.5 + 3.4 * len(slos), 3.8)
    grid = figure.subplots(1, len(slos), squeeze=False)[0]
    for axes, slo in zip(grid, slos, strict=True):
        for number, preset in enumerate(dict.fromkeys(result.preset for result in results)):
            own = sorted(
                (result for result in results if result.preset == preset),
                key=lambda result: result.workload.rate,
            )
            met = [result.figures[f"goodput_{slo.name}"] or 0.0 for result in own]
            axes.plot(
                [result.workload.rate for result in own],
                met,
                marker="o",
                ms=3.5,
                label=preset,
                **_line(number),
            )
        axes.set_title(f"TTFT {slo.ttft_s:g} s, TPOT {slo.tpot_ms:g} ms", loc="left", fontsize=9)
        axes.set_xlabel("arrivals per second")
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
    grid[0].set_ylabel("requests per second that meet both")
    grid[-1].legend(frameon=False, fontsize=8)
    figure.suptitle(results[0].workload.trace.name, x=0.01, ha="left")
    return figure


def _title(figure: Figure, results: Sequence[SimulationResult]) -> None:
    work = results[0].workload
    figure.suptitle(f"{work.trace.name}: {work.rate:.3g} requests per second", x=0.01, ha="left")


def _line(number: int) -> dict[str, str]:
    return {
        "color": PLOT_COLORS[number % len(PLOT_COLORS)],
        "linestyle": STYLES[number // len(PLOT_COLORS) % len(STYLES)],
    }


def _thin(count: int) -> np.ndarray:
    """Returns at most `MOST_POINTS` indexes, the first and the last among them."""
    return np.unique(np.linspace(0, max(count - 1, 0), min(count, MOST_POINTS)).astype(np.int64))
