"""Metadata per cached block, by resident memory.

Each implementation is weighed in its own process, so that memory which the allocator kept from earlier work
does not hide what it takes:

    python -m sagellm.benchmarks.micro.memory < arguments.json
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator

from sagellm.benchmarks.micro._kv import Prompts, pool_and_index
from sagellm.benchmarks.micro.cases import (
    BLOCK_SIZE,
    BYTES_PER_BLOCK,
    MicroBenchPlan,
    MicroBenchRow,
    Stopwatch,
)
from sagellm.benchmarks.process import STATUS, resident_bytes, run_module
from sagellm.core.errors import CapacityError, ConfigError

EMPTY = "metadata: empty pool and index"
CACHED = "metadata: added by 2,048-token prompts"
TOTAL = "metadata: total"

PROMPT_TOKENS = 2048


def metadata(plan: MicroBenchPlan, stopwatch: Stopwatch) -> Iterator[MicroBenchRow]:
    """Section f: bytes per block of empty structures, cached prompts, and both."""
    if resident_bytes() is None:
        raise ConfigError(f"section f reads resident memory from {STATUS}, which this system does not have")
    for index in plan.variants:
        given = {"index": index, "policy": plan.policy, "num_blocks": plan.memory_blocks, "seed": plan.seed}
        empty, cached, total = run_module(__name__, given, f"weighing {index!r}", CapacityError)
        for case, num_bytes in ((EMPTY, empty), (CACHED, cached), (TOTAL, total)):
            value = round(num_bytes / plan.memory_blocks, 1)
            yield MicroBenchRow("f", case, plan.memory_blocks, index, BYTES_PER_BLOCK, value)


def weigh(index: str, policy: str, num_blocks: int, seed: int) -> tuple[int, int, int]:
    """Returns the bytes of empty structures, of added prompts, and the sum. `num_blocks` blocks of prompts
    are cached, in this process."""
    plan = MicroBenchPlan((index,), policy=policy, seed=seed)
    prompts = Prompts(seed)
    pool_and_index(plan, 1, index=index)  # loads the plug-ins
    before = _collected_bytes()
    kv = pool_and_index(plan, num_blocks, index=index)
    empty = _collected_bytes()
    while kv.pool.num_free:
        kv.cache(prompts.draw(min(PROMPT_TOKENS, kv.pool.num_free * BLOCK_SIZE)))
    full = _collected_bytes()
    return empty - before, full - empty, full - before


def _collected_bytes() -> int:
    gc.collect()
    return resident_bytes() or 0


if __name__ == "__main__":
    print(json.dumps(weigh(**json.load(sys.stdin))))
