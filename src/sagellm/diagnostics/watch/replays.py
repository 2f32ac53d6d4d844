"""Replays of whole requests through the real prefix index and policies.

They run in processes if asked to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

from sagellm.benchmarks.replay.optimum import optimum
from sagellm.benchmarks.replay.replayer import replay
from sagellm.benchmarks.traces import TraceRequest
from sagellm.core.clock import ManualClock
from sagellm.core.errors import CapacityError
from sagellm.core.registry import registry
from sagellm.core.types import Namespace
from sagellm.diagnostics.watch.accesses import CacheAccess
from sagellm.engines.build import make_policy


@dataclass(frozen=True, slots=True)
class WatchReplay:
    """The requests of one instance in a cache of `num_blocks`.

    `instance` None: those of all in one cache. `policy` is a registered eviction policy, or `optimum`.
    """

    instance: int | None
    policy: str
    num_blocks: int


def hit_blocks(accesses: Sequence[CacheAccess], policy: str, capacity: int) -> int:
    """Prompt blocks that requests find in a cache.

    It has `capacity` blocks and is empty at first. Blocks of answers are stored, and are no hits. For the
    optimum, storing a block that was stored before is a use like any other.
    """
    requests = [
        TraceRequest(
            time_s=access.time_s - accesses[0].time_s,
            ids=access.blocks,
            namespace=Namespace(),
            num_input_tokens=access.num_queried,
            num_output_tokens=len(access.blocks) - access.num_queried,
        )
        for access in accesses
    ]
    if policy == "optimum":
        hits: Sequence[int] = optimum(requests, capacity)
    else:
        clock = ManualClock(0.0)
        index = registry("index").create(
            "radix",
            block_size=1,
            policy_factory=lambda: make_policy(policy, capacity=capacity, clock=clock, seed=0),
            clock=clock,
        )
        hits = replay(requests, index, clock, capacity).hits
    return sum(min(hit, access.num_queried) for hit, access in zip(hits, accesses, strict=True))


def run_case(accesses: Sequence[CacheAccess], case: WatchReplay) -> int:
    """Hit prompt blocks of one replay; `accesses` are those of all instances."""
    own = [access for access in accesses if case.instance in (None, access.instance)]
    return hit_blocks(own, case.policy, case.num_blocks) if own else 0


def run_cases(
    accesses: Sequence[CacheAccess], cases: Sequence[WatchReplay], jobs: int = 1
) -> dict[WatchReplay, int]:
    """Hit prompt blocks of each case. With more than one job, in processes, each of which gets the requests
    once. Raises `CapacityError` if a process dies."""
    run = partial(run_case, accesses)
    jobs = min(jobs, len(cases))
    if jobs <= 1:
        return {case: run(case) for case in cases}
    with ProcessPoolExecutor(jobs, get_context("spawn"), _set_run, (run,)) as pool:
        try:
            return dict(zip(cases, pool.map(_run_in_pool, cases), strict=True))
        except BrokenProcessPool as error:
            raise CapacityError("a process of the replays died, maybe of memory: try fewer jobs") from error


# Each process of the pool gets the requests once; functions that the pool calls find them in a global only.
_runs: list[Callable[[WatchReplay], int]] = []


def _set_run(run: Callable[[WatchReplay], int]) -> None:
    _runs.append(run)


def _run_in_pool(case: WatchReplay) -> int:
    return _runs[-1](case)
