"""Exact hit counts of every registered policy on the kept traces; the reference figures on the collection."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from replay_golden import CAPACITIES, COMMAND, TRACES, hits, kept, load, policies
from sagellm.benchmarks.replay.block_trace import BlockTrace, block_trace
from sagellm.benchmarks.replay.sweep import OPTIMUM, ReplaySweepPlan, run_sweep
from sagellm.benchmarks.traces import read_trace

CONVERSATION = {
    "0.5%": (3.97, 10.96), "1%": (4.29, 17.03), "2%": (5.11, 23.50), "5%": (10.37, 32.11),
    "10%": (19.65, 34.02), "25%": (29.56, 34.02),
}  # fmt: skip
AGENTS = {
    "0.5%": (12.55, 27.75), "1%": (24.56, 51.10), "2%": (52.93, 75.41), "5%": (88.11, 93.13),
    "10%": (94.55, 96.05),
}  # fmt: skip
"""Hit ratios of LRU and of the optimum in %, as other programs measured them on the same traces."""


@cache
def trace(name: str) -> BlockTrace:
    return load(name)


@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("policy", policies())
def test_every_policy_hits_what_it_hit_before(policy: str, name: str) -> None:
    known = kept().get(policy, {}).get(name)
    assert known is not None, f"no golden figures of {policy!r} on {name!r} yet: {COMMAND}"
    assert hits(policy, trace(name)) == known, f"if that is meant: {COMMAND}"


def test_golden_figures_are_of_policies_that_exist_and_none_exceeds_the_optimum() -> None:
    known = kept()
    assert sorted(known) == sorted(policies()), COMMAND
    for policy, by_trace in known.items():
        for name in TRACES:
            for capacity in CAPACITIES:
                assert by_trace[name][capacity] <= known[OPTIMUM][name][capacity], (policy, name, capacity)


@pytest.mark.traces
@pytest.mark.parametrize(
    ("file", "figures"),
    [
        ("mooncake_conversation_first_half.jsonl.xz", CONVERSATION),
        pytest.param("cc_agentic_sessions_a.jsonl.xz", AGENTS, marks=pytest.mark.slow),
    ],
)
def test_lru_and_the_optimum_have_the_reference_figures(
    sagellm_traces: Path, file: str, figures: dict[str, tuple[float, float]]
) -> None:
    collected = block_trace(read_trace(sagellm_traces / file))
    results = run_sweep(collected, ReplaySweepPlan(("lru", OPTIMUM), tuple(figures)), jobs=2)
    found = {(one.case.policy, one.case.capacity.text): 100 * one.block_ratio for one in results}
    for size, (lru, best) in figures.items():
        assert found["lru", size] == pytest.approx(lru, abs=0.005), size
        assert found[OPTIMUM, size] == pytest.approx(best, abs=0.005), size


@pytest.mark.traces
def test_lru_replays_a_million_blocks_per_second(sagellm_traces: Path) -> None:
    """Half of that, so that a busy machine does not fail it."""
    collected = block_trace(read_trace(sagellm_traces / "mooncake_conversation_first_half.jsonl.xz"))
    speeds = [
        run_sweep(collected, ReplaySweepPlan(("lru",), ("1%",)))[0].accesses_per_s or 0 for _ in range(3)
    ]
    assert max(speeds) > 0.5e6
