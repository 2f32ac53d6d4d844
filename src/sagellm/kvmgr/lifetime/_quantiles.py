"""Quantiles of predictions, and recent outcomes with their quantiles."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from typing import TypeVar

from sagellm.core.protocols.lifetime import Prediction, PredictionRequest

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

LEVELS = (0.1, 0.25, 0.5, 0.75, 0.9)
MEDIAN = LEVELS.index(0.5)


def prompt_length(request: PredictionRequest) -> int:
    return request.current_length if request.num_prompt_tokens is None else request.num_prompt_tokens


def room_of(request: PredictionRequest) -> int:
    """Tokens that the sequence may still get."""
    return max(0, request.max_length - request.current_length)


def uniform(room: int) -> list[float]:
    """The quantiles without knowledge: every length up to the limit is equally likely."""
    return [room * level for level in LEVELS]


def answer(
    remaining: Sequence[float], seconds_per_token: float, threshold: float, *, known: bool
) -> Prediction:
    """A prediction with these quantiles of remaining tokens.

    Its confidence is 1 where they agree, towards 0 as the middle 80 % spread over many times the median, and
    0 where too little is `known`. It abstains then, and below the threshold.
    """
    median = remaining[MEDIAN]
    confidence = 1 / (1 + (remaining[-1] - remaining[0]) / max(1.0, median)) if known else 0.0
    quantiles = dict(zip(LEVELS, remaining, strict=True))
    abstained = not known or confidence < threshold
    return Prediction(median, median * seconds_per_token, confidence, quantiles, abstained)


def pinball(remaining: Sequence[float], actual: float) -> float:
    """Koenker and Bassett's (1978) quantile loss, summed over `LEVELS`."""
    return sum(
        max(level * (actual - value), (level - 1) * (actual - value))
        for level, value in zip(LEVELS, remaining, strict=True)
    )


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
        """The quantiles of the remaining length of an output with `generated` tokens.

        None where fewer than `least` of the outputs were longer than that."""
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


class Bounded(OrderedDict[Key, Value]):
    """A mapping of at most `limit` entries; the oldest write goes first."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._limit:
            self.popitem(last=False)
