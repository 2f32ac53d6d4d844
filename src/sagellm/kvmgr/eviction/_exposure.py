"""Ages in bins, and the seconds that lives spent in each: what a hazard is counted against."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

YOUNGEST_S, OLDEST_S, NUM_AGES = 1.0, 7200.0, 24
BORDERS_S: Floats = np.concatenate(([0.0], np.geomspace(YOUNGEST_S, OLDEST_S, NUM_AGES)))
FROM_S: Floats = BORDERS_S[:-1]
WIDTH_S: Floats = np.diff(BORDERS_S)
AGE_ENDS_S: list[float] = [*BORDERS_S[1:-1].tolist(), math.inf]
"""Where the bins of ages end; the last one never does, but no seconds beyond `OLDEST_S` are counted in it."""
_INNER: list[float] = AGE_ENDS_S[:-1]
_GONE = -1
"""The kind that stands in the place of a life that is over."""


def age_bin(age_s: float) -> int:
    """The bin of an age; ages beyond the oldest count as that."""
    return bisect_right(_INNER, age_s)


def seconds_at_risk(kinds: Ints, from_s: Floats, to_s: Floats, num_kinds: int) -> Floats:
    """[kinds, ages]: seconds that lives of each kind spent at each age, one life per `from_s` and `to_s`.

    A life from age 0 on fills the bins below that of its end, and a part of that one; what lies before
    `from_s` is taken off in the same way.
    """
    return _seconds_from_birth(kinds, to_s, num_kinds) - _seconds_from_birth(kinds, from_s, num_kinds)


def _seconds_from_birth(kinds: Ints, ages_s: Floats, num_kinds: int) -> Floats:
    """Two sums per bin do, over the lives that end in it: how many, and their ages."""
    ages_s = np.clip(ages_s, 0.0, OLDEST_S)
    cells = kinds * NUM_AGES + np.searchsorted(_INNER, ages_s, side="right")
    size = num_kinds * NUM_AGES
    ends = np.bincount(cells, minlength=size).reshape(num_kinds, NUM_AGES)
    ended_s = np.bincount(cells, ages_s, size).reshape(num_kinds, NUM_AGES)
    beyond = ends[:, ::-1].cumsum(axis=1)[:, ::-1] - ends
    seconds: Floats = ended_s - ends * FROM_S + beyond * WIDTH_S
    return seconds


class OpenLives:
    """The lives that nothing has ended yet, as columns: kind, birth, and until when they were counted."""

    def __init__(self) -> None:
        self._kind = array("q")
        self._born_s, self._counted_s = array("d"), array("d")
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._kind) - len(self._free)

    def open(self, kind: int, born_s: float, counted_s: float) -> int:
        """Returns the life's place, which is its own until it is closed."""
        if self._free:
            place = self._free.pop()
            self._kind[place], self._born_s[place], self._counted_s[place] = kind, born_s, counted_s
            return place
        self._kind.append(kind)
        self._born_s.append(born_s)
        self._counted_s.append(counted_s)
        return len(self._kind) - 1

    def close(self, place: int) -> float:
        """The life is over; returns until when it was counted."""
        self._kind[place] = _GONE
        self._free.append(place)
        return self._counted_s[place]

    def counted_s(self, place: int) -> float:
        return self._counted_s[place]

    def count(self, now_s: float) -> tuple[Ints, Floats, Floats]:
        """Kinds, ages at the last count, ages now, of all lives; from now on they are counted until now."""
        all_kinds = np.frombuffer(self._kind, dtype=np.int64)
        counted_s = np.frombuffer(self._counted_s)
        open_ = np.flatnonzero(all_kinds != _GONE)
        born_s = np.frombuffer(self._born_s)[open_]
        from_s = counted_s[open_] - born_s
        counted_s[open_] = now_s
        return all_kinds[open_], from_s, now_s - born_s
