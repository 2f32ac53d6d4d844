"""Ghosts: extents that were evicted, so that a policy sees what it should have kept."""

from __future__ import annotations

from collections import OrderedDict

from sagellm.core.errors import BookkeepingError


class GhostQueue:
    """Keys of extents that are gone, with their blocks. The oldest goes first where `trim` says how many may
    stay. (The front of a plain dict that is eaten from there takes time in proportion to what was eaten.)"""

    __slots__ = ("_sizes", "num_blocks")

    def __init__(self) -> None:
        self._sizes: OrderedDict[int, int] = OrderedDict()
        self.num_blocks = 0

    def __contains__(self, key: int) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, key: int, num_blocks: int) -> None:
        """The youngest ghost; one of the same key is replaced."""
        self.num_blocks += num_blocks - self._sizes.pop(key, 0)
        self._sizes[key] = num_blocks

    def size(self, key: int) -> int:
        """Blocks of a ghost that is there."""
        return self._sizes[key]

    def pop(self, key: int) -> int:
        """Take a ghost out; returns its blocks, 0 where there is none."""
        size = self._sizes.pop(key, 0)
        self.num_blocks -= size
        return size

    def trim(self, max_blocks: float) -> None:
        """Forget the oldest until at most `max_blocks` blocks are remembered."""
        while self.num_blocks > max_blocks:
            self.num_blocks -= self._sizes.popitem(last=False)[1]

    def check(self, max_blocks: float) -> None:
        if self.num_blocks != sum(self._sizes.values()) or self.num_blocks > max_blocks:
            raise BookkeepingError(
                f"{len(self._sizes)} ghosts count {self.num_blocks} blocks, their sizes say "
                f"{sum(self._sizes.values())}, at most {max_blocks} may stay"
            )
