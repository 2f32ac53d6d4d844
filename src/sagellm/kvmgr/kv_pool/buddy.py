"""`BuddyPool`: free blocks in runs of powers of two, so that allocations are contiguous where they can be.

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
from sagellm.kvmgr.kv_pool._ledger import BlockLedger


class BuddyPool(BlockLedger):
    """Implements `KVPool`. Free blocks are runs of 2^k that begin at multiples of 2^k.

    An allocation comes out of the smallest run that holds all of it, the lowest where there are several, so
    that it is contiguous wherever one run is large enough; else the largest run goes whole, and the rest is
    looked for in the same way. Freed blocks join their buddies. Costs grow with the number of runs, not of
    blocks. Threads and counters: see `BlockLedger`.
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
        # By order k, the free runs of 2^k blocks: their first blocks, negated, so that sorted as they are the
        # lowest address is at the end, where a list is quick.
        self._runs: list[list[int]] = [[] for _ in range(total_blocks.bit_length())]
        self._put(self._all)

    def _take(self, num_blocks: int) -> BlockIds:
        taken = array("i")
        while num_blocks:
            order = self._best_order(num_blocks)
            start = -self._runs[order].pop()
            stop = start + min(num_blocks, 1 << order)
            taken.extend(self._all[start:stop])
            self._give(stop, start + (1 << order))
            num_blocks -= stop - start
        return taken

    def _put(self, block_ids: BlockIds) -> None:
        for start, stop in self._stretches(block_ids):
            self._give(start, stop)

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
                if -(-start ^ (1 << order)) in starts:
                    raise BookkeepingError(f"the free run at block {-start} did not join its buddy")

    def _best_order(self, num_blocks: int) -> int:
        """Of the smallest free run that holds so many blocks, or else of the largest."""
        orders = [order for order, starts in enumerate(self._runs) if starts]
        at = bisect_left(orders, (num_blocks - 1).bit_length())
        return orders[min(at, len(orders) - 1)]

    def _give(self, start: int, stop: int) -> None:
        """Blocks [start, stop) are free, in the largest runs that their alignment allows."""
        while start < stop:
            aligned = start & -start or stop
            order = min(aligned, stop - start).bit_length() - 1
            self._join(order, start)
            start += 1 << order

    def _join(self, order: int, start: int) -> None:
        """A run is free: with its buddy, if that is free, it is one of the next order, and so on."""
        while True:
            starts, buddy = self._runs[order], start ^ (1 << order)
            at = bisect_left(starts, -buddy)
            if at == len(starts) or starts[at] != -buddy:
                break
            del starts[at]
            start = min(start, buddy)
            order += 1
        insort(starts, -start)

    def _stretches(self, block_ids: BlockIds) -> list[tuple[int, int]]:
        """The ids as sorted intervals [start, stop), none of which touches the next; errors in them are
        found here, before anything changes."""
        found, at = [], 0
        if block_ids and block_ids == self._all[block_ids[0] : block_ids[0] + len(block_ids)]:
            return [(block_ids[0], block_ids[0] + len(block_ids))]
        while at < len(block_ids):
            length = self._stretch(block_ids, at)
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

    def _stretch(self, block_ids: BlockIds, at: int) -> int:
        """How many ids from place `at` on count up by one; in slices, by doubling, then by halving."""
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
