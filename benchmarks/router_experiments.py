"""Routers and tenants in the simulator: what control_plane/router/README.md quotes.

    python benchmarks/router_experiments.py routers   --traces FOLDER --out FILE
    python benchmarks/router_experiments.py tenants   --out FILE --instances 4 --rates 1 --loads 0.75
    python benchmarks/router_experiments.py scale     --traces FOLDER --out FILE
    python benchmarks/router_experiments.py closed    --traces FOLDER --out FILE --names coding_1 synthetic
    python benchmarks/router_experiments.py weights   --traces FOLDER --out FILE

`weights` compares options of `cost` on the workloads by which its defaults were chosen; the others judge.
Instances report every 0.2 s, and their KV events take 50 ms. One process; the same figures each time.
"""

from __future__ import annotations

import argparse
import json
import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sagellm.benchmarks.simulate.experiment import preset_config
from sagellm.benchmarks.simulate.hardware import hardware
from sagellm.benchmarks.simulate.simulation import ClusterLayout, SimulationResult, simulate
from sagellm.benchmarks.simulate.workload import Arrivals, WorkloadSpec, workload
from sagellm.benchmarks.traces import Trace, TraceRequest, read_trace
from sagellm.benchmarks.traces.synth import synthesize
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
        "requests_finished", "requests_per_s", "steps", "preemptions", "utilisation", "utilisation_min",
        "utilisation_max")  # fmt: skip


def run(
    trace: Trace,
    layout: ClusterLayout,
    *,
    scale: float = 1.0,
    rate: float | None = None,
    requests: int | None = None,
) -> SimulationResult:
    config = preset_config(PRESET)
    spec = WorkloadSpec(Arrivals(rate_scale=scale, rate=rate), max_requests=requests)
    work = workload(trace, spec, MACHINE.max_model_len(config))
    return simulate(PRESET, config, work, MACHINE, layout)


def row(result: SimulationResult, **names: object) -> dict[str, Any]:
    made = {
        **names,
        **{key: result.figures[key] for key in KEPT},
        "simulated_in_cpu_s": round(result.cpu_s, 1),
    }
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


def skewed(count: int, requests: int, rate: float, seed: int = 0) -> Trace:
    """Tenants with rates of 1/rank, each with 2,048 tokens before its prompts. Poisson arrivals."""
    draw = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(count)]
    made, now_s = [], 0.0
    for number in range(requests):
        now_s += draw.expovariate(rate)
        tenant = draw.choices(range(count), weights)[0]
        ids = [1000 * tenant + block for block in range(4)] + [
            10**6 + 8 * number + block for block in range(4)
        ]
        length = 4 * 512 + draw.randint(100, 2048)
        own = Namespace(f"tenant-{tenant}")
        made.append(TraceRequest(now_s, Tokens(ids[: cdiv(length, 512)]), own, length, draw.randint(20, 300)))
    return Trace("tenants", "made", 512, tuple(made))


def shares(result: SimulationResult, from_s: float, until_s: float) -> dict[str, float]:
    """How unequal instances were in a span: time computing, and prompt tokens computed."""
    busy, tokens = [], []
    for log in result.step_logs.values():
        ends, durations = np.asarray(log.ends_s), np.asarray(log.durations_s)
        inside = np.minimum(ends, until_s) - np.maximum(ends - durations, from_s)
        busy.append(float(np.maximum(inside, 0.0).sum()) / (until_s - from_s))
        tokens.append(int(np.asarray(log.prefill_tokens)[inside > 0].sum()))
    made = {}
    for name, values in (("busy", np.array(busy)), ("computed", np.array(tokens))):
        made[f"{name}_mean"] = round(float(values.mean()), 4)
        made[f"{name}_spread"] = round(float((values.max() - values.min()) / values.mean()), 4)
        made[f"{name}_deviation"] = round(float(values.std() / values.mean()), 4)
    return made


def tenants(
    only: Sequence[str], instances: int, requests: int, loads: Sequence[float], rates: Sequence[float]
) -> list[Any]:
    """Two tenants for each instance. `loads`: shares of what round robin serves when all come at once;
    `rates`: requests per second for each instance."""
    rows, capacity = [], 0.0
    if loads:
        at_once = run(skewed(2 * instances, 200 * instances, 1e6), layout(instances, "round_robin"))
        capacity = at_once.figures["requests_per_s"] / instances
    for rate in (*rates, *(load * capacity for load in loads)):
        trace = skewed(2 * instances, requests, rate * instances)
        last_s = trace.requests[-1].time_s
        for name in only or ROUTERS:
            result = run(trace, layout(instances, ROUTERS[name]))
            found = shares(result, min(20.0, last_s / 4), last_s)
            rows.append(row(result, router=name, instances=instances, rate=rate, capacity=capacity, **found))
    return rows


def scale(
    folder: Path, only: Sequence[str], instances: int, requests: int, scales: Sequence[float]
) -> list[Any]:
    """`scales`: times the trace's rate for each four instances."""
    trace, rows = read_trace(folder / "mooncake_conversation_first_half.jsonl.xz"), []
    for scale in scales:
        for name in only or ROUTERS:
            made = layout(instances, ROUTERS[name])
            result = run(trace, made, scale=scale * instances / 4, requests=requests)
            last_s = result.workload.times_s[-1]
            rows.append(row(result, router=name, instances=instances, scale=scale,
                            **shares(result, last_s / 4, last_s)))  # fmt: skip
    return rows


def agents_trace(folder: Path, source: str, sessions: int, seed: int) -> Trace:
    """So many sessions, drawn. `synthetic`, half of the coding agents by a hash of their session
    (`coding_0` or `coding_1`), or a file of LMCache's agents."""
    if source == "synthetic":
        trace = synthesize("agents", seed=seed, duration_s=150.0 * sessions)
    elif source.startswith("coding_"):
        trace = read_trace(folder / "cc_agentic_sessions_a.jsonl.xz")
    else:
        trace = read_trace(folder / f"{source}.jsonl.xz")
    half = int(source[-1]) if source.startswith("coding_") else None
    known = dict.fromkeys(request.session for request in trace.requests if request.session is not None)
    kept = [name for name in known if half is None or zlib.crc32(name.encode()) % 2 == half]
    random.Random(seed).shuffle(kept)
    order = {session: at for at, session in enumerate(kept[:sessions])}
    chosen = [request for request in trace.requests if request.session in order]
    chosen.sort(key=lambda request: order[request.session or ""])  # sessions begin in the order drawn
    return replace(trace, requests=tuple(chosen))


def closed(
    folder: Path, only: Sequence[str], names: Sequence[str], seeds: int, sessions: int, agents: int
) -> list[Any]:
    """The time until agents that send one turn after the other are done."""
    rows = []
    config = preset_config(PRESET)
    for name in names:
        for seed in range(seeds):
            spec = WorkloadSpec(closed_loop=True, agents=agents, think_s=0.0)
            work = workload(agents_trace(folder, name, sessions, seed), spec, MACHINE.max_model_len(config))
            for router in only or ROUTERS:
                result = simulate(PRESET, config, work, MACHINE, layout(4, ROUTERS[router]))
                rows.append(row(result, trace=name, seed=seed, agents=agents, router=router))
    return rows


def choosing(folder: Path) -> Mapping[str, tuple[int, Trace, WorkloadSpec]]:
    """The workloads that chose the weights of `cost`: instances, requests and how they arrive."""
    agents, fewer = (WorkloadSpec(closed_loop=True, agents=count, think_s=0.0) for count in (24, 12))
    azure = read_trace(folder / "azure2023_conv_first_half.csv.xz")
    long_answers = synthesize(
        "agents", seed=3, duration_s=2000, turns=10.0, system_tokens=1500, answer_tokens=700, spread=0.7,
        question_tokens=300, first_question_tokens=500, num_system_prompts=4, subagents=0.0,
    )  # fmt: skip
    long_chats = synthesize(
        "chat", seed=5, duration_s=6000, system_tokens=2000, first_question_tokens=9000, turns=3.0,
        question_tokens=800, answer_tokens=350, spread=1.0, num_system_prompts=20, think_s=600.0,
    )  # fmt: skip
    chats = synthesize(
        "chat", seed=7, duration_s=6000, system_tokens=3000, first_question_tokens=1500, question_tokens=200,
        answer_tokens=350, num_system_prompts=8, think_s=600.0,
    )  # fmt: skip
    documents = synthesize("shared_prompts", seed=6, duration_s=1200)
    return {
        "agents": (4, agents_trace(folder, "synthetic", 16, 1), agents),
        "coding agents, half 0": (4, agents_trace(folder, "coding_0", 12, 0), replace(fewer, agents=8)),
        "long answers": (4, long_answers, fewer),
        "documents": (16, documents, WorkloadSpec(Arrivals(rate=80.0), max_requests=2000)),
        "long chats": (50, long_chats, WorkloadSpec(Arrivals(rate=32.0), max_requests=1400)),
        "chats": (50, chats, WorkloadSpec(Arrivals(rate=120.0), max_requests=1500)),
        "Azure chat": (
            4,
            replace(azure, requests=azure.requests[3000:4200]),
            WorkloadSpec(Arrivals(rate=55.0)),
        ),
    }


WEIGHTS = (
    (1.0, 1.0, 1.0),
    (1.0, 1.0, 0.3),
    (1.0, 1.0, 0.1),
    (0.3, 0.3, 1.0),
    (0.3, 0.3, 0.1),
    (0.1, 0.1, 0.02),
)
"""Of decode, slowdown and delay."""


def weights(folder: Path) -> list[Any]:
    rows, config = [], preset_config(PRESET)
    for name, (count, trace, spec) in choosing(folder).items():
        work = workload(trace, spec, MACHINE.max_model_len(config))
        options = [
            {"name": "cost", "decode_weight": decode, "slowdown_weight": slowdown, "delay_weight": delay}
            for decode, slowdown, delay in WEIGHTS
        ]
        for router in (ROUTERS["round_robin"], *options):
            result = simulate(PRESET, config, work, MACHINE, layout(count, router))
            rows.append(row(result, trace=name, instances=count, router=str(router)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["routers", "tenants", "scale", "closed", "weights"])
    parser.add_argument("--traces", type=Path, default=Path())
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--scales", nargs="*", type=float, default=[1.0])
    parser.add_argument("--names", nargs="*", default=["mooncake_conversation_first_half"])
    parser.add_argument("--loads", nargs="*", type=float, default=[0.75])
    parser.add_argument("--rates", nargs="*", type=float, default=[])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--agents", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=1)
    given = parser.parse_args()
    folder, only, scales = given.traces, given.only, given.scales
    if given.what == "routers":
        rows = routers(folder, only, scales, given.names)
    elif given.what == "tenants":
        rows = tenants(only, given.instances, given.requests, given.loads, given.rates)
    elif given.what == "weights":
        rows = weights(folder)
    elif given.what == "closed":
        rows = closed(folder, only, given.names, given.seeds, given.sessions, given.agents)
    else:
        rows = scale(folder, only, given.instances, given.requests, scales)
    made = {"what": given.what, "device": "h100-80g", "model": "llama-3.1-8b", "preset": PRESET,
            "report_s": REPORT_S, "event_delay_s": EVENT_S, "rows": rows}  # fmt: skip
    given.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
