"""Draws plots of a sweep as PNG files; needs no display."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sagellm.benchmarks.replay.block_trace import BlockTrace
from sagellm.benchmarks.replay.outputs import CAUSES
from sagellm.benchmarks.replay.sweep import NUM_MOMENTS, OPTIMUM, CacheCapacity, ReplayResult
from sagellm.benchmarks.reporting import PLOT_COLORS, check_folder, new_figure, save_figures
from sagellm.core.types import Namespace

if TYPE_CHECKING:
    from matplotlib.figure import Figure


GREY, INK = "#8a8a8a", "#222222"
CAUSE_COLORS = ("#c9c9c9", "#4477aa", "#ee6677", "#ccbb44", "#aa3377", "#66ccee")
"""In the order of `CAUSES`; grey are blocks that no cache could have had."""
LINE_STYLES = ("-", "--", ":")
NUM_BINS = 40


def check_plots(folder: Path) -> None:
    """Raises, before the sweep, the `ConfigError` or `MissingExtraError` of `draw`."""
    new_figure(1, 1)
    check_folder(folder, "draw")


def draw(folder: Path, trace: BlockTrace, results: Sequence[ReplayResult]) -> list[Path]:
    """Draws miss_ratio, heat_map, reuse_time and, if causes were asked for, miss_causes. Returns the files
    written."""
    made = {
        "miss_ratio": miss_ratio(trace, results),
        "heat_map": heat_map(trace, results),
        "reuse_time": reuse_time(trace),
    }
    if any(result.misses_over_time for result in results):
        made["miss_causes"] = miss_causes(trace, results)
    return save_figures(folder, made)


def miss_ratio(trace: BlockTrace, results: Sequence[ReplayResult]) -> Figure:
    """Missed blocks by capacity, one line per policy. Of several seeds the mean and range."""
    figure = new_figure(7.0, 4.2)
    axes = figure.subplots()
    percents = _hit_percents(results)
    colors = iter(range(len(results)))
    for policy in _policies(results):
        capacities = [size for size in _capacities(results) if (policy, size) in percents]
        shares = [100 * size.num_blocks / trace.num_unique for size in capacities]
        missed = [[100 - value for value in percents[policy, size]] for size in capacities]
        style: dict[str, Any] = {"color": INK, "linestyle": "--"}
        if policy != OPTIMUM:
            number = next(colors)
            style = {
                "color": PLOT_COLORS[number % len(PLOT_COLORS)],
                "linestyle": LINE_STYLES[number // len(PLOT_COLORS) % len(LINE_STYLES)],
            }
        axes.plot(
            shares, [sum(some) / len(some) for some in missed], marker="o", ms=3.5, label=policy, **style
        )
        if any(len(some) > 1 for some in missed):
            axes.fill_between(
                shares, list(map(min, missed)), list(map(max, missed)), alpha=0.15, color=style["color"]
            )
    bound = 100 * (1 - trace.infinite_ratio)
    axes.axhline(bound, color=GREY, linewidth=1, linestyle=":", label="never evicts")
    ticks = [100 * size.num_blocks / trace.num_unique for size in _capacities(results)]
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{share:.3g}" for share in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("capacity, % of unique blocks")
    axes.set_ylabel("missed blocks, %")
    axes.set_title(trace.name, loc="left")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def heat_map(trace: BlockTrace, results: Sequence[ReplayResult]) -> Figure:
    """Hit blocks in %, policies by capacities; the mean over seeds."""
    policies, capacities, percents = _policies(results), _capacities(results), _hit_percents(results)
    values = np.array(
        [[np.mean(percents.get((policy, size), np.nan)) for size in capacities] for policy in policies]
    )
    figure = new_figure(2.6 + 0.8 * len(capacities), 1.4 + 0.36 * len(policies))
    axes = figure.subplots()
    axes.imshow(values, cmap="Blues", aspect="auto", vmin=0.0)
    middle = float(np.nanmax(values)) * 0.6
    for (row, column), value in np.ndenumerate(values):
        color = "white" if value > middle else INK
        axes.text(column, row, f"{value:.1f}", ha="center", va="center", fontsize=8, color=color)
    axes.set_xticks(range(len(capacities)), [size.text for size in capacities])
    axes.set_yticks(range(len(policies)), policies)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("capacity")
    axes.set_title(f"{trace.name}: hit blocks, %", loc="left")
    return figure


def reuse_time(trace: BlockTrace) -> Figure:
    """Time to the next use of a block, over uses that caches could serve."""
    figure = new_figure(7.0, 3.6)
    axes = figure.subplots()
    seconds = np.maximum(np.frombuffer(reuse_times(trace), dtype=np.float64), 1e-3)
    axes.set_title(f"{trace.name}: time from use to next use", loc="left")
    axes.set_xlabel("seconds")
    axes.set_ylabel("uses, %")
    if len(seconds):
        edges = np.geomspace(seconds.min(), seconds.max() * 1.001, NUM_BINS + 1)
        axes.hist(
            seconds, edges.tolist(), weights=np.full(len(seconds), 100 / len(seconds)), color=PLOT_COLORS[0]
        )
        axes.set_xscale("log")
        middle = float(np.median(seconds))
        axes.axvline(middle, color=INK, linewidth=1, linestyle="--", label=f"median {middle:.3g} s")
        axes.legend(frameon=False, fontsize=8)
    return figure


def reuse_times(trace: BlockTrace) -> array[float]:
    """Seconds since the last use, of every block that an infinite cache would have."""
    used: dict[Namespace, dict[int, float]] = {}
    seconds = array("d")
    for request, found in zip(trace.requests, trace.bound, strict=True):
        known, now_s = used.setdefault(request.namespace, {}), request.time_s
        seconds.extend(now_s - known[block] for block in request.ids.slice(0, found))
        known.update(dict.fromkeys(request.ids, now_s))
    return seconds


def miss_causes(trace: BlockTrace, results: Sequence[ReplayResult]) -> Figure:
    """Why blocks were missing, over time: a panel per policy, at the middle capacity."""
    shown = [result for result in results if result.misses_over_time]
    sizes = _capacities(shown)
    size = sizes[(len(sizes) - 1) // 2]
    panels = {result.case.policy: result for result in reversed(shown) if result.case.capacity == size}
    names = [name for name in _policies(shown) if name in panels]
    happened = np.sum([result.misses for result in shown if result.misses], axis=0) > 0
    labels = [cause for cause, some in zip(CAUSES, happened, strict=True) if some]
    colors = [color for color, some in zip(CAUSE_COLORS, happened, strict=True) if some]
    figure = new_figure(7.0, 1.2 + 1.5 * len(names))
    grid = figure.subplots(len(names), 1, sharex=True, sharey=True, squeeze=False)
    borders = np.linspace(trace.requests[0].time_s, trace.requests[-1].time_s, NUM_MOMENTS + 1)
    for axes, name in zip(grid[:, 0], names, strict=True):
        moments = panels[name].misses_over_time
        missed = np.array([*moments, moments[-1]]).T[happened]  # draws the last interval to the end
        axes.stackplot(borders, *missed, labels=labels, colors=colors, step="post")
        axes.set_title(f"{name}, {size.text}", loc="left", fontsize=9)
        axes.set_ylabel("blocks", fontsize=8)
    grid[-1, 0].set_xlabel("seconds of the trace")
    figure.suptitle(f"{trace.name}: why blocks were missing", x=0.01, ha="left")
    handles = grid[0, 0].get_legend_handles_labels()[0]
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)
    return figure


def _policies(results: Sequence[ReplayResult]) -> list[str]:
    return list(dict.fromkeys(result.case.policy for result in results))


def _capacities(results: Sequence[ReplayResult]) -> list[CacheCapacity]:
    return sorted({result.case.capacity for result in results}, key=lambda size: size.num_blocks)


def _hit_percents(results: Sequence[ReplayResult]) -> dict[tuple[str, CacheCapacity], list[float]]:
    """Hit blocks in % by policy and capacity, one figure per seed."""
    percents: dict[tuple[str, CacheCapacity], list[float]] = {}
    for result in results:
        place = result.case.policy, result.case.capacity
        percents.setdefault(place, []).append(100 * result.block_ratio)
    return percents
