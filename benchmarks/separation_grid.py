"""Goodput of whole, separated and adaptive instances over a grid of goals.

    python benchmarks/separation_grid.py run --traces FOLDER --out FILE [--mixes NAME ...]
    python benchmarks/separation_grid.py table --out FILE
    python benchmarks/separation_grid.py draw --out FILE --images FOLDER

In the simulator: four H100s with Llama 3.1 8B; reports every 0.2 s, events after 50 ms. `run` adds a line to
FILE for each simulation, and leaves out those that are in it. The mixes whose names begin with `choose` are
those by which constants were chosen; the others judge. Goodput counts the requests that arrive after the
warm-up.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sagellm.benchmarks.reporting import PLOT_COLORS, new_figure, save_figures
from sagellm.benchmarks.simulate.cluster import ServedRequest
from sagellm.benchmarks.simulate.experiment import preset_config
from sagellm.benchmarks.simulate.hardware import hardware
from sagellm.benchmarks.simulate.metrics import SLOPair, finished
from sagellm.benchmarks.simulate.simulation import ClusterLayout, ServiceGoals, simulate
from sagellm.benchmarks.simulate.workload import Arrivals, WorkloadSpec, workload
from sagellm.benchmarks.traces import Trace, TraceRequest, read_trace
from sagellm.core.types import Namespace, Tokens

MACHINE = hardware("h100-80g", "llama-3.1-8b")
PRESET, NUM_INSTANCES = "vllm-like", 4
TTFTS_S, TPOTS_MS = (0.5, 1, 4), (12, 15, 20, 30)
PAIRS = [SLOPair(ttft_s, tpot_ms) for ttft_s in TTFTS_S for tpot_ms in TPOTS_MS]
KEPT = (
    "ttft_s_mean",
    "ttft_s_p99",
    "tpot_s_mean",
    "tpot_s_p99",
    "utilisation",
    "duration_s",
    "requests_finished",
)
Row = dict[str, Any]


@dataclass(frozen=True)
class Mix:
    """A workload of about one length of prompts and answers. `rate`: of arrivals, per second."""

    read: Callable[[Path], Trace]
    rate: float
    warm_up_s: float
    about: str


def _part(file: str, first: int, count: int) -> Callable[[Path], Trace]:
    def read(folder: Path) -> Trace:
        trace = read_trace(folder / file)
        return replace(trace, requests=trace.requests[first : first + count])

    return read


def _drawn(seed: int, count: int, prompt: float, answer: float) -> Callable[[Path], Trace]:
    """Poisson arrivals, log-normal lengths about these medians."""

    def read(_: Path) -> Trace:
        draw, now_s, made = random.Random(seed), 0.0, []
        for _number in range(count):
            now_s += draw.expovariate(1.0)
            num_prompt = max(16, min(30_000, round(draw.lognormvariate(math.log(prompt), 0.8))))
            num_answer = max(2, min(4000, round(draw.lognormvariate(math.log(answer), 0.6))))
            made.append(TraceRequest(now_s, Tokens([]), Namespace(), num_prompt, num_answer))
        return Trace("drawn", "made", 512, tuple(made))

    return read


CONVERSATION, AZURE_CHAT = "mooncake_conversation_first_half.jsonl.xz", "azure2023_conv_first_half.csv.xz"
MIXES: Mapping[str, Mix] = {
    "choose long prompts": Mix(_part(CONVERSATION, 2800, 450), 3.2, 30, "conversation, second half"),
    "choose middle": Mix(_drawn(1, 1000, 1500, 500), 25.0, 10, "drawn; medians of 1500 and 500 tokens"),
    "long prompts": Mix(_part(CONVERSATION, 0, 400), 3.2, 30, "conversation; means of 13k and 350 tokens"),
    "short": Mix(_part(AZURE_CHAT, 0, 2000), 55.0, 10, "Azure chat; means of 1.2k and 220 tokens"),
    "long answers": Mix(_drawn(2, 700, 800, 1000), 22.0, 10, "drawn; medians of 800 and 1000 tokens"),
    "short, later": Mix(_part(AZURE_CHAT, 5000, 3600), 55.0, 25, "Azure chat, from request 5,000 on"),
    "long prompts, later": Mix(
        _part(CONVERSATION, 1200, 400), 3.2, 30, "conversation, from request 1,200 on"
    ),
}


def layouts(chunk: int) -> dict[str, ClusterLayout]:
    """Whole instances, each way to separate them, and adaptive ones."""
    given: dict[str, Any] = {"report_s": 0.2, "event_delay_s": 0.05}
    adaptive = {"name": "cost", "separation": {"name": "adaptive", "chunk": chunk}}
    apart = {"name": "cost", "separation": "always"}
    made = {"whole": ClusterLayout(NUM_INSTANCES, router="cost", **given)}
    for prefill in range(1, NUM_INSTANCES):
        parts = prefill, NUM_INSTANCES - prefill
        made[f"{prefill}+{NUM_INSTANCES - prefill}"] = ClusterLayout(
            router=apart, disaggregate=parts, **given
        )
    return made | {"adaptive": ClusterLayout(NUM_INSTANCES, router=adaptive, hybrid=True, **given)}


def runs(
    mixes: Sequence[str], names: Sequence[str], chunks: Sequence[int], slos: Sequence[str]
) -> Iterator[tuple[Row, ClusterLayout]]:
    """What there is to simulate. Routers weigh the goals that requests carry, so each pair has its run."""
    for mix in mixes:
        for chunk in chunks:
            for name, layout in layouts(chunk).items():
                if name not in names:
                    continue
                for slo in slos:
                    yield {"mix": mix, "layout": name, "chunk": chunk, "slo": slo}, layout


def run(given: argparse.Namespace) -> None:
    rows = read_rows(given.out)
    done = {tuple(row[key] for key in ("mix", "layout", "chunk", "slo")) for row in rows}
    pairs = {pair.name: pair for pair in PAIRS}
    for row, layout in runs(given.mixes, given.layouts, given.chunks, given.slos):
        if tuple(row.values()) in done:
            continue
        mix = MIXES[row["mix"]]
        config = preset_config(
            PRESET,
            {"scheduler.max_batched_tokens": row["chunk"], "scheduler.max_num_seqs": min(512, row["chunk"])},
        )
        spec = WorkloadSpec(Arrivals(rate=mix.rate))
        work = workload(mix.read(given.traces), spec, MACHINE.max_model_len(config))
        slo = pairs[row["slo"]]
        found = simulate(PRESET, config, work, MACHINE, layout, ServiceGoals((slo,)))
        row |= {key: found.figures[key] for key in KEPT} | {"simulated_in_s": round(found.cpu_s, 1)}
        row["goodput"] = {slo.name: met_per_s(found.served, slo, mix.warm_up_s)}
        row["goodput_all"] = {slo.name: met_per_s(found.served, slo, 0.0)}
        with given.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


def met_per_s(served: Sequence[ServedRequest], slo: SLOPair, since_s: float) -> float:
    """Requests that arrive per second from then on, and meet the goals."""
    late = [each for each in served if each.arrival_s is not None and each.arrival_s >= since_s]
    span_s = max(each.arrival_s or 0.0 for each in late) - since_s
    return sum(map(slo.is_met_by, finished(late))) / span_s


def read_rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def goodput(rows: Sequence[Row], mix: str, layout: str, pair: SLOPair) -> float:
    """The best of all chunks. So whole instances have the one that suits the goals."""
    own = [row["goodput"].get(pair.name) for row in rows if (row["mix"], row["layout"]) == (mix, layout)]
    return max((value for value in own if value is not None), default=math.nan)


def compared(rows: Sequence[Row], mix: str) -> Iterator[tuple[SLOPair, float, float, str, float]]:
    """By pair: whole, the best separated one and its name, adaptive."""
    apart = sorted({row["layout"] for row in rows} - {"whole", "adaptive"})
    for pair in PAIRS:
        best = max(apart, key=lambda name: goodput(rows, mix, name, pair))
        yield (pair, goodput(rows, mix, "whole", pair), goodput(rows, mix, best, pair), best,
               goodput(rows, mix, "adaptive", pair))  # fmt: skip


def table(given: argparse.Namespace) -> None:
    rows = read_rows(given.out)
    for mix in dict.fromkeys(row["mix"] for row in rows):
        print(f"\n{mix}\n\n| goals | whole | separated | adaptive | of the better |\n|---|---|---|---|---|")
        for pair, whole, apart, name, adaptive in compared(rows, mix):
            ratio = adaptive / max(whole, apart, 1e-9)
            print(f"| {pair.ttft_s:g} s, {pair.tpot_ms:g} ms | {whole:.2f} | {apart:.2f} ({name}) | "
                  f"{adaptive:.2f} | {ratio:.2f} |")  # fmt: skip


def draw(given: argparse.Namespace) -> None:
    """Draws goodput by TPOT goal, with a panel for each mix and TTFT goal."""
    rows = read_rows(given.out)
    mixes = [mix for mix in MIXES if any(row["mix"] == mix for row in rows) and "choose" not in mix]
    figure = new_figure(3.6 * len(mixes), 2.5 * len(TTFTS_S))
    grid = figure.subplots(len(TTFTS_S), len(mixes), sharex=True, sharey="col", squeeze=False)
    for column, mix in enumerate(mixes):
        found = list(compared(rows, mix))
        for axes, ttft_s in zip(grid[:, column], TTFTS_S, strict=True):
            own = [each for each in found if each[0].ttft_s == ttft_s]
            goals = [each[0].tpot_ms for each in own]
            for place, name, style in ((1, "whole", "--"), (2, "separated, best", ":"), (4, "adaptive", "-")):
                color = PLOT_COLORS[(1, 2, 4).index(place)]
                axes.plot(
                    goals, [each[place] for each in own], style, marker="o", ms=3, color=color, label=name
                )
            axes.set_title(f"{mix}, first token in {ttft_s:g} s", loc="left", fontsize=9)
            axes.set_xscale("log")
            axes.set_xticks(TPOTS_MS, [f"{goal:g}" for goal in TPOTS_MS])
        grid[0, column].set_ylim(bottom=0)
        grid[-1, column].set_xlabel("goal for a token, ms")
    for axes in grid[:, 0]:
        axes.set_ylabel("requests/s in time")
    grid[0, 0].legend(frameon=False, fontsize=8)
    print(*save_figures(given.images, {"separation_goodput": figure}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["run", "table", "draw"])
    parser.add_argument("--traces", type=Path, default=Path())
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--images", type=Path, default=Path("docs/images"))
    parser.add_argument("--mixes", nargs="*", default=[mix for mix in MIXES if "choose" not in mix])
    parser.add_argument("--layouts", nargs="*", default=list(layouts(2048)))
    parser.add_argument("--slos", nargs="*", default=[pair.name for pair in PAIRS])
    parser.add_argument("--chunks", nargs="*", type=int, default=[8192])
    given = parser.parse_args()
    {"run": run, "table": table, "draw": draw}[given.what](given)


if __name__ == "__main__":
    main()
