"""`sagellm bench micro interconnect`: what the adapter adds to a call of `torch.distributed`.

Section o: an emulated chip whose backend is gloo, in a group of one rank, so that no other rank is waited
for. Each operation runs through the adapter and as the process group's own call, in turns. Sizes are in KB.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from sagellm.benchmarks.micro.cases import MicroBenchmark, MicroBenchPlan, MicroBenchRow, Stopwatch
from sagellm.core.protocols.interconnect import DomesticCommBackend
from sagellm.core.registry import registry

ADAPTER, PLAIN, ADDED = "adapter", "torch.distributed", "added"
CALLS, SIZES_KB = 20, (1, 1024)
Calls = Mapping[str, Callable[[], object]]


def _operations(chip: DomesticCommBackend, num_bytes: int) -> Mapping[str, Calls]:
    """By operation, the call through the adapter and the process group's own."""
    ours = chip.init_process_group(0, 1, HashStore())
    group = dist.ProcessGroupGloo(HashStore(), 0, 1, dist.default_pg_timeout)
    buffer = torch.zeros(num_bytes, dtype=torch.uint8)
    return {
        "all_reduce": {
            ADAPTER: lambda: ours.all_reduce(buffer).wait(),
            PLAIN: partial(_all_reduce, group, buffer),
        },
        "broadcast": {
            ADAPTER: lambda: ours.broadcast(buffer, 0).wait(),
            PLAIN: partial(_broadcast, group, buffer),
        },
        "memory_info": {ADAPTER: lambda: chip.memory_info(0)},
    }


def _all_reduce(group: Any, buffer: torch.Tensor) -> None:
    options: Any = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.SUM
    group.allreduce([buffer], options).wait()


def _broadcast(group: Any, buffer: torch.Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([buffer], options).wait()


def _overhead(plan: MicroBenchPlan, stopwatch: Stopwatch) -> Iterator[MicroBenchRow]:
    """Section o: µs of CPU per call. `ADDED`: the median difference between neighbours."""
    for variant in plan.variants:
        for kb in SIZES_KB:
            chip = registry("interconnect").create(variant)
            for name, calls in _operations(chip, 1024 * kb).items():
                samples: dict[str, list[float]] = {way: [] for way in calls}
                for _ in range(plan.repeats + 1):  # the first is dropped
                    for way, call in calls.items():
                        samples[way].append(_us_per_call(call))
                if PLAIN in calls:
                    pairs = zip(samples[ADAPTER], samples[PLAIN], strict=True)
                    samples[ADDED] = [ours - plain for ours, plain in pairs]
                for way, spent in samples.items():
                    median = statistics.median(spent[1:])
                    yield MicroBenchRow("o", f"{name}, {way}", kb, variant, "us", median)


def _us_per_call(call: Callable[[], object]) -> float:
    start_ns = time.thread_time_ns()
    for _ in range(CALLS):
        call()
    return (time.thread_time_ns() - start_ns) / CALLS / 1000


BENCHMARK = MicroBenchmark(
    "interconnect", lambda: ["emulated"], registry("interconnect").get, {"o": _overhead}
)
