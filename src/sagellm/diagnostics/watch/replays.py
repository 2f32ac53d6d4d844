"""Replays of whole requests: LRU, the offline optimum, and any policy.

Policies run through the real prefix index; all run in processes if asked to.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import pairwise
from multiprocessing import active_children, get_context

from sagellm.benchmarks.replay.optimum import optimum_of
from sagellm.benchmarks.replay.replayer import replay
from sagellm.benchmarks.replay.reuse import LRUStack, Reuse, find_reuses
from sagellm.benchmarks.traces import TraceRequest
from sagellm.core.clock import ManualClock
from sagellm.core.errors import CapacityError
from sagellm.core.registry import registry
from sagellm.core.types import Namespace, Tokens
from sagellm.diagnostics.watch.accesses import CacheAccess
from sagellm.engines.build_kv import make_policy


@dataclass(frozen=True, slots=True)
class WatchReplay:
    """The requests of one instance in a cache of `num_blocks`.

    `instance` None: those of all in one cache. `policy` is a registered eviction policy, or `optimum`.
    `num_initial`: see `WatchedRequests`.
    """

    instance: int | None
    policy: str
    num_blocks: int
    num_initial: int = 0


OnReplay = Callable[[WatchReplay, int, int], None]
"""Gets each replay that has ended, how many have, and how many there are."""


class WatchedRequests:
    """Requests of one cache, ready for replays at any capacity.

    **Warm start.** A block that the server hit when it was first seen was in its cache when the watch began.
    Requests that are not counted put these blocks into the replay's cache: the block that is hit first is the
    youngest. `num_initial`: with them go blocks that are never asked for, so many that the server's cache at
    the start had `num_initial` blocks in all. They are for smaller caches, which held a part of its blocks.
    """

    def __init__(self, accesses: Sequence[CacheAccess], num_initial: int = 0) -> None:
        initial = _initial_paths(accesses)
        if initial:
            initial = _mixed(initial, _never_asked_for(accesses, initial, num_initial))
        began_s = accesses[0].time_s if accesses else 0.0
        self._num_initial = len(initial)
        self._requests = [TraceRequest(0.0, Tokens(path), Namespace(), len(path), 0) for path in initial]
        self._requests += [
            TraceRequest(
                time_s=access.time_s - began_s,
                ids=access.blocks,
                namespace=Namespace(),
                num_input_tokens=access.num_queried,
                num_output_tokens=len(access.blocks) - access.num_queried,
            )
            for access in accesses
        ]
        self._lengths = [len(request.ids) for request in self._requests]

    @cached_property
    def num_distinct(self) -> int:
        """Different blocks: a cache of so many never evicts."""
        return sum(self._lengths) - sum(reuse.stop - reuse.start for used in self._reuses for reuse in used)

    def hits(self, policy: str, capacity: int) -> list[int]:
        """Prompt blocks that each request finds in a cache of `capacity` blocks.

        Blocks of answers are stored, and are no hits. For the optimum, storing a block that was stored before
        is a use like any other.
        """
        if policy == "lru" or capacity >= self.num_distinct:  # then all policies hit the same
            return self._counted(self._stack.hits(capacity))
        if policy == "optimum":
            return self._counted(optimum_of(self._reuses, self._lengths, capacity))
        return self.hits_of_index(policy, capacity)

    def hits_of_index(self, policy: str, capacity: int) -> list[int]:
        """`hits` by the real prefix index, for any registered policy."""
        clock = ManualClock(0.0)
        index = registry("index").create(
            "radix",
            block_size=1,
            policy_factory=lambda: make_policy(policy, capacity=capacity, clock=clock, seed=0),
            clock=clock,
        )
        return self._counted(replay(self._requests, index, clock, capacity).hits)

    @cached_property
    def _reuses(self) -> list[list[Reuse]]:
        return find_reuses(self._requests)

    @cached_property
    def _stack(self) -> LRUStack:
        return LRUStack(self._reuses, self._lengths)

    def _counted(self, hits: Sequence[int]) -> list[int]:
        first = self._num_initial
        counted = zip(hits[first:], self._requests[first:], strict=True)
        return [min(hit, request.num_input_tokens) for hit, request in counted]


def _initial_paths(accesses: Sequence[CacheAccess]) -> list[Sequence[int]]:
    """The paths that the server had before the first request, the oldest first."""
    seen = set[int]()
    paths: list[Sequence[int]] = []
    for access in accesses:
        hit = access.blocks.slice(0, access.num_hit)
        if not seen.issuperset(hit):
            paths.append(hit)
        seen.update(access.blocks)
    return paths[::-1]


def _never_asked_for(
    accesses: Sequence[CacheAccess], initial: Sequence[Sequence[int]], num_initial: int
) -> list[Sequence[int]]:
    """A path of unknown blocks for each known one, `num_initial` blocks in all."""
    missing = num_initial - len(set[int]().union(*initial))
    first = 1 + max(max(access.blocks, default=0) for access in accesses)
    borders = [first + max(0, missing) * number // len(initial) for number in range(len(initial) + 1)]
    return [range(start, stop) for start, stop in pairwise(borders)]


def _mixed(initial: Sequence[Sequence[int]], unknown: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """Both in turn, without empty paths."""
    return [path for pair in zip(unknown, initial, strict=True) for path in pair if path]


def run_cases(
    accesses: Sequence[CacheAccess],
    cases: Sequence[WatchReplay],
    jobs: int = 1,
    on_replay: OnReplay = lambda case, num_done, num_all: None,
) -> dict[WatchReplay, int]:
    """Hit prompt blocks of each case. With more than one job, in processes, each of which gets the requests
    once. A `KeyboardInterrupt` ends the replays: the result lacks the cases that had not ended. Raises
    `CapacityError` if a process dies."""
    run_in_turn = _in_one_process if min(jobs, len(cases)) <= 1 else partial(_in_processes, jobs=jobs)
    hits: dict[WatchReplay, int] = {}

    def note(case: WatchReplay, num_hit: int) -> None:
        hits[case] = num_hit
        on_replay(case, len(hits), len(cases))

    try:
        run_in_turn(accesses, cases, note)
    except KeyboardInterrupt:
        pass
    except BrokenProcessPool as error:
        raise CapacityError("a process of the replays died, maybe of memory: try fewer jobs") from error
    return hits


def _in_one_process(
    accesses: Sequence[CacheAccess], cases: Sequence[WatchReplay], note: Callable[[WatchReplay, int], None]
) -> None:
    run = _runner(accesses)
    for case in cases:
        note(case, run(case))


def _in_processes(
    accesses: Sequence[CacheAccess],
    cases: Sequence[WatchReplay],
    note: Callable[[WatchReplay, int], None],
    jobs: int,
) -> None:
    others = set(active_children())
    with ProcessPoolExecutor(min(jobs, len(cases)), get_context("spawn"), _set_run, (accesses,)) as pool:
        case_of = {pool.submit(_run_in_pool, case): case for case in cases}
        try:
            for future in as_completed(case_of):
                note(case_of[future], future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(active_children()) - others:
                process.terminate()
            raise


def _runner(accesses: Sequence[CacheAccess]) -> Callable[[WatchReplay], int]:
    """Runs cases, and makes the requests of an instance ready once."""

    @cache
    def requests_of(instance: int | None, num_initial: int) -> WatchedRequests:
        own = [access for access in accesses if instance in (None, access.instance)]
        return WatchedRequests(own, num_initial)

    def run(case: WatchReplay) -> int:
        return sum(requests_of(case.instance, case.num_initial).hits(case.policy, case.num_blocks))

    return run


# Each process of the pool gets the requests once; functions that the pool calls find them in a global only.
_runs: list[Callable[[WatchReplay], int]] = []


def _set_run(accesses: Sequence[CacheAccess]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent ends its children
    _runs.append(_runner(accesses))


def _run_in_pool(case: WatchReplay) -> int:
    return _runs[-1](case)
