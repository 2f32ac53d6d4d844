"""The offline optimum: the hits of a cache that knows the future.

It evicts the block whose next use is furthest, deeper blocks first on ties (Belady 1966, on prefixes: a
prefix is used whenever a block behind it is, so tails are evicted before heads). It works on runs of blocks
with the same next use, not on single blocks, so a trace of millions of blocks takes seconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from sagellm.benchmarks.replay.reuse import Reuse, find_reuses
from sagellm.benchmarks.traces.record import TraceRequest

NEVER = 1 << 62


@dataclass(slots=True, eq=False)
class _Run:
    """Blocks `[start, stop)` of a path with one next use. Those before `kept` are resident."""

    start: int
    stop: int
    next_use: int
    owner: int
    kept: int


def optimum(requests: Sequence[TraceRequest], capacity: int) -> list[int]:
    """Returns the hit blocks of each request, in order. A request longer than `capacity` blocks is cut to
    it."""
    return optimum_of(find_reuses(requests), [len(request.ids) for request in requests], capacity)


def optimum_of(reuses: Sequence[Sequence[Reuse]], lengths: Sequence[int], capacity: int) -> list[int]:
    """`optimum` of requests whose reuses and blocks are known."""
    lengths = [min(capacity, length) for length in lengths]
    runs = _runs(reuses, lengths)
    arriving: list[list[_Run]] = [[] for _ in lengths]
    heap: list[tuple[int, int, int, _Run]] = []
    hits: list[int] = []
    used = serial = 0
    for number, length in enumerate(lengths):
        hits.append(_leading(arriving[number]))
        for run in arriving[number]:
            used -= run.kept - run.start
            run.kept = run.start
        arriving[number] = []
        for run in runs[number]:
            serial += 1
            heapq.heappush(heap, (-run.next_use, -run.start, serial, run))
            if run.next_use != NEVER:
                arriving[run.next_use].append(run)
        used += length
        used -= _evict(heap, used - capacity, number)
    return hits


def _evict(heap: list[tuple[int, int, int, _Run]], num_blocks: int, current: int) -> int:
    """Evicts that many blocks, none of the current request's; returns their number."""
    missing, own = num_blocks, []
    while missing > 0:
        entry = heapq.heappop(heap)
        run = entry[3]
        if run.owner == current:
            own.append(entry)
            continue
        take = min(missing, run.kept - run.start)
        run.kept -= take
        missing -= take
        if run.kept > run.start:
            heapq.heappush(heap, entry)
    for entry in own:
        heapq.heappush(heap, entry)
    return max(0, num_blocks)


def _leading(runs: list[_Run]) -> int:
    """Returns the number of resident blocks in the leading run."""
    position = 0
    for run in sorted(runs, key=lambda run: run.start):
        if run.start != position:
            break
        position = run.kept
        if run.kept < run.stop:
            break
    return position


def _runs(reuses: Sequence[Sequence[Reuse]], lengths: Sequence[int]) -> list[list[_Run]]:
    """Splits the path of each request where the next use of its blocks changes."""
    made: list[list[_Run]] = [[] for _ in lengths]
    for number, used in enumerate(reuses):
        for start, stop, last in used:
            stop = min(stop, lengths[last])
            if start < stop:
                made[last].append(_Run(start, stop, number, last, stop))
    for number, length in enumerate(lengths):
        start = made[number][-1].stop if made[number] else 0
        if start < length:
            made[number].append(_Run(start, length, NEVER, number, length))
    return made
