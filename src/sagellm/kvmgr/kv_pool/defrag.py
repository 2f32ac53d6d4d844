"""Compaction: which blocks to copy where, so that free blocks form one run.

A plan changes nothing. Its caller has the backend execute `as_copies`, and then calls `remap` of the pool and
of every holder of blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sagellm.core.errors import BookkeepingError
from sagellm.core.plan import BlockCopy


def plan_compaction(used: Iterable[int], total_blocks: int, max_copies: int | None = None) -> dict[int, int]:
    """Moves from source to target: the highest used blocks go into the lowest holes.

    No target is a source, so the copies may run in any order. Plans of at most `max_copies` copies are
    prefixes of one list; the result is the shortest of those that leave the longest free run. So it never
    raises `get_fragmentation`, and without a limit makes it 0.
    """
    taken = bytearray(total_blocks)
    for block in used:
        if not 0 <= block < total_blocks:
            raise BookkeepingError(f"no block {block}: the pool has blocks 0 to {total_blocks - 1}")
        if taken[block]:
            raise BookkeepingError(f"block {block} is used twice")
        taken[block] = 1
    num_used = taken.count(1)
    sources = [block for block in range(total_blocks - 1, num_used - 1, -1) if taken[block]]
    targets = [block for block in range(num_used) if not taken[block]]
    most = len(sources) if max_copies is None else min(len(sources), max(0, max_copies))
    longest = _longest_runs(taken, sources, targets)
    best = max(range(most + 1), key=longest.__getitem__)
    return dict(zip(sources[:best], targets[:best], strict=True))


def as_copies(moves: Mapping[int, int]) -> list[BlockCopy]:
    """The moves as copies, for the plan that a backend executes."""
    return [BlockCopy(source, target) for source, target in moves.items()]


def _longest_runs(taken: bytearray, sources: Sequence[int], targets: Sequence[int]) -> list[int]:
    """The longest free run after the first n moves, for n from 0 on.

    It is the run behind the last used block, or a run of holes above the filled ones.
    """
    num_used = taken.count(1)
    longest_from = [0] * (len(taken) + 1)
    run = 0
    for block in range(len(taken) - 1, -1, -1):
        run = 0 if taken[block] else run + 1
        longest_from[block] = max(run, longest_from[block + 1])
    last_used = [*sources, num_used - 1]
    first_hole = [*targets, num_used]
    return [
        max(len(taken) - 1 - last, longest_from[hole])
        for last, hole in zip(last_used, first_hole, strict=True)
    ]
