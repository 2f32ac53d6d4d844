"""Hit ratio and expected time to first token by the size of a tier.

    python benchmarks/tier_ttft.py --tokens 8192 --folder DIR_ON_A_DISK --out 8K.json
    python benchmarks/tier_ttft.py --tokens 32768 --folder DIR_ON_A_DISK --out 32K.json
    python benchmarks/tier_plot.py TRACE --ttft 8K.json 32K.json --folder docs/images [--out FILE]

The trace is replayed as in `tier_hits.py`: real books, blocks without bytes, one prompt after the other, for
tiers of 0, 1, 2, 5, 10 and 20 times the device's pool. The hit ratio is over blocks of prompts.

The time to first token is a model of one request alone on the machine, without queueing. Computing n tokens
behind c reused ones takes a (n - c) + b (n^2 - c^2); `a` and `b` are fitted to the times of computed prompts
in the files of `tier_ttft.py`, at two lengths or more. A token that is loaded takes what it took there: the
time to the first token of a prompt that came from that tier, over its tokens (the median of the lengths).
Prompts longer than those measured are extrapolated.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sagellm.benchmarks.replay.block_trace import BlockTrace, block_trace
from sagellm.benchmarks.replay.sweep import capacity
from sagellm.benchmarks.reporting import PLOT_COLORS, check_folder, environment, new_figure, save_figures
from sagellm.benchmarks.tiered import ServedPrompt, replay_tiered
from sagellm.benchmarks.traces import read_trace
from sagellm.core.errors import ConfigError

FACTORS = (0, 1, 2, 5, 10, 20)
STYLES = {"host": "-", "disk": "--"}
NAME = "tiers_by_size"


@dataclass(frozen=True)
class Costs:
    """Seconds per token, per token squared, and per token loaded from each tier."""

    token_s: float
    squared_s: float
    load_s: dict[str, float]

    @classmethod
    def fitted(cls, rows: Sequence[dict[str, Any]]) -> Costs:
        """To rows of `tier_ttft.py`. Raises `ConfigError` for fewer than two lengths, and negative costs."""
        if len({row["tokens"] for row in rows}) < 2:
            raise ConfigError("--ttft: give files of tier_ttft.py for two lengths of prompts or more")
        lengths = np.array([row["tokens"] for row in rows], np.float64)
        computed = np.array([row["computed_s"] for row in rows])
        terms = np.stack([lengths, lengths**2], axis=1) / computed[:, None]  # relative errors count
        token_s, squared_s = np.linalg.lstsq(terms, np.ones(len(rows)))[0].tolist()
        if token_s < 0 or squared_s < 0:
            raise ConfigError(
                f"--ttft: the times give {token_s:.3g} s per token and {squared_s:.3g} s per token squared: "
                "measure again on an idle machine, at lengths further apart"
            )
        tiers = sorted({row["tier"] for row in rows} & STYLES.keys(), reverse=True)
        loads = {
            tier: statistics.median(row["again_s"] / row["tokens"] for row in rows if row["tier"] == tier)
            for tier in tiers
        }
        return cls(token_s, squared_s, loads)

    def first_token_s(self, served: ServedPrompt, block_tokens: int, tier: str) -> float:
        end = served.num_blocks * block_tokens
        reused = (served.num_on_device + served.num_loaded) * block_tokens
        computed_s = self.token_s * (end - reused) + self.squared_s * (end**2 - reused**2)
        return computed_s + self.load_s[tier] * served.num_loaded * block_tokens


def measured(trace: BlockTrace, device: str, policy: str, costs: Costs) -> list[dict[str, Any]]:
    """A row for each size of the tier."""
    size, rows = capacity(device, trace.num_unique).num_blocks, []
    for factor in FACTORS:
        served = replay_tiered(trace, size, factor * size, policy).served
        reused = sum(each.num_on_device + each.num_loaded for each in served)
        row: dict[str, Any] = {
            "device": device, "device_blocks": size, "factor": factor, "policy": policy,
            "hit_ratio": reused / trace.num_blocks,
            "hit_ratio_device": sum(each.num_on_device for each in served) / trace.num_blocks,
        }  # fmt: skip
        for tier in costs.load_s:
            times = sorted(costs.first_token_s(each, trace.block_tokens, tier) for each in served)
            row[f"{tier}_mean_s"] = statistics.fmean(times)
            row[f"{tier}_median_s"] = statistics.median(times)
        rows.append(row)
        print({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})
    return rows


def draw(folder: Path, trace: BlockTrace, rows: Sequence[dict[str, Any]], costs: Costs) -> Path:
    figure = new_figure(9.0, 3.8)
    hits, times = figure.subplots(1, 2)
    for color, device in zip(PLOT_COLORS, dict.fromkeys(row["device"] for row in rows), strict=False):
        own = [row for row in rows if row["device"] == device]
        hits.plot(
            [100 * row["hit_ratio"] for row in own], color=color, marker="o", ms=3.5, label=f"device {device}"
        )
        for tier in costs.load_s:
            means = [row[f"{tier}_mean_s"] for row in own]
            times.plot(
                means,
                color=color,
                linestyle=STYLES[tier],
                marker="o",
                ms=3.5,
                label=f"{device}, tier on {tier}",
            )
    hits.axhline(
        100 * trace.infinite_ratio, color="#8a8a8a", linewidth=1, linestyle=":", label="never evicts"
    )
    hits.set_title(trace.name, loc="left", fontsize=9)
    hits.set_ylabel("hit blocks, %")
    times.set_ylabel("mean time to first token, s (model)")
    for axes in (hits, times):
        axes.set_ylim(bottom=0)
        axes.set_xticks(range(len(FACTORS)), [str(factor) for factor in FACTORS])
        axes.set_xlabel("size of the tier, in pools of the device")
        axes.legend(frameon=False, fontsize=8)
    return save_figures(folder, {NAME: figure})[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--ttft", type=Path, nargs="+", required=True, help="files of tier_ttft.py --out")
    parser.add_argument("--device", nargs="+", default=["0.5%", "2%"], help="blocks, or a share of all")
    parser.add_argument("--policy", default="adaptive")
    parser.add_argument("--folder", type=Path, required=True, help="for the plot")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    check_folder(asked.folder, "draw")
    costs = Costs.fitted([row for path in asked.ttft for row in json.loads(path.read_text())["rows"]])
    print(costs, flush=True)
    trace = block_trace(read_trace(asked.trace))
    rows = [row for device in asked.device for row in measured(trace, device, asked.policy, costs)]
    print(draw(asked.folder, trace, rows, costs))
    if asked.out is not None:
        results = {
            "environment": asdict(environment()), "trace": {"name": trace.name, "sha256": trace.sha256},
            "costs": asdict(costs), "rows": rows,
        }  # fmt: skip
        asked.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
