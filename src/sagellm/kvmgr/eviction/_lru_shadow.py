"""What LRU would have kept: a cache of sizes alone, one entry per branch of the tree of prompts."""

from __future__ import annotations

from collections import OrderedDict

Lineage = tuple[tuple[int, int], ...]
"""Branches from the oldest on: the number of each, and the block at which it leaves the one before."""


class LRUShadow:
    """Branches in order of use, cut from the end of the one used longest ago. A use of a branch is a use of
    those that it grows from, up to where it leaves them."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, tuple[int, int]] = OrderedDict()  # base, end of what is kept
        self.num_blocks = 0

    def use(self, lineage: Lineage, end: int) -> int:
        """The last branch of a lineage is used, and ends at block `end` now; returns how many leading blocks,
        those of its ancestors included, were kept until then."""
        found = stop = end
        kept_of = self._kept
        for place, (path, base) in enumerate(reversed(lineage)):
            kept = kept_of.pop(path, (base, base))[1]
            if kept < stop:
                found = kept
            new = max(kept, stop) if place else stop
            kept_of[path] = (base, new)
            self.num_blocks += new - kept
            stop = base
        return found

    def shrink(self, capacity: int) -> None:
        """Give up what is more than `capacity` blocks."""
        while self.num_blocks > capacity and self._kept:
            path, (base, kept) = next(iter(self._kept.items()))
            excess = self.num_blocks - capacity
            if kept - base > excess:
                self._kept[path] = (base, kept - excess)
                self.num_blocks = capacity
            else:
                del self._kept[path]
                self.num_blocks -= kept - base
