"""`Deadlines`: which transfers to look at now, without a look at the others."""

from __future__ import annotations

import itertools
import math
from heapq import heappop, heappush
from typing import Generic, TypeVar

K = TypeVar("K")


class Deadlines(Generic[K]):
    """A heap of times, one for each key.

    A time may lie before what it stands for: the key is looked at then, and set anew. So progress moves no
    entry, and a transfer that goes on is looked at once in the time that it may be silent.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, K]] = []
        self._due_s: dict[K, float] = {}
        self._order = itertools.count()

    def set(self, key: K, due_s: float) -> None:
        """Have the key looked at no later than then."""
        known_s = self._due_s.get(key)
        if due_s < (math.inf if known_s is None else known_s):
            self._due_s[key] = due_s
            heappush(self._heap, (due_s, next(self._order), key))

    def drop(self, key: K) -> None:
        self._due_s.pop(key, None)

    def take_due(self, now: float) -> list[K]:
        """The keys to look at now. They have no time until they are set again."""
        found = []
        while self.next_s <= now:
            key = heappop(self._heap)[2]
            del self._due_s[key]
            found.append(key)
        return found

    @property
    def next_s(self) -> float:
        """When the next key is due; infinite without any."""
        heap = self._heap
        while heap and self._due_s.get(heap[0][2]) != heap[0][0]:  # dropped, or set to an earlier time
            heappop(heap)
        return heap[0][0] if heap else math.inf
