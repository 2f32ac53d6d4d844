"""Which blocks of each request were used before, and by which request last.

One pass over a trace finds them, for all capacities: the hits of LRU follow from them at once, and the
optimum of `optimum.py` starts from them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sagellm.benchmarks.traces.record import TraceRequest
from sagellm.core.types import Namespace

Ints = npt.NDArray[np.int64]


class Reuse(NamedTuple):
    """Blocks `[start, stop)` of a request's path. Request number `last` used them last before it."""

    start: int
    stop: int
    last: int


def find_reuses(requests: Sequence[TraceRequest]) -> list[list[Reuse]]:
    """Returns the reuses of each request, from its first block on. Blocks that are new have none.

    A request that uses a block uses all blocks in front of it. So along a path the last uses come in falling
    order, and their borders are found by binary search.
    """
    last_uses: dict[Namespace, dict[int, int]] = {}
    found: list[list[Reuse]] = []
    for number, request in enumerate(requests):
        last_use, ids = last_uses.setdefault(request.namespace, {}), request.ids.live
        reuses, start = list[Reuse](), 0
        while start < len(ids) and (last := last_use.get(ids[start])) is not None:
            stop = bisect_left(ids, 1, start + 1, key=lambda block: last_use.get(block) != last)
            reuses.append(Reuse(start, stop, last))
            start = stop
        last_use.update(dict.fromkeys(ids, number))
        found.append(reuses)
    return found


class LRUStack:
    """The hits of LRU at any capacity, from one pass over a trace.

    LRU of `n` blocks holds the `n` blocks that were used last, of one request those nearest to the root. So a
    block is a hit if its stack distance is at most `n` (Mattson, Gecsei, Slutz and Traiger 1970): the number
    of blocks that were used since, its own and those in front of it included. Takes O(log n) per reuse, and
    a sum over the reuses for each capacity.
    """

    def __init__(self, reuses: Sequence[Sequence[Reuse]], lengths: Sequence[int]) -> None:
        self._num_requests = len(lengths)
        rows = [
            (number, reuse.stop - reuse.start, above)
            for number, used in enumerate(_blocks_above(reuses, lengths))
            for reuse, above in zip(reuses[number], used, strict=True)
        ]
        self._rows: Ints = np.array(rows, dtype=np.int64).reshape(-1, 3)

    def hits(self, capacity: int) -> list[int]:
        """Hit blocks of each request in a cache of that many blocks."""
        number, num_blocks, above = self._rows.T
        hit = np.clip(capacity - above, 0, num_blocks)
        hits: list[int] = np.bincount(number, hit, self._num_requests).astype(int).tolist()
        return hits


def _blocks_above(reuses: Sequence[Sequence[Reuse]], lengths: Sequence[int]) -> list[list[int]]:
    """Returns for each reuse how many blocks were used since its last use.

    The blocks of each request that no later one used are in a Fenwick tree, by number of the request.
    """
    size = len(lengths)
    tree = [0] * (size + 1)
    total, found = 0, []
    for number, (used, length) in enumerate(zip(reuses, lengths, strict=True)):
        above = []
        for reuse in used:
            until, place = 0, reuse.last + 1
            while place:
                until += tree[place]
                place &= place - 1
            above.append(total - until)
        found.append(above)
        changes = [(reuse.last, reuse.start - reuse.stop) for reuse in used]
        for changed, change in (*changes, (number, length)):
            total += change
            place = changed + 1
            while place <= size:
                tree[place] += change
                place += place & -place
    return found
