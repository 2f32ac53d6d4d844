"""Hits of a device with a larger tier, beside one flat pool.

    python benchmarks/tier_hits.py TRACE --capacity 0.5% --capacity 1% [--policy adaptive] [--factor 10 ...]

The real index, pool, arrivals, tier and hierarchy, block by block, over a storage without bytes; requests
come one after the other, and all that moves has moved before the next one. The flat pool is `sagellm replay`.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

from sagellm.benchmarks.replay.block_trace import block_trace
from sagellm.benchmarks.replay.sweep import ReplaySweepPlan, capacity, run_case
from sagellm.benchmarks.tiered import replay_tiered
from sagellm.benchmarks.traces import read_trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--capacity", action="append", help="of the device; blocks, or a share of all")
    parser.add_argument("--policy", default="adaptive")
    parser.add_argument(
        "--factor", type=int, nargs="+", default=[10], help="slots of the tier for a block of the device"
    )
    asked = parser.parse_args()
    trace = block_trace(read_trace(asked.trace))
    sizes = [capacity(text, trace.num_unique).num_blocks for text in asked.capacity or ["1%"]]
    for size, factor in itertools.product(sizes, asked.factor):
        flats = {"device alone": 1, "flat pool": 1 + factor, "flat pool of the tier": factor}
        print(f"{trace.name}, {asked.policy}, device {size:,} blocks, tier {factor * size:,}:")
        for name, times in flats.items():
            plan = ReplaySweepPlan((asked.policy,), (str(times * size),))
            print(f"  {name}: {run_case(trace, plan, plan.cases(trace)[0]).block_ratio:.2%}", flush=True)
        for name, writes_back in {"write-through": False, "write-back": True}.items():
            served, stored = replay_tiered(trace, size, factor * size, asked.policy, writes_back=writes_back)
            ratio = sum(each.num_on_device + each.num_loaded for each in served) / trace.num_blocks
            print(f"  device and tier, {name}: {ratio:.2%}, {stored:,} blocks written", flush=True)


if __name__ == "__main__":
    main()
