"""`adaptive` against LRU on a few generated traces; `tools/adaptive_regret.py` measures on many."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adaptive_regret import CAPACITIES, FIRST_MEASURING_SEED, GENERATORS, SOURCES, main, make

NUM_TRACES = len(GENERATORS)


@pytest.mark.slow
@pytest.mark.traces
@pytest.mark.timeout(600)
def test_the_loss_on_a_few_traces_stays_within_what_was_measured(
    sagellm_traces: Path, tmp_path: Path
) -> None:
    """One trace of each generator, with seeds that are for choosing. The file has a row for each replay."""
    out = tmp_path / "regret.json"
    arguments = [
        "--traces",
        str(sagellm_traces),
        "--num",
        str(NUM_TRACES),
        "--trial",
        "0.002,2",
        "--out",
        str(out),
    ]
    assert NUM_TRACES < FIRST_MEASURING_SEED
    assert main(arguments) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert len(found["rows"]) == NUM_TRACES * len(CAPACITIES)
    figures = found["summary"]["0.002,2"]["all"]
    assert figures["traces"] == NUM_TRACES
    assert figures["worst_loss"] < 0.3
    assert figures["mean_gain"] > 0.5


@pytest.mark.slow
@pytest.mark.traces
def test_a_seed_makes_the_same_trace_again(sagellm_traces: Path) -> None:
    paths = [sagellm_traces / name for name in SOURCES]
    for seed in range(NUM_TRACES):
        name, requests = make(seed, paths)
        assert (name, requests) == make(seed, paths)
        assert len(requests) >= 1_000
        assert [one.time_s for one in requests] == sorted(one.time_s for one in requests)
