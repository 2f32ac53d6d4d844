"""Ours and a peer's in turns, with a peer that is a small script."""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.console import Console

from sagellm.benchmarks.micro import prefix_cache
from sagellm.benchmarks.micro.cases import MicroBenchPlan, MicroBenchRow, Spread, Timing
from sagellm.benchmarks.micro.peers import (
    COMPARABLE,
    PEERS,
    MicroPeerRow,
    Peer,
    PeerError,
    compare,
    parse_peers,
)
from sagellm.benchmarks.micro.run import MicroBenchReport, run, tables
from sagellm.benchmarks.reporting import environment
from sagellm.core.errors import ConfigError

pytestmark = pytest.mark.usefixtures("no_collections")

SCRIPT = """
import json, os, pathlib, sys
name, out, _, sections, *quick = sys.argv[1:]
here = pathlib.Path(__file__).parent
with (here / "calls").open("a") as calls:
    print(name, sections, *quick, os.environ.get("BENCH_IMPL", "-"), file=calls)
print("measuring")
rows = [
    {"section": "b", "case": "miss lookup only (hashes ready)", "size": 64, "p50": 9.0, "cpu50": 8.0},
    {"section": "b", "case": "something that we do not have", "size": 64, "p50": 9.0, "cpu50": 8.0},
    {"section": "f", "case": "bytes/block RSS, 2048-token prompts", "size": 256, "p50": 300.0, "impl": "x"},
]
json.dump({"peer": name, "version": "1.2", "rows": rows}, open(out, "w"))
"""


def script(folder: Path, text: str = SCRIPT) -> Path:
    path = folder / "measure.py"
    path.write_text(text)
    return path


def peer(folder: Path, text: str = SCRIPT, name: str = "vllm") -> Peer:
    [made] = parse_peers([f"{name}={sys.executable}"], script(folder, text))
    return made


def report() -> MicroBenchReport:
    plan = MicroBenchPlan(("radix",), sizes=(64,), repeats=2)
    return MicroBenchReport("prefix_cache", environment(datetime(2026, 11, 20, tzinfo=UTC)), plan)


def test_ours_before_and_after_each_peer(tmp_path: Path) -> None:
    done = report()
    order: list[str] = []
    peers = [peer(tmp_path), peer(tmp_path)]
    run(prefix_cache.BENCHMARK, done, "b", peers=peers, quick=True, on_section=order.append)
    assert order == [f"section b: {who}" for who in ("radix", "vllm", "radix", "vllm", "radix")]
    assert (tmp_path / "calls").read_text() == "vllm b --quick -\n" * 2
    assert sorted({row.turn for row in done.rows}) == [0, 1, 2]
    assert [(row.peer, row.turn) for row in done.peer_rows] == [("vllm 1.2", turn) for turn in (0, 0, 1, 1)]
    comparisons = done.comparisons()
    assert [(one.ours, one.size, one.peer_value) for one in comparisons] == [(("miss",), 64, 8.0)] * 2
    assert all(one.ratio == pytest.approx(one.value / 8.0, abs=1e-3) for one in comparisons)
    ours, beside = tables(done)
    assert (len(ours.rows), len(beside.rows)) == (3, 2)
    narrow = Console(width=80)
    with narrow.capture() as captured:
        narrow.print(beside)
    assert "…" not in captured.get()
    assert {"ours", "drift", "peer's", "ratio", "radix", "miss"} <= set(captured.get().split())


def test_a_section_of_one_peer_can_have_variables_of_its_own(tmp_path: Path) -> None:
    [row] = peer(tmp_path, name="sglang").measure("f", quick=False)
    assert row == MicroPeerRow("sglang 1.2 x", "f", "bytes/block RSS, 2048-token prompts", 256, 300.0, 0)
    assert (tmp_path / "calls").read_text() == "sglang f Unified:rust\n"


def timed(case: str, value: float, turn: int, single: float) -> MicroBenchRow:
    spread = Spread(value, value, value, 0.0)
    timing = Timing(2, 100, spread, spread, single)
    return MicroBenchRow("a", case, 512, "radix", "us", value, timing, turn)


def test_a_comparison_adds_up_rows_and_shows_the_drift() -> None:
    rows = [
        timed(prefix_cache.ONE_EDGE, 1.0, 0, single=2.0),
        timed(prefix_cache.GATHER, 1.0, 0, single=3.0),
        timed(prefix_cache.ONE_EDGE, 1.0, 1, single=4.0),
        timed(prefix_cache.GATHER, 1.0, 1, single=6.0),
        timed(prefix_cache.ONE_EDGE, 99.0, 2, single=99.0),
    ]
    [one] = compare(
        rows, [MicroPeerRow("vllm 1.2", "a", "full_hit lookup only (hashes ready)", 512, 30.0, 0)]
    )
    assert one.ours == (prefix_cache.ONE_EDGE, prefix_cache.GATHER)
    assert (one.value, one.drift, one.ratio) == (7.5, round(5 / 7.5, 3), 0.25)


@pytest.mark.parametrize(("size", "case"), [(1024, "full_hit lookup only"), (512, "full_hit unknown")])
def test_what_has_no_counterpart_is_not_compared(size: int, case: str) -> None:
    rows = [timed(name, 1.0, 0, 1.0) for name in (prefix_cache.ONE_EDGE, prefix_cache.GATHER)]
    assert compare(rows, [MicroPeerRow("vllm", "a", case, size, 30.0, 0)]) == []


def test_a_peer_that_needs_no_time_gives_no_ratio() -> None:
    rows = [timed(name, 0.0, 0, 0.0) for name in (prefix_cache.ONE_EDGE, prefix_cache.GATHER)]
    [one] = compare(rows, [MicroPeerRow("vllm", "a", "full_hit lookup only", 512, 0.0, 0)])
    assert (one.ratio, one.drift) == (None, 0.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys; print('loading'); sys.exit('no GPU here')", "exit status 1: loading | no GPU here"),
        ("import sys; sys.exit(3)", "exit status 3: it wrote nothing"),
        ("print('done')", "wrote no rows (FileNotFoundError"),
        ("import sys; open(sys.argv[2], 'w').write('[')", "wrote no rows (JSONDecodeError"),
        ("import sys; open(sys.argv[2], 'w').write('[]')", "wrote no rows (AttributeError"),
        ("import sys; open(sys.argv[2], 'w').write('{\"rows\": [{}]}')", "wrote no rows (KeyError"),
        ("import sys; open(sys.argv[2], 'w').write('{\"rows\": []}')", "measured nothing: it wrote nothing"),
    ],
)
def test_a_peer_that_fails_is_quoted(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PeerError) as caught:
        peer(tmp_path, text).measure("b", quick=False)
    assert str(caught.value).startswith("peer vllm, section b of measure.py, ")
    assert message in str(caught.value)


def test_only_the_last_lines_are_quoted(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"status 1: 15 \| 16 \| 17 \| 18 \| 19$"):
        peer(tmp_path, "for i in range(20): print(i)\nraise SystemExit(1)").measure("b", quick=False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("vllm", "write NAME=PYTHON"),
        ("vllm=", "write NAME=PYTHON"),
        (f"vlm={sys.executable}", "unknown peer 'vlm'. Did you mean 'vllm'?"),
        ("vllm=no/such/python", "there is no interpreter no/such/python"),
    ],
)
def test_a_peer_that_cannot_be(tmp_path: Path, given: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_peers([given], script(tmp_path))
    assert message in str(caught.value)


def test_a_peer_needs_a_script(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--peer-script FILE, or SAGELLM_PEER_SCRIPT"):
        parse_peers([f"vllm={sys.executable}"], None)
    with pytest.raises(ConfigError, match="there is no peer script"):
        parse_peers([f"vllm={sys.executable}"], tmp_path / "none.py")
    assert parse_peers([], None) == []


def test_the_interpreter_of_a_virtual_environment_stays_the_one_that_was_named(tmp_path: Path) -> None:
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    [made] = parse_peers([f"vllm={link}"], script(tmp_path))
    assert made.python == str(link)


@pytest.mark.peer
def test_the_harness_still_has_the_rows_that_ours_stand_against() -> None:
    path = os.environ.get("SAGELLM_PEER_SCRIPT")
    if not path:
        pytest.skip("SAGELLM_PEER_SCRIPT names no script")
    text = Path(path).read_text(encoding="utf-8")
    for name, value in (("{P}", "2048"), ("{kind}", "rss"), ("{nm}", "AsyncScheduler")):
        text = text.replace(name, value)
    assert [one.case for one in COMPARABLE if one.case not in text] == []
    assert all(f"bench_{name}" in text for name in PEERS)
