"""Two scheduling presets on a generated chat trace, on a simulated H100.

The scheduler and the KV cache are the real ones; a cost model says how long each step takes. Run it with
`python examples/02_simulate.py`; it needs no GPU and no model. See docs/simulate.md.
"""

from __future__ import annotations

from sagellm.benchmarks.simulate.experiment import SimulationSetup, run_rates
from sagellm.benchmarks.simulate.hardware import hardware
from sagellm.benchmarks.simulate.metrics import SLOPair
from sagellm.benchmarks.simulate.simulation import ServiceGoals, SimulationResult
from sagellm.benchmarks.simulate.workload import Arrivals, WorkloadSpec
from sagellm.benchmarks.traces.synth import synthesize

PRESETS = ("vllm-like", "adaptive")
REQUESTS_PER_S = 30.0
GOAL = SLOPair(ttft_s=1.0, tpot_ms=30.0)


def simulate() -> list[SimulationResult]:
    """One result for each preset."""
    trace = synthesize("chat", duration_s=900.0, seed=0)
    bench = SimulationSetup(hardware("h100-80g", "llama-3.1-8b"), goals=ServiceGoals((GOAL,)))
    return run_rates(bench, trace, WorkloadSpec(Arrivals(rate=REQUESTS_PER_S)), PRESETS, [1.0])


def main() -> None:
    print(f"goal: first token within {GOAL.ttft_s:g} s, then {GOAL.tpot_ms:g} ms per token")
    for result in simulate():
        figures = result.figures
        print(
            f"{result.preset}: {figures['requests_per_s']:.1f} requests/s, "
            f"{figures[f'attained_{GOAL.name}']:.0%} of the requests met the goal, "
            f"TTFT p99 {figures['ttft_s_p99']:.2f} s, {figures['hit_ratio']:.0%} of the prompts cached"
        )


if __name__ == "__main__":
    main()
