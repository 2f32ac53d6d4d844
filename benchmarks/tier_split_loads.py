"""Simulated time to first token of an evicted prompt: loaded whole, or in part.

    python benchmarks/tier_split_loads.py

An H100 with Llama 3.1 8B, in simulated time: the same figures on every machine. A prompt is computed in turns
of 4,096 tokens, saved and evicted, and asked again, alone. `computed`: without tiers. `whole`: all of its KV
is loaded, or all is computed, whichever takes less. `split`: the head is computed while the tail is loaded,
where that saves 10 %. The bandwidths stand for a shared store or a disk; the last is host memory over PCIe.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

from sagellm.core.clock import ManualClock
from sagellm.core.config_layers import given_layer, resolve
from sagellm.core.types import Request, SamplingParams, Tokens
from sagellm.engines.build import build_engine
from sagellm.engines.engine import Engine
from sagellm.engines.simulator.backend import configured_backend
from sagellm.engines.simulator.cost_model import CostModel
from sagellm.engines.simulator.devices import device
from sagellm.engines.simulator.models import model
from sagellm.kvmgr.kv_pool.tiers import hierarchy

GB = 1e9
BANDWIDTHS = (1 * GB, 2.5 * GB, 5 * GB, 10 * GB)
LENGTHS = (4096, 8192, 32768)


def engine_with(tier: str, bytes_per_s: float) -> Engine:
    """An engine with one tier of so many bytes per second, or none."""
    values: dict[str, Any] = {
        "kv.num_blocks": 12_000,
        "scheduler.max_batched_tokens": 4096,
        **({tier: 64.0} if tier else {}),
    }
    if tier == "kv.disk_gb":
        values["kv.dir"] = "simulated"
    config = resolve([given_layer(values)]).config
    h100 = device("h100-80g")
    if tier == "kv.host_gb":
        h100 = replace(h100, pcie=bytes_per_s)
    elif tier:
        h100 = replace(h100, nvme=bytes_per_s)
    backend = configured_backend(CostModel(h100, model("llama-3.1-8b")), config, ManualClock())
    return build_engine(config, backend)


def first_token_s(engine: Engine, name: str, num_tokens: int) -> float:
    """Seconds until a request that is alone has its token; then all moves end."""
    began_s = engine.clock.now()
    engine.add(Request(name, Tokens(range(num_tokens)), SamplingParams(0.0, max_tokens=1), arrival_s=began_s))
    spent_s = 0.0
    while engine.has_work():
        if engine.step():
            spent_s = engine.clock.now() - began_s
    return spent_s


def measured(tier: str, bytes_per_s: float, num_tokens: int) -> tuple[float, int]:
    """Seconds to the first token of an evicted prompt, and blocks that it loaded."""
    engine = engine_with(tier, bytes_per_s)
    for length in range(4096, num_tokens + 1, 4096):  # a conversation: what is saved at once is below 1 GiB
        first_token_s(engine, f"turn {length}", length)
    engine.clear_cache()
    spent_s = first_token_s(engine, "again", num_tokens)
    return spent_s, sum(state.loaded for state in engine.diagnostics().tiers)


def main() -> None:
    print("| prompt | tier | computed | whole | split | saved | loaded |")
    print("|---|---|---|---|---|---|---|")
    for num_tokens in LENGTHS:
        computed_s, _ = measured("", 0.0, num_tokens)
        for tier, rate in (*(("kv.disk_gb", rate) for rate in BANDWIDTHS), ("kv.host_gb", 50 * GB)):
            with patch.object(hierarchy, "first_of_tail", lambda *_: None):
                whole_s, _ = measured(tier, rate, num_tokens)
            split_s, num_loaded = measured(tier, rate, num_tokens)
            name = "host memory" if tier == "kv.host_gb" else "disk or store"
            times = " | ".join(f"{1e3 * spent_s:.0f} ms" for spent_s in (computed_s, whole_s, split_s))
            saved, share = 1 - split_s / whole_s, 16 * num_loaded / num_tokens
            print(f"| {num_tokens:,} | {name}, {rate / GB:g} GB/s | {times} | {saved:.0%} | {share:.0%} |")


if __name__ == "__main__":
    main()
