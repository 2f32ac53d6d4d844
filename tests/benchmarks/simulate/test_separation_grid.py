"""`adaptive` against whole and separated instances, on a small grid of goals."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.separation_grid import MACHINE, NUM_INSTANCES, PRESET, layouts, met_per_s
from benchmarks.separation_grid import _drawn as drawn
from sagellm.benchmarks.simulate.experiment import preset_config
from sagellm.benchmarks.simulate.metrics import SLOPair
from sagellm.benchmarks.simulate.simulation import ClusterLayout, ServiceGoals, SimulationResult, simulate
from sagellm.benchmarks.simulate.workload import Arrivals, WorkloadSpec, workload

CHUNK = 8192
CONFIG = preset_config(PRESET, {"scheduler.max_batched_tokens": CHUNK, "scheduler.max_num_seqs": 512})
GOALS = [SLOPair(0.5, 30), SLOPair(4, 15), SLOPair(4, 12)]


def served(layout: ClusterLayout, *goals: SLOPair) -> SimulationResult:
    trace, spec = drawn(3, 900, 1500, 400)(Path()), WorkloadSpec(Arrivals(rate=25.0))
    work = workload(trace, spec, MACHINE.max_model_len(CONFIG))
    return simulate(PRESET, CONFIG, work, MACHINE, layout, ServiceGoals(goals))


@pytest.mark.slow
def test_adaptive_is_not_behind_the_better_form() -> None:
    """Within 3 % of whole and of separated instances, once it has had ten seconds to learn."""
    made = layouts(CHUNK)
    fixed = {name: served(layout, *GOALS) for name, layout in made.items() if name != "adaptive"}
    assert len(fixed) == NUM_INSTANCES
    for goal in GOALS:
        best = max(met_per_s(each.served, goal, 10.0) for each in fixed.values())
        adaptive = met_per_s(served(made["adaptive"], goal).served, goal, 10.0)
        assert adaptive >= 0.97 * best, f"{goal.name}: {adaptive:.2f} requests/s, not {best:.2f}"
