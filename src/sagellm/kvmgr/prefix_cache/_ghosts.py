"""Ghosts: records of evicted extents, without their blocks."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", int, bytes)


class Ghost(NamedTuple):
    """An eviction: the clock's seconds and the cause."""

    at_s: float
    cause: str


class Ghosts(Generic[K]):
    """The last `limit` evictions by key (None: all); the oldest is forgotten first."""

    def __init__(self, limit: int | None) -> None:
        self.limit = math.inf if limit is None else limit
        self._ghosts: OrderedDict[K, Ghost] = OrderedDict()

    def add(self, key: K, ghost: Ghost) -> None:
        ghosts = self._ghosts
        ghosts[key] = ghost
        if len(ghosts) > self.limit:
            ghosts.popitem(last=False)

    def get(self, key: K) -> Ghost | None:
        return self._ghosts.get(key)

    def discard(self, key: K) -> None:
        """Forget a ghost, if there is one: its extent is resident again."""
        self._ghosts.pop(key, None)

    def __len__(self) -> int:
        return len(self._ghosts)
