"""Decode steps with attention and FFN on different devices, simulated, beside whole layers.

    python benchmarks/attention_ffn.py --out FILE

For each model, context and limit of a decode step's time: the most tokens per second and device that any
layout of up to `--devices` devices reaches, by the cost model (docs/simulator.md). Each layout has as many
rows as the limit and its memory allow. Baselines have whole layers: the best layout, which with experts is
mostly data-parallel groups that share them, and the best with tensor parallelism alone. Where the sides have
different devices, a baseline is the same number of devices of each kind in their own layouts. Coefficients
are the defaults, which were guessed for devices with whole layers; what a separated engine costs beyond them
is `--latency`. Prompts are computed elsewhere on both sides of the comparison. A gain is left out where no
baseline fits.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from sagellm.benchmarks.reporting import environment, write_json
from sagellm.engines.simulator.cost_model import CostModel
from sagellm.engines.simulator.devices import DeviceSpec, device
from sagellm.engines.simulator.models import ModelShape, model
from sagellm.engines.simulator.separated import SeparatedCost, whole_cost

MODELS = ("llama-3.1-8b", "llama-3.1-70b", "mixtral-8x7b", "qwen3-30b-a3b")
CONTEXTS = (512, 2048, 8192, 32768)
LIMITS_S = (0.03, 0.1)
PAIRS = (("h100-80g", "h100-80g"), ("h200", "h100-80g"), ("h200", "l40s"), ("l40s", "h100-80g"))
"""The devices of attention and of the FFNs."""
SIZES = (1, 2, 4, 8, 16, 32)
GROUPS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28)
MICRO_BATCHES = (1, 2, 3, 4)
MEMORY_SHARE, MOST_ROWS = 0.9, 4096


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout at its limit. Each of its `groups` has so many `rows`; `devices` are counted by name."""

    text: str
    groups: int
    rows: int
    tokens_per_s: float
    devices: dict[str, int]

    @property
    def per_device(self) -> float:
        return self.tokens_per_s / sum(self.devices.values())


def most_rows(step_s: Callable[[float], float], limit_s: float, most: int) -> int:
    """The largest number of rows whose step keeps the limit; 0 if none does. Steps grow with rows."""
    fewest = 0
    most = min(most, MOST_ROWS)
    while fewest < most:
        middle = (fewest + most + 1) // 2
        if step_s(middle) <= limit_s:
            fewest = middle
        else:
            most = middle - 1
    return fewest


def room(spec: DeviceSpec, weight_bytes: float, shape: ModelShape, shards: int, context: int) -> int:
    """Rows of so much context whose KV fits beside the weights."""
    left = MEMORY_SHARE * spec.memory_bytes - weight_bytes
    return max(0, int(left // (shape.kv_bytes_per_token / min(shards, shape.num_kv_heads) * context)))


def whole_layouts(
    shape: ModelShape, spec: DeviceSpec, context: int, limit_s: float, most_devices: int
) -> Iterator[Layout]:
    """Tensor parallelism, and with experts data-parallel groups that share them."""
    for shards, groups in product(SIZES, SIZES if shape.num_experts else (1,)):
        if shards * groups > most_devices or shape.num_heads % shards:
            continue
        cost = CostModel(spec, shape, tensor_parallel=shards, data_parallel=groups)
        routed = shape.num_experts * shape.expert_params * shape.itemsize
        weights = (shape.weight_bytes - routed) / shards + routed / cost.num_devices
        rows = most_rows(
            lambda n, cost=cost: whole_cost(cost, n, context),  # type: ignore[misc]
            limit_s, room(spec, weights, shape, shards, context),
        )  # fmt: skip
        if rows:
            tokens_per_s = rows * groups / whole_cost(cost, rows, context)
            text = f"tensor {shards}, data {groups}"
            yield Layout(text, groups, rows, tokens_per_s, {spec.name: shards * groups})


def separated_layouts(
    shape: ModelShape, sides: tuple[DeviceSpec, DeviceSpec], context: int, limit_s: float, most_devices: int,
    latency_s: float,
) -> Iterator[Layout]:  # fmt: skip
    attention, ffn = sides
    for groups, shards, num_ffn, turns in product(GROUPS, SIZES, SIZES, MICRO_BATCHES):
        if groups * shards + num_ffn > most_devices or shape.num_heads % shards:
            continue
        cost = SeparatedCost(shape, attention, ffn, groups, shards, num_ffn, turns, latency_s)
        if shape.num_experts % min(num_ffn, shape.num_experts or 1):
            continue
        if cost.ffn_weight_bytes > MEMORY_SHARE * ffn.memory_bytes:
            continue
        fitting = room(attention, cost.attention_weight_bytes, shape, shards, context)
        rows = most_rows(lambda n, cost=cost: cost.step_s(n, context), limit_s, fitting)  # type: ignore[misc]
        if rows:
            devices = {attention.name: groups * shards}
            devices[ffn.name] = devices.get(ffn.name, 0) + num_ffn
            text = f"{groups} x {shards} attention, {num_ffn} FFN, {turns} micro-batches"
            yield Layout(text, groups, rows, rows * groups / cost.step_s(rows, context), devices)


def compared(asked: argparse.Namespace, latency_s: float) -> Iterator[dict[str, Any]]:
    for name, pair in product(MODELS, PAIRS):
        shape, sides = model(name), (device(pair[0]), device(pair[1]))
        for limit_s, context in product(LIMITS_S, CONTEXTS):
            found = {
                side.name: list(whole_layouts(shape, side, context, limit_s, asked.devices)) for side in sides
            }
            whole = {kind: fastest(layouts) for kind, layouts in found.items()}
            tensor = {kind: fastest([own for own in found[kind] if own.groups == 1]) for kind in found}
            best = max(
                separated_layouts(shape, sides, context, limit_s, asked.devices, latency_s),
                key=partial(gain, whole=whole), default=None,
            )  # fmt: skip
            yield {
                "model": name, "attention": pair[0], "ffn": pair[1], "context": context, "limit_s": limit_s,
                "latency_s": latency_s,
                "whole": {kind: best_of and described(best_of) for kind, best_of in whole.items()},
                "tensor": {kind: best_of and described(best_of) for kind, best_of in tensor.items()},
                "separated": best and described(best),
                "gain": None if best is None else rounded(gain(best, whole)),
                "gain_over_tensor": None if best is None else rounded(gain(best, tensor)),
            }  # fmt: skip


def fastest(layouts: Sequence[Layout]) -> Layout | None:
    return max(layouts, key=lambda layout: layout.per_device, default=None)


def gain(layout: Layout, whole: Mapping[str, Layout | None]) -> float:
    """Tokens per second beside those of the same devices with whole layers."""
    each = {kind: found.per_device if found else 0.0 for kind, found in whole.items()}
    alone = sum(count * each[kind] for kind, count in layout.devices.items())
    return layout.tokens_per_s / alone if alone else math.inf


def rounded(value: float) -> float | None:
    return round(value, 3) if math.isfinite(value) else None


def described(layout: Layout) -> str:
    devices = ", ".join(f"{count} {kind}" for kind, count in layout.devices.items())
    rows = layout.rows * layout.groups
    return f"{layout.text} ({devices}): {rows} rows, {layout.per_device:.1f} tokens/s and device"


def line(row: dict[str, Any]) -> str:
    gains = ["-" if row[key] is None else f"{row[key]:.2f}" for key in ("gain", "gain_over_tensor")]
    best = row["separated"] or "does not fit, or misses the limit"
    return (
        f"{row['model']:14} {row['attention']:9} {row['ffn']:9} {row['limit_s'] * 1e3:4.0f} ms "
        f"{row['context']:6} tokens {row['latency_s'] * 1e6:3.0f} us: {gains[0]:>5} {gains[1]:>5}  {best}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--devices", type=int, default=32, help="most devices of a layout")
    parser.add_argument("--latency", type=float, action="append", help="of a message, us; default: 20")
    parser.add_argument("--out", type=Path, help="JSON with all rows")
    asked = parser.parse_args()
    rows = []
    for latency_us in asked.latency or [20.0]:
        for row in compared(asked, latency_us * 1e-6):
            rows.append(row)
            print(line(row), flush=True)
    if asked.out is not None:
        found = {"environment": asdict(environment()), "devices": asked.devices, "rows": rows}
        write_json(asked.out, found)


if __name__ == "__main__":
    main()
