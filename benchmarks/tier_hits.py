"""Hits of a device with a larger tier, beside one flat pool.

    python benchmarks/tier_hits.py TRACE --capacity 0.5% --capacity 1% [--policy adaptive] [--factor 10]

The real index, pool, arrivals, tier and hierarchy, block by block, over a storage without bytes; requests
come one after the other, and all that moves has moved before the next one. The flat pool is `sagellm replay`.
"""

from __future__ import annotations

import argparse
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
    parser.add_argument("--factor", type=int, default=10, help="slots of the tier for a block of the device")
    asked = parser.parse_args()
    trace = block_trace(read_trace(asked.trace))
    for text in asked.capacity or ["1%"]:
        size = capacity(text, trace.num_unique).num_blocks
        flats = {"device alone": 1, "flat pool": 1 + asked.factor, "flat pool of the tier": asked.factor}
        print(f"{trace.name}, {asked.policy}, device {size:,} blocks, tier {asked.factor * size:,}:")
        for name, factor in flats.items():
            plan = ReplaySweepPlan((asked.policy,), (str(factor * size),))
            print(f"  {name}: {run_case(trace, plan, plan.cases(trace)[0]).block_ratio:.2%}", flush=True)
        served = replay_tiered(trace, size, asked.factor * size, asked.policy)
        ratio = sum(each.num_on_device + each.num_loaded for each in served) / trace.num_blocks
        print(f"  device and tier: {ratio:.2%}", flush=True)


if __name__ == "__main__":
    main()
