"""The terminal's view of a `WatchReport`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple

from sagellm.benchmarks.reporting import Table
from sagellm.diagnostics.watch.page import MISSES, duration, rung_name
from sagellm.diagnostics.watch.report import InstanceReport, WatchReport

BAR_CHARACTERS = 24
SERVER_COLUMNS = ("server", "engine", "KV blocks", "cached", "hit rate", "block events", "lost batches")


def tables(report: WatchReport) -> Iterator[Table]:
    """The ladder, the causes of misses, and the servers."""
    rows = [
        (
            rung_name(rung),
            "█" * round(BAR_CHARACTERS * (rung.hit_ratio or 0.0)),
            rung.missing or f"from {rung.basis.value}",
            _percent(rung.hit_ratio),
        )
        for rung in report.ladder
    ]
    title = f"hit-rate ladder after {duration(report.duration_s)}"
    yield Table(title, ("rung", "", "", "hit rate"), rows, num_names=3)
    total = sum(astuple(report.missed))
    causes = [
        (name, meaning, f"{tokens:,}", f"{100 * tokens / total:.1f} %")
        for (name, meaning), tokens in zip(MISSES.values(), astuple(report.missed), strict=True)
        if tokens
    ]
    if causes:
        columns = ("cause", "meaning", "tokens", "share")
        yield Table("why prompt tokens had to be computed", columns, causes, num_names=2)
    yield Table("servers", SERVER_COLUMNS, [_server(each) for each in report.instances], num_names=2)


def line(report: WatchReport) -> str:
    """The state in one line, for logs."""
    blocks = sum(each.num_block_events for each in report.instances)
    lost = sum(each.num_lost for each in report.instances)
    now = _percent(report.ladder[0].hit_ratio)
    return f"{duration(report.duration_s)}: hit rate {now}, {blocks:,} block events, {lost:,} lost batches"


def _server(instance: InstanceReport) -> tuple[str, ...]:
    return (
        instance.endpoint,
        instance.engine or "?",
        "?" if instance.num_blocks is None else f"{instance.num_blocks:,}",
        f"{instance.num_cached:,}",
        _percent(instance.hit_ratio),
        f"{instance.num_block_events:,}",
        f"{instance.num_lost:,}",
    )


def _percent(ratio: float | None) -> str:
    return "?" if ratio is None else f"{100 * ratio:.1f} %"
