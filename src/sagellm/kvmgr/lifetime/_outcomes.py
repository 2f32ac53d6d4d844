"""Output lengths that were seen lately, and their quantiles given that more than so many tokens came."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

from sagellm.kvmgr.lifetime._quantiles import LEVELS

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Outcomes:
    """The last `window` output lengths, also kept sorted. Adding one costs a binary search and a move."""

    __slots__ = ("_recent", "_sorted", "_window")

    def __init__(self, window: int) -> None:
        self._window = window
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, output: int) -> None:
        self._recent.append(output)
        insort(self._sorted, output)
        if len(self._recent) > self._window:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]

    def remaining(self, generated: int, least: int) -> list[float] | None:
        """The quantiles of what is still to come of an output that has `generated` tokens and goes on.

        None where fewer than `least` of the outputs were longer than that.
        """
        first = bisect_right(self._sorted, generated) if generated else 0
        count = len(self._sorted) - first
        if count < least or count == 0:
            return None
        # The middle of the two neighbours of the level's place: unbiased for a level times count that is
        # whole.
        last = len(self._sorted) - 1
        found = []
        for level in LEVELS:
            place = first + level * count - 0.5
            low = max(first, int(place))
            value: float = self._sorted[low]
            part = place - low
            if part > 0 and low < last:
                value += part * (self._sorted[low + 1] - value)
            found.append(max(0.0, value - generated))
        return found


class Bounded(Generic[Key, Value]):
    """A mapping of at most `limit` entries; the one that was written longest ago goes first."""

    __slots__ = ("_entries", "_limit")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[Key, Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Value | None:
        return self._entries.get(key)

    def put(self, key: Key, value: Value) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._limit:
            self._entries.popitem(last=False)

    def pop(self, key: Key) -> Value | None:
        return self._entries.pop(key, None)
