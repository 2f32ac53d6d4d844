"""Hints that every policy takes: what has ended goes first, what a waiting request needs goes last."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.eviction import Extent, Hint
from sagellm.kvmgr.eviction._queue import ExtentQueue, recency

Home = tuple[ExtentQueue, Any]


class HintLanes:
    """Two queues beside those of the policy, for extents that a hint took out of its order.

    `home` says where in the policy's own order each of them stands. `wanted_by` counts the waiting requests
    of extents in the policy's hands or out on loan; each use takes one away.
    """

    __slots__ = ("ended", "home", "wanted", "wanted_by")

    def __init__(self) -> None:
        self.ended = ExtentQueue()
        self.wanted = ExtentQueue()
        self.home: dict[int, Home] = {}
        self.wanted_by: OrderedDict[int, int] = OrderedDict()

    def note(self, key: int, hint: Hint, max_keys: int) -> None:
        """Remember how many wait for an extent; of too many, the oldest wish is forgotten."""
        wanted = hint.wanted
        if wanted is None:
            return
        self.wanted_by.pop(key, None)
        if wanted > 0:
            self.wanted_by[key] = wanted
            if len(self.wanted_by) > max_keys:
                self.wanted_by.popitem(last=False)

    def used(self, key: int) -> None:
        """One of those who waited got it."""
        waiting = self.wanted_by.pop(key, 0) - 1
        if waiting > 0:
            self.wanted_by[key] = waiting

    def lane(self, key: int, hint: Hint) -> ExtentQueue | None:
        """The lane that an extent belongs into after the hint; None: its place in the policy's order."""
        if key in self.wanted_by:
            return self.wanted
        return self.ended if hint.ended or hint.superseded else None

    def enter(self, lane: ExtentQueue, extent: Extent, home: Home, size: int) -> None:
        self.home[extent.key] = home
        lane.push(recency(extent), extent, extent.num_blocks, size)

    def check(self, max_keys: int) -> None:
        self.ended.check()
        self.wanted.check()
        if self.home.keys() != self.ended.live.keys() | self.wanted.live.keys():
            raise BookkeepingError("an extent that a hint took out of the order has no place to return to")
        if len(self.wanted_by) > max_keys:
            raise BookkeepingError(f"{len(self.wanted_by)} wishes are remembered, at most {max_keys} may be")
