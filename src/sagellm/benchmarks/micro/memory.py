"""Metadata per cached block, by resident memory.

Each implementation is weighed in a process of its own, so that memory which the allocator kept from earlier
work is not taken for nothing:

    python -m sagellm.benchmarks.micro.memory '{"index": "radix", ...}'
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from sagellm.benchmarks.micro._kv import Prompts, pool_and_index
from sagellm.benchmarks.micro.cases import (
    BLOCK_SIZE,
    BYTES_PER_BLOCK,
    MicroBenchPlan,
    MicroBenchRow,
    Stopwatch,
)
from sagellm.core.errors import CapacityError, ConfigError

EMPTY = "metadata: empty pool and index"
CACHED = "metadata: added by 2,048-token prompts"
TOTAL = "metadata: total"
STATM = Path("/proc/self/statm")
PROMPT_TOKENS = 2048


def metadata(plan: MicroBenchPlan, stopwatch: Stopwatch) -> Iterator[MicroBenchRow]:
    """Section f: bytes per block of the empty pool and index, of what prompts add, and of both."""
    if not STATM.exists():
        raise ConfigError(f"section f reads resident memory from {STATM}, which this system does not have")
    for index in plan.variants:
        empty, cached, total = _weigh_apart(plan, index)
        for case, num_bytes in ((EMPTY, empty), (CACHED, cached), (TOTAL, total)):
            value = round(num_bytes / plan.memory_blocks, 1)
            yield MicroBenchRow("f", case, plan.memory_blocks, index, BYTES_PER_BLOCK, value)


def weigh(index: str, policy: str, num_blocks: int, seed: int) -> tuple[int, int, int]:
    """Bytes that an empty pool and index take in this process, that `num_blocks` blocks of cached prompts
    add, and the sum."""
    plan = MicroBenchPlan((index,), policy=policy, seed=seed)
    prompts = Prompts(seed)
    pool_and_index(plan, 1, index=index)  # loads the plug-ins
    before = _resident_bytes()
    kv = pool_and_index(plan, num_blocks, index=index)
    empty = _resident_bytes()
    while kv.pool.num_free:
        kv.cache(prompts.draw(min(PROMPT_TOKENS, kv.pool.num_free * BLOCK_SIZE)))
    full = _resident_bytes()
    return empty - before, full - empty, full - before


def _weigh_apart(plan: MicroBenchPlan, index: str) -> list[int]:
    arguments = {"index": index, "policy": plan.policy, "num_blocks": plan.memory_blocks, "seed": plan.seed}
    done = subprocess.run(
        [sys.executable, "-m", __name__, json.dumps(arguments)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise CapacityError(f"weighing {index!r} failed: {' '.join(last) or done.returncode}")
    weights: list[int] = json.loads(done.stdout)
    return weights


def _resident_bytes() -> int:
    gc.collect()
    return int(STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    print(json.dumps(weigh(**json.loads(sys.argv[1]))))
