"""Routers, separation and tenants in the simulator: what control_plane/router/README.md quotes.

    python benchmarks/router_experiments.py routers   --traces FOLDER --out FILE
    python benchmarks/router_experiments.py separation --traces FOLDER --out FILE
    python benchmarks/router_experiments.py tenants   --out FILE
    python benchmarks/router_experiments.py scale     --traces FOLDER --out FILE

Instances report every 0.2 s, and their KV events take 50 ms. One process; the same figures each time.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sagellm.benchmarks.simulate.experiment import preset_config
from sagellm.benchmarks.simulate.hardware import hardware
from sagellm.benchmarks.simulate.metrics import SLOPair
from sagellm.benchmarks.simulate.simulation import ClusterLayout, ServiceGoals, SimulationResult, simulate
from sagellm.benchmarks.simulate.workload import Arrivals, WorkloadSpec, workload
from sagellm.benchmarks.traces import Trace, TraceRequest, read_trace
from sagellm.core.blocks import cdiv
from sagellm.core.types import Namespace, Tokens

MACHINE = hardware("h100-80g", "llama-3.1-8b")
PRESET = "vllm-like"
REPORT_S, EVENT_S = 0.2, 0.05
Router = str | dict[str, Any]
LLM_D: Router = {"name": "llm_d", "peak_prefill_tokens_per_s": 30_000.0}
"""llm-d's rule with the prefill speed of this device and model, as its guide asks for."""
ROUTERS: Mapping[str, Router] = {
    "random": {"name": "random"},
    "round_robin": "round_robin",
    "least_loaded": "least_loaded",
    "prefix_aware": "prefix_aware",
    "llm_d": LLM_D,
    "cost": "cost",
}
KEPT = ("ttft_s_mean", "ttft_s_p50", "ttft_s_p99", "tpot_s_mean", "e2e_s_mean", "hit_ratio", "duration_s",
        "requests_finished", "utilisation", "utilisation_min", "utilisation_max")  # fmt: skip


def run(
    trace: Trace,
    layout: ClusterLayout,
    *,
    scale: float = 1.0,
    rate: float | None = None,
    goals: ServiceGoals | None = None,
    requests: int | None = None,
) -> SimulationResult:
    config = preset_config(PRESET)
    spec = WorkloadSpec(Arrivals(rate_scale=scale, rate=rate), max_requests=requests)
    work = workload(trace, spec, MACHINE.max_model_len(config))
    return simulate(PRESET, config, work, MACHINE, layout, goals)


def row(result: SimulationResult, **names: object) -> dict[str, Any]:
    made = {**names, **{key: result.figures[key] for key in KEPT}, "simulated_in_s": round(result.wall_s, 1)}
    made |= {key: value for key, value in result.figures.items() if key.startswith(("goodput", "attained"))}
    print(json.dumps(made), flush=True)
    return made


def layout(count: int, router: Router, **given: Any) -> ClusterLayout:
    return ClusterLayout(count, router=router, report_s=REPORT_S, event_delay_s=EVENT_S, **given)


def routers(folder: Path, only: Sequence[str], scales: Sequence[float], traces: Sequence[str]) -> list[Any]:
    rows = []
    for name in traces:
        trace = read_trace(folder / f"{name}.jsonl.xz")
        for scale in scales:
            for router in only or ROUTERS:
                result = run(trace, layout(4, ROUTERS[router]), scale=scale)
                rows.append(row(result, trace=name, scale=scale, router=router))
    return rows


PAIRS = [SLOPair(ttft, tpot) for ttft in (0.5, 1, 2, 5) for tpot in (12, 15, 20, 30, 50, 100)]


def separation(folder: Path, requests: int, scales: Sequence[float]) -> list[Any]:
    """Four instances: together, two and two apart, and hybrid ones."""
    trace = read_trace(folder / "mooncake_conversation_first_half.jsonl.xz")
    rows = []
    for scale in scales:
        for name, made in (
            ("together", layout(4, "cost")),
            ("apart", layout(1, {"name": "cost", "separation": "always"}, disaggregate=(2, 2))),
        ):
            goals = ServiceGoals(tuple(PAIRS))
            result = run(trace, made, scale=scale, goals=goals, requests=requests)
            rows.append(row(result, scale=scale, separation=name))
        for pair in PAIRS:
            made = layout(4, {"name": "cost", "separation": "adaptive"}, hybrid=True)
            result = run(trace, made, scale=scale, goals=ServiceGoals((pair,)), requests=requests)
            rows.append(row(result, scale=scale, separation="adaptive", slo=pair.name))
    return rows


def tenants(only: Sequence[str]) -> list[Any]:
    """Eight tenants with rates of 1/rank and prompts of their own."""
    draw = random.Random(0)
    requests, now_s = [], 0.0
    for number in range(3000):
        now_s += draw.expovariate(12.0)
        tenant = draw.choices(range(8), [1 / (rank + 1) for rank in range(8)])[0]
        ids = [1000 * tenant + block for block in range(4)] + [
            10**6 + 8 * number + block for block in range(4)
        ]
        length = 4 * 512 + draw.randint(100, 2048)
        made = TraceRequest(
            now_s,
            Tokens(ids[: cdiv(length, 512)]),
            Namespace(f"tenant-{tenant}"),
            length,
            draw.randint(20, 300),
        )
        requests.append(made)
    trace = Trace("tenants", "made", 512, tuple(requests))
    return [row(run(trace, layout(4, ROUTERS[name])), router=name) for name in only or ROUTERS]


def scale(folder: Path, instances: int, requests: int) -> list[Any]:
    trace = read_trace(folder / "mooncake_conversation_first_half.jsonl.xz")
    began = time.perf_counter()
    rows = [
        row(run(trace, layout(instances, name), scale=instances / 6, requests=requests), router=name)
        for name in ("least_loaded", "cost")
    ]
    print(f"{time.perf_counter() - began:.0f} s", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["routers", "separation", "tenants", "scale"])
    parser.add_argument("--traces", type=Path, default=Path())
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--scales", nargs="*", type=float, default=[1.0])
    parser.add_argument("--names", nargs="*", default=["mooncake_conversation_first_half"])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--instances", type=int, default=200)
    given = parser.parse_args()
    if given.what == "routers":
        rows = routers(given.traces, given.only, given.scales, given.names)
    elif given.what == "separation":
        rows = separation(given.traces, given.requests, given.scales)
    elif given.what == "tenants":
        rows = tenants(given.only)
    else:
        rows = scale(given.traces, given.instances, given.requests)
    made = {"what": given.what, "device": "h100-80g", "model": "llama-3.1-8b", "preset": PRESET,
            "report_s": REPORT_S, "event_delay_s": EVENT_S, "rows": rows}  # fmt: skip
    given.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
