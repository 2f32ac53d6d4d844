"""A recording is a trace that replay and simulate read, whenever it ends."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sagellm.benchmarks.replay.block_trace import block_trace
from sagellm.benchmarks.traces import read_trace
from sagellm.core.errors import ConfigError
from sagellm.core.types import Tokens
from sagellm.diagnostics.watch.accesses import CacheAccess
from sagellm.diagnostics.watch.cache_view import IDLE_AT_ONCE_S, IDLE_S, CacheView
from sagellm.diagnostics.watch.recording import WatchRecording
from tests.diagnostics.watch.reference_cache import BLOCK, ReferenceCache


def test_a_recording_that_was_never_closed_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "наблюдение.jsonl"
    recording = WatchRecording(path)
    recording.write(CacheAccess(7.0, 0, Tokens([1, 2, 3]), 2), 16)
    recording.write(CacheAccess(6.0, 0, Tokens([1, 2, 5]), 3), 16)
    recording.write(CacheAccess(8.5, 1, Tokens([9]), 1), 32)
    trace = read_trace(path)
    found = [(r.time_s, r.ids.tolist(), r.num_input_tokens, r.num_output_tokens) for r in trace.requests]
    assert found == [(0.0, [1, 2], 32, 16), (0.0, [1, 2, 5], 48, 0)]
    assert (recording.num_requests, recording.num_left_out) == (2, 1)
    assert block_trace(trace).bound.tolist() == [0, 2]
    assert recording.summary() == f"{path}: 2 requests; 1 of servers with another block size are left out"
    recording.close()


def test_a_recording_without_requests_says_what_it_needs(tmp_path: Path) -> None:
    with WatchRecording(tmp_path / "none.jsonl") as recording:
        assert "those through --proxy" in recording.summary()


def test_a_file_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot record to"):
        WatchRecording(tmp_path / "no" / "folder.jsonl")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/dev/full is a device of Linux")
def test_a_full_disk_ends_the_recording_only() -> None:
    with WatchRecording(Path("/dev/full")) as recording:
        for _ in range(3):
            recording.write(CacheAccess(0.0, 0, Tokens([1]), 1), 16)
        assert recording.error is not None
    assert recording.num_requests == 0
    assert recording.summary().startswith("/dev/full: 0 requests; ended early: [Errno 28]")


@pytest.mark.parametrize(("at_once", "idle_s"), [(False, IDLE_S), (True, IDLE_AT_ONCE_S)])
def test_requests_are_recorded_while_the_watch_goes_on(*, at_once: bool, idle_s: float) -> None:
    cache, found = ReferenceCache(100, reports_hits=True), list[CacheAccess]()
    view = CacheView(on_access=found.append)
    if at_once:
        view.set_answers_at_once(0)
    cache.serve(range(8), time_s=0.0)
    cache.serve(range(20, 28), time_s=10.0)
    cache.serve(range(30, 38), time_s=idle_s - 1)
    cache.serve(range(40, 48), time_s=idle_s + 1)
    for item in cache.items:
        view.feed(0, item)
    assert [access.time_s for access in found] == [0.0]
    view.finish()
    assert len(found) == 4


def test_two_requests_that_compute_the_same_blocks_at_once_are_both_known() -> None:
    cache, found = ReferenceCache(100, reports_hits=True), list[CacheAccess]()
    view = CacheView(on_access=found.append)
    cache.serve(range(2 * BLOCK), range(4 * BLOCK))
    for item in [*cache.items, *cache.items[1:]]:  # the other one stores the same blocks of its answer
        view.feed(0, item)
    view.finish()
    assert max(len(access.blocks) for access in found) == 6
    view.check()
