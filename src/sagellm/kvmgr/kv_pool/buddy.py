"""`BuddyPool`: free blocks in runs of 2^k, for contiguous allocations.

The binary buddy system: K. C. Knowlton, A fast storage allocator, CACM 8 (10), 1965; D. E. Knuth, The Art of
Computer Programming 1, 2.5.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator

from sagellm.core.clock import Clock
from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.kv_pool import BlockQuota
from sagellm.core.types import BlockIds
from sagellm.kvmgr.kv_pool.pool_base import PoolBase


class BuddyPool(PoolBase):
    """Implements `KVPool`. Free blocks are runs of 2^k that begin at multiples of 2^k.

    An allocation is contiguous wherever one free run is large enough: it is cut from the smallest such run,
    the lowest of several. Otherwise the largest run goes whole, and the rest is looked for in the same way.
    Freed blocks join their buddies. Costs grow with the number of runs, not of blocks. Threads and
    counters: see `PoolBase`.
    """

    def __init__(
        self,
        total_blocks: int,
        block_size: int = 16,
        clock: Clock | None = None,
        quota: BlockQuota | None = None,
    ) -> None:
        super().__init__(total_blocks, block_size, clock, quota)
        self._all = array("i", range(total_blocks))
        # By order k, the first blocks of the free runs of 2^k blocks, negated: in an ascending list the
        # lowest block is at the end then, where a list is quick.
        self._runs: list[list[int]] = [[] for _ in range(total_blocks.bit_length())]
        self._put(self._all)

    def _take(self, num_blocks: int) -> BlockIds:
        taken = array("i")
        while num_blocks:
            order = self._best_order(num_blocks)
            start = -self._runs[order].pop()
            stop = start + min(num_blocks, 1 << order)
            taken.extend(self._all[start:stop])
            self._add_free(stop, start + (1 << order))
            num_blocks -= stop - start
        return taken

    def _put(self, block_ids: BlockIds) -> None:
        for start, stop in self._intervals(block_ids):
            self._add_free(start, stop)

    def _free_ids(self) -> Iterator[int]:
        for order, starts in enumerate(self._runs):
            for start in starts:
                yield from range(-start, -start + (1 << order))

    def _set_free(self, block_ids: BlockIds) -> None:
        for starts in self._runs:
            starts.clear()
        self._put(block_ids)

    def _check_free(self) -> None:
        for order, starts in enumerate(self._runs):
            if starts != sorted(set(starts)):
                raise BookkeepingError(f"free runs of order {order} are out of order: {starts}")
            for start in starts:
                if -start % (1 << order):
                    raise BookkeepingError(f"block {-start} begins a free run of {1 << order}, not aligned")
                buddy = -start ^ (1 << order)
                if -buddy in starts:
                    raise BookkeepingError(f"the free run at block {-start} did not join its buddy")

    def _best_order(self, num_blocks: int) -> int:
        """The order of the smallest free run that is large enough, or the largest."""
        orders = [order for order, starts in enumerate(self._runs) if starts]
        index = bisect_left(orders, (num_blocks - 1).bit_length())
        return orders[min(index, len(orders) - 1)]

    def _add_free(self, start: int, stop: int) -> None:
        """Add blocks [start, stop), in the largest runs that their alignment allows.

        A run whose buddy is free joins it to a run of the next order, and so on.
        """
        while start < stop:
            aligned = start & -start or stop
            order = min(aligned, stop - start).bit_length() - 1
            first = start
            start += 1 << order
            while True:
                starts, buddy = self._runs[order], first ^ (1 << order)
                at = bisect_left(starts, -buddy)
                if at == len(starts) or starts[at] != -buddy:
                    break
                del starts[at]
                first = min(first, buddy)
                order += 1
            insort(starts, -first)

    def _intervals(self, block_ids: BlockIds) -> list[tuple[int, int]]:
        """The ids as sorted intervals [start, stop), none of which touches the next.

        Raises for ids that are not of the pool or come twice, before anything has changed.
        """
        found, at = [], 0
        if block_ids and block_ids == self._all[block_ids[0] : block_ids[0] + len(block_ids)]:
            return [(block_ids[0], block_ids[0] + len(block_ids))]
        while at < len(block_ids):
            length = self._run_length(block_ids, at)
            found.append((block_ids[at], block_ids[at] + length))
            at += length
        found.sort()
        joined: list[tuple[int, int]] = []
        for start, stop in found:
            if start < 0 or stop > self.total_blocks:
                raise self._unknown(start if start < 0 else stop - 1)
            if joined and start < joined[-1][1]:
                raise BookkeepingError(f"block {start} is given back twice at once")
            if joined and start == joined[-1][1]:
                start = joined.pop()[0]
            joined.append((start, stop))
        return joined

    def _run_length(self, block_ids: BlockIds, at: int) -> int:
        """How many ids from index `at` on count up by one.

        Compares slices, not ids: their length doubles while they are equal, and then halves.
        """
        first, length, step, growing = block_ids[at], 1, 1, True
        while step:
            end = length + step
            same = block_ids[at + length : at + end] == self._all[first + length : first + end]
            if same and at + end <= len(block_ids):
                length = end
            else:
                growing = False
            step = step * 2 if growing else step // 2
        return length


PLUGIN = BuddyPool
