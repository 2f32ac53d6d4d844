"""The page of `sagellm watch`: a `WatchReport` as one HTML file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

from sagellm.core.blocks import cdiv
from sagellm.diagnostics.pages import render_page
from sagellm.diagnostics.watch.report import UNLIMITED, Curve, MissedTokens, Rung, WatchReport

POLICY_NAMES = {
    "server": "now",
    "lru": "LRU",
    "adaptive": "adaptive",
    "optimum": "offline optimum",
    "routing": "perfect routing",
}
COLORS = ("lru", "adaptive", "optimum", "server", "routing")
"""The place of a policy is the number of its colour."""
MISSES = {
    "never_seen": ("never seen", "no cache could have had them"),
    "evicted": ("evicted", "they were cached and had to make room"),
    "not_aligned": ("not aligned", "equal to seen tokens into a block; only whole blocks are shared"),
    "other_namespace": ("other namespace", "seen under another salt or adapter"),
    "unknown": ("unknown", "the events do not tell"),
}  # fmt: skip
GIB = 2**30


def render(report: WatchReport) -> str:
    """The whole page. It holds no text of prompts, unless the report does."""
    return render_page(
        "watch.html.jinja",
        report=report,
        name=_name(report),
        duration=duration(report.duration_s),
        began=datetime.fromtimestamp(report.began_s, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        events=f"{sum(instance.num_block_events for instance in report.instances):,}",
        groups=_groups(report.ladder),
        plot=_plot(report) if any(curve.points for curve in report.curves) else None,
        misses=list(_misses(report.missed)),
        gaps=_gaps(report),
        prefixes=[
            {
                "digest": prefix.digest,
                "text": prefix.text,
                "tokens": f"{prefix.num_tokens:,}",
                "evictions": f"{prefix.num_evictions:,}",
                "recomputed": f"{prefix.num_recomputed_tokens:,}",
            }
            for prefix in report.prefixes
        ],
        instances=[_instance(instance) for instance in report.instances],
        coverage=None if report.coverage is None else f"{100 * report.coverage:.1f} %",
        shows_text=any(prefix.text is not None for prefix in report.prefixes),
    )


def rung_name(rung: Rung) -> str:
    """`LRU, double memory`: what a rung is, for people."""
    policy = POLICY_NAMES.get(rung.policy, rung.policy)
    if rung.capacity == UNLIMITED:
        return f"{policy}, unlimited memory"
    memory = {1.0: "", 0.5: ", half the memory", 2.0: ", double memory"}
    return policy + memory.get(rung.capacity, f", {rung.capacity:g} times the memory")


def duration(seconds: float) -> str:
    """`1 h 5 min`, `12 min`, `42 s`, `0.5 s`."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, left = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours / 24:.3g} days"
    return f"{hours} h {left} min" if left else f"{hours} h"


def _name(report: WatchReport) -> str:
    models = sorted({instance.model for instance in report.instances if instance.model})
    if models:
        return ", ".join(models)
    return ", ".join(instance.endpoint for instance in report.instances) or "no server"


def _groups(ladder: Sequence[Rung]) -> list[dict[str, Any]]:
    titles = {"same": "The same memory", "other": "Other memory", "fleet": "The whole fleet"}
    by_title: dict[str, list[dict[str, Any]]] = {title: [] for title in titles.values()}
    for rung in ladder:
        place = "fleet" if rung.policy == "routing" else "same" if rung.capacity == 1.0 else "other"
        by_title[titles[place]].append(
            {
                "name": rung_name(rung),
                "is_now": rung.policy == "server",
                "percent": None if rung.hit_ratio is None else f"{100 * rung.hit_ratio:.1f}",
                "basis": rung.basis.value,
                "missing": rung.missing,
            }
        )
    return [{"title": title, "rungs": rungs} for title, rungs in by_title.items() if rungs]


def _plot(report: WatchReport) -> dict[str, Any]:
    """Lines in a square of 100 by 100, capacities on a logarithmic scale."""
    curves = [curve for curve in report.curves if curve.points]
    blocks = sorted({num for curve in curves for num, _ in curve.points})
    low, high = math.log(max(1, blocks[0])), math.log(max(2, blocks[-1]))
    span = max(high - low, 1e-9)

    def left(num_blocks: float) -> float:
        return round(100 * (math.log(max(1, num_blocks)) - low) / span, 2)

    now_blocks = _sum(instance.num_blocks for instance in report.instances)
    now = next((r for r in report.ladder if r.policy == "server" and r.hit_ratio is not None), None)
    is_on_plot = now_blocks is not None and blocks[0] <= now_blocks <= blocks[-1]
    return {
        "curves": [
            {
                "name": POLICY_NAMES.get(curve.policy, curve.policy),
                "basis": curve.basis.value,
                "color": COLORS.index(curve.policy) if curve.policy in COLORS else 4,
                "path": "M" + "L".join(f"{left(num)} {100 - 100 * ratio:.2f}" for num, ratio in curve.points),
            }
            for curve in curves
        ],
        "ticks": [{"left": left(num), "text": text} for num, text in _ticks(report, blocks, now_blocks)],
        "axis": "KV memory",
        "here": {"left": left(now_blocks), "bottom": round(100 * (now.hit_ratio or 0.0), 2)}
        if now is not None and now_blocks is not None and is_on_plot
        else None,
        "rows": [[f"{num:,}", *(_value_at(curve, num) for curve in curves)] for num in blocks],
    }


def _ticks(report: WatchReport, blocks: Sequence[int], now_blocks: int | None) -> Iterator[tuple[int, str]]:
    """At most six capacities, as GiB, as factors on today's memory, or blocks.

    Today's is among them if the curves have it.
    """
    sizes = {instance.bytes_per_block for instance in report.instances}
    size = sizes.pop() if len(sizes) == 1 else None
    step = cdiv(len(blocks), 6)
    first = blocks.index(now_blocks) % step if now_blocks in blocks else 0
    for num_blocks in blocks[first::step]:
        if size:
            yield num_blocks, f"{num_blocks * size / GIB:.3g} GiB"
        elif now_blocks:
            yield num_blocks, f"{num_blocks / now_blocks:.3g} x"
        else:
            yield num_blocks, f"{num_blocks:,} blocks"


def _value_at(curve: Curve, num_blocks: int) -> str:
    value = dict(curve.points).get(num_blocks)
    return "" if value is None else f"{100 * value:.1f} %"


def _misses(missed: MissedTokens) -> Iterator[dict[str, str]]:
    counts = {field.name: getattr(missed, field.name) for field in fields(missed)}
    total = sum(counts.values())
    for cause, (name, meaning) in MISSES.items():
        if counts[cause]:
            percent = f"{100 * counts[cause] / total:.1f}"
            yield {"name": name, "meaning": meaning, "percent": percent, "tokens": f"{counts[cause]:,}"}


def _gaps(report: WatchReport) -> list[dict[str, str]]:
    counts, ends = report.gaps.counts, report.gaps.ends_s
    most = max(counts, default=0)
    if not most:
        return []
    return [
        {
            "percent": f"{100 * count / most:.1f}",
            "count": f"{count:,}",
            "end": "more" if end == UNLIMITED else duration(end),
        }
        for count, end in zip(counts, ends, strict=True)
    ]


def _instance(instance: Any) -> dict[str, str]:
    shown = {field.name: getattr(instance, field.name) for field in fields(instance)}
    texts = {
        name: "?" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
        for name, value in shown.items()
    }
    return texts | {"hit_ratio": "?" if instance.hit_ratio is None else f"{100 * instance.hit_ratio:.1f} %"}


def _sum(values: Iterator[int | None]) -> int | None:
    known = list(values)
    return None if None in known else sum(number for number in known if number is not None)
