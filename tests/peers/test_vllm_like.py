"""Preset `vllm-like` decides what the scheduler of vLLM decides, step by step: order, chunks, preemptions.

What vLLM decided on three scripted workloads is kept; the tests marked `peer` ask it again, on many more.
"""

from __future__ import annotations

import os
import re
from collections import Counter

import pytest

from sagellm.kvmgr.scheduler_ir.passes.chunked_prefill import ChunkedPrefillPass
from tests.peers.decisions import COMMAND, ask_vllm, digest, first_difference, kept, lines
from tests.peers.our_side import run
from tests.peers.workloads import SCRIPTED, Workload, drawn

WORKLOADS = {made.name: made for made in (make() for make in SCRIPTED)}
NUM_DRAWN = 150


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_every_step_is_that_of_vllm(name: str) -> None:
    workload, golden = WORKLOADS[name], kept()["workloads"][name]
    assert digest(workload) == golden["digest"], (
        f"the workload is another than the one that is kept: {COMMAND}"
    )
    difference = first_difference(lines(run(workload)), golden["steps"])
    assert difference is None, difference


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("arrivals", {"chunks that go on": 40, "steps with a queue": 60}),
        ("pressure", {"preempted": 10, "resumed": 10, "resumed from the cache": 5}),
        ("conversations", {"new from the cache": 30, "steps with few blocks left": 20}),
    ],
)
def test_the_workloads_show_what_they_are_for(name: str, least: dict[str, int]) -> None:
    steps = run(WORKLOADS[name])
    found = Counter[str]()
    for one in steps:
        entered = {*one["new"], *one["resumed"]}
        starts = {name: start for name, _, start in one["scheduled"]}
        found["chunks that go on"] += sum(n > 1 and name not in entered for name, n, _ in one["scheduled"])
        found["steps with a queue"] += len(one["waiting"]) > 2
        found["steps with few blocks left"] += one["free_blocks"] < 10
        for what in ("new", "resumed"):
            found[f"{what} from the cache"] += sum(starts[name] > 0 for name in one[what])
        for what in ("preempted", "resumed"):
            found[what] += len(one[what])
    assert all(found[what] >= number for what, number in least.items()), found


def test_our_own_default_decides_otherwise_where_memory_is_short() -> None:
    """The comparison can fail: it tells two schedulers apart."""
    steps = lines(run(WORKLOADS["pressure"], [ChunkedPrefillPass()]))
    assert first_difference(steps, kept()["workloads"]["pressure"]["steps"]) is not None


def compare(python: str, workloads: list[Workload]) -> dict[str, str]:
    """The first difference of each workload that has one."""
    _, runs = ask_vllm(python, workloads)
    found = {
        one.name: first_difference(lines(run(one)), steps) for one, steps in zip(workloads, runs, strict=True)
    }
    return {name: difference for name, difference in found.items() if difference is not None}


@pytest.fixture(scope="module")
def peer() -> str:
    python = os.environ.get("SAGELLM_PEER_VLLM")
    if not python:
        pytest.skip("SAGELLM_PEER_VLLM names no interpreter")
    return python


@pytest.mark.peer
@pytest.mark.timeout(1200)
def test_vllm_still_decides_what_is_kept(peer: str) -> None:
    version, runs = ask_vllm(peer, list(WORKLOADS.values()))
    golden = kept()
    for name, steps in zip(WORKLOADS, runs, strict=True):
        difference = first_difference(golden["workloads"][name]["steps"], steps)
        assert difference is None, f"vLLM {version} is not vLLM {golden['version']} ({COMMAND}): {difference}"


@pytest.mark.peer
@pytest.mark.timeout(1200)
def test_drawn_workloads_agree(peer: str) -> None:
    """All of them, as long as prompts may fill a step."""
    workloads = [one for one in map(drawn, range(NUM_DRAWN)) if not one.settings.long_prefill_tokens]
    assert len(workloads) > NUM_DRAWN // 2
    assert compare(peer, workloads) == {}


@pytest.mark.peer
@pytest.mark.timeout(1200)
def test_capped_chunks_differ_by_blocks_computed_twice(peer: str) -> None:
    """Two prompts that go on side by side in small chunks compute the same blocks: vLLM keeps both copies, we
    one. So nothing differs before the step in which we have more blocks to spare."""
    workloads = [one for one in map(drawn, range(NUM_DRAWN)) if one.settings.long_prefill_tokens]
    for name, difference in compare(peer, workloads).items():
        free = [int(number) for number in re.findall(r"free (\d+)", difference)]
        assert free[0] > free[1], f"{name}: {difference}"
