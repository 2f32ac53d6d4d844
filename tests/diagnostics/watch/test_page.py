"""The page of `sagellm watch`: complete, escaped, and alone."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from sagellm.diagnostics.watch.page import duration, render, rung_name
from sagellm.diagnostics.watch.report import (
    UNLIMITED,
    Advice,
    Basis,
    Curve,
    EvictedPrefix,
    InstanceReport,
    MissedTokens,
    ReuseGaps,
    Rung,
    WatchReport,
)

INSTANCE = InstanceReport(
    endpoint="tcp://server:5557",
    metrics_url="http://server:8000/metrics",
    engine="vLLM",
    model="llama",
    block_size=16,
    num_blocks=1000,
    bytes_per_block=2**21,
    num_batches=10,
    num_events=20,
    num_block_events=12_345,
    num_lost=1,
    num_repaired=2,
    num_restarts=0,
    num_malformed=0,
    num_cached=900,
    hit_ratio=0.5,
    num_queried_tokens=1000,
    num_hit_tokens=500,
)
REPORT = WatchReport(
    began_s=0.0,
    duration_s=600.0,
    instances=(INSTANCE,),
    ladder=(
        Rung("server", 1.0, 0.5, Basis.COUNTERS),
        Rung("adaptive", 1.0, None, Basis.REQUESTS, "run with --proxy"),
        Rung("lru", 2.0, 0.625, Basis.EVENTS),
        Rung("lru", UNLIMITED, 0.75, Basis.EVENTS),
        Rung("routing", 1.0, 0.55, Basis.EVENTS),
    ),
    curves=(Curve("lru", Basis.EVENTS, ((1000, 0.5), (2000, 0.625), (4000, 0.7))),),
    missed=MissedTokens(never_seen=300, evicted=100),
    gaps=ReuseGaps((1.0, 60.0, UNLIMITED), (1, 4, 2), "uses of evicted blocks"),
    prefixes=(EvictedPrefix("0a1b2c", 512, 3, 1536),),
    coverage=0.99,
    unknown=("Hits are not reported.",),
    advice=(Advice("+2 GiB: +12.5 points", 12.5),),
)
NOTHING = WatchReport(0.0, 0.0, (), (), (), MissedTokens(), ReuseGaps((), (), ""), (), None, (), ())


class Tags(HTMLParser):
    """Checks that elements close in order, and collects the text."""

    VOID = frozenset(("meta", "br", "path"))

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.stack or self.stack[-1] != "style":
            self.texts.append(data)


def text_of(page: str) -> str:
    tags = Tags()
    tags.feed(page)
    tags.close()
    assert tags.stack == []
    return re.sub(r"\s+", " ", " ".join(tags.texts))


def test_everything_that_was_found_is_shown() -> None:
    text = text_of(render(REPORT))
    for shown in (
        "KV cache of llama", "10 min", "12,345 block events from 1 instance", "+2 GiB: +12.5 points", "now",
        "50.0 %", "run with --proxy", "LRU, double memory", "62.5 %", "LRU, unlimited memory", "75.0 %",
        "perfect routing",
        "never seen", "300 tokens", "evicted", "25.0 %", "uses of evicted blocks", "0a1b2c", "1,536",
        "tcp://server:5557", "Hits are not reported.", "99.0 %", "you are here", "1.95 GiB",
    ):  # fmt: skip
        assert shown in text, shown


def test_a_report_without_anything_is_a_page_too() -> None:
    text = text_of(render(NOTHING))
    assert "No advice: too little was seen." in text
    assert "No prompt token had to be computed." in text
    assert "No block was used twice." in text


def test_texts_are_escaped() -> None:
    evil = "<script>alert(1)</script> &amp; \"'"
    report = replace(
        REPORT,
        instances=(replace(INSTANCE, model=evil, endpoint=evil, engine=evil),),
        ladder=(Rung(evil, 1.0, None, Basis.EVENTS, evil),),
        curves=(Curve(evil, Basis.EVENTS, ((1, 0.0), (2, 1.0))),),
        prefixes=(EvictedPrefix(evil, 1, 1, 1, evil),),
        unknown=(evil,),
        advice=(Advice(evil, 0.0),),
        gaps=replace(REPORT.gaps, of=evil),
    )
    page = render(report)
    assert "<script" not in page
    assert text_of(page).count("<script>alert(1)</script> &amp; \"'") >= 8


def test_the_page_loads_nothing() -> None:
    page = render(REPORT)
    assert "default-src 'none'" in page
    assert not re.findall(r"(?:src|href|url\()\s*=?\s*[\"']?(?:https?:)?//", page)


def test_it_says_whether_it_holds_text_of_prompts() -> None:
    assert "It holds no text of a prompt." in text_of(render(REPORT))
    told = replace(REPORT, prefixes=(EvictedPrefix("0a", 1, 1, 1, "You are"),))
    assert "It holds no" not in text_of(render(told))


@pytest.mark.parametrize("points", [((5, 0.5),), ((1, 0.0), (1, 1.0)), ((0, 0.0), (10**12, 1.0))])
def test_odd_curves_are_drawn(points: tuple[tuple[int, float], ...]) -> None:
    page = render(replace(REPORT, curves=(Curve("lru", Basis.EVENTS, points),)))
    assert "nan" not in page
    assert "inf" not in page.replace("info", "")


def test_the_memory_of_today_is_on_the_axis() -> None:
    points = tuple((250 * (i + 1), 0.5) for i in range(8))
    instance = replace(INSTANCE, num_blocks=1000, bytes_per_block=None)
    page = render(replace(REPORT, instances=(instance,), curves=(Curve("lru", Basis.EVENTS, points),)))
    assert re.findall(r"[\d.]+ x\b", page) == ["0.5 x", "1 x", "1.5 x", "2 x"]


def test_without_bytes_the_axis_has_factors_and_without_blocks_block_counts() -> None:
    bare = replace(INSTANCE, bytes_per_block=None)
    assert "2 x" in text_of(render(replace(REPORT, instances=(bare,))))
    unknown = replace(bare, num_blocks=None)
    text = text_of(render(replace(REPORT, instances=(unknown,))))
    assert "2,000 blocks" in text
    assert "you are here" not in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.5, "0.5 s"),
        (42, "42 s"),
        (600, "10 min"),
        (3600, "1 h"),
        (3900, "1 h 5 min"),
        (216_000, "2.5 days"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_names_of_rungs() -> None:
    assert rung_name(Rung("server", 1.0, None, Basis.COUNTERS)) == "now"
    assert rung_name(Rung("lru", 0.5, None, Basis.REQUESTS)) == "LRU, half the memory"
    assert rung_name(Rung("optimum", 3.0, None, Basis.REQUESTS)) == "offline optimum, 3 times the memory"
