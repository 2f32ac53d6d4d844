"""When will an extent be used again: a model of reuse hazards, learned online.

It learns from all extents, kept or evicted. The hazard of reuse (1/s) at an age is a base rate at that age
times one factor per feature and age: a multiplicative intensity model (Clayton and Cuzick 1985), fitted by
proportional fitting to counts of uses and seconds at risk, with shrinkage, so that with few data the factors
stay near 1. The value of an extent is the best ratio, over all times to give it up, of expected uses to
expected seconds of memory: Gittins' index (1979), which is hit density (Beckmann, Chen and Cidon, "LHD",
2018) without its assumption about when to stop.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Features = tuple[int, ...]
"""Small non-negative integers, each below `LEVELS`."""

YOUNGEST_S, OLDEST_S, NUM_AGES = 1.0, 7200.0, 24
BORDERS_S: Floats = np.concatenate(([0.0], np.geomspace(YOUNGEST_S, OLDEST_S, NUM_AGES)))
"""Ages are counted in `NUM_AGES` bins; no seconds beyond `OLDEST_S` are counted."""
FROM_S: Floats = BORDERS_S[:-1]
WIDTH_S: Floats = np.diff(BORDERS_S)
AGE_ENDS_S: list[float] = [*BORDERS_S[1:-1].tolist(), math.inf]
"""Where each bin ends; the last one has no end."""
_INNER: list[float] = AGE_ENDS_S[:-1]

LEVELS = 8
MAX_KINDS = 2048
MAX_HAZARD = 2.0
MANY_SPANS = 8192
MAX_USES = 600.0
"""Expected uses beyond which the chance to survive is too small for a floating point number."""
FIRST_FITS, FIRST_ROUNDS = 4, 3
"""The first fits take so many rounds; later ones start from factors that are nearly right, and take one."""
PART = 1024
"""A part of a fit takes in at most so many factors of kinds: about 0.4 ms."""
PART_KINDS = 64
"""A part of a fit computes the values of at most so many kinds: about 0.3 ms."""
_WIDTHS: list[float] = WIDTH_S.tolist()
_STARTS, _STOPS = np.triu_indices(NUM_AGES - 1, 1, NUM_AGES + 1)
"""All spans from the start of an age to the end of it or of a later one, by start."""
_FIRST_STOPS = np.searchsorted(_STARTS, np.arange(NUM_AGES - 1))
_MIDDLE_S = np.sqrt(np.maximum(FROM_S, YOUNGEST_S / 2) * BORDERS_S[1:])
_NEAR = np.maximum(0.0, 1.5 - 0.5 * np.abs(np.subtract.outer(np.arange(NUM_AGES), np.arange(NUM_AGES))))
_NEAR[_NEAR > 1.0] = 1.0
"""How much the bins near an age count for it: 1 for itself and the next, 1/2 for the one after."""


class ReuseModel:
    """Counts uses and seconds by kind and age; `fit` turns them into values.

    A kind is a tuple of features. `shrinkage`: a factor leaves 1 as far as the data outweigh so many uses.
    `half_life`: records after which older counts weigh half. `early_s`: until about this age the prior hardly
    falls. `values`: [kinds][ages], expected uses per second of memory at the best time to stop.
    """

    def __init__(
        self,
        num_features: int,
        *,
        shrinkage: float = 4.0,
        half_life: float = 20_000.0,
        early_s: float = 20.0,
    ) -> None:
        self.num_fits = 0
        self.values: list[list[float]] = []
        self._shrinkage, self._half_life = shrinkage, half_life
        self._kinds: dict[Features, int] = {}
        self._features = np.zeros((0, num_features), dtype=np.int64)
        self._uses: Floats = np.zeros((0, NUM_AGES))
        self._at_risk_s: Floats = np.zeros((0, NUM_AGES))
        self._spans = (array("q"), array("d"), array("d"))
        self._factors: Floats = np.ones((num_features, LEVELS, NUM_AGES))
        self._base: Floats = np.zeros(NUM_AGES)
        self._prior: Floats = 1.0 / (_MIDDLE_S + early_s)

    def __len__(self) -> int:
        return len(self._kinds)

    def kind(self, features: Features) -> int:
        """The row of a tuple of features. Beyond `MAX_KINDS` rows all new tuples share one."""
        row = self._kinds.get(features)
        if row is not None:
            return row
        if len(self._kinds) >= MAX_KINDS:
            features = tuple(0 for _ in features)
            if features in self._kinds:
                return self._kinds[features]
        row = self._kinds[features] = len(self._kinds)
        if row >= len(self._uses):
            self._grow()
        self._features[row] = features
        if self.num_fits:
            hazards = self._hazards(self._products(slice(row, row + 1)))
            self.values.append(_values_of_one(hazards[0].tolist()))
        return row

    def used(self, kind: int, age_s: float, weight: float = 1.0) -> None:
        """A path of that kind was used at that age."""
        self._uses[kind, age_bin(age_s)] += weight

    def at_risk(self, kind: int, from_s: float, to_s: float) -> None:
        """A path of that kind was not used from one age to another."""
        kinds, froms_s, tos_s = self._spans
        kinds.append(kind)
        froms_s.append(from_s)
        tos_s.append(to_s)
        if len(kinds) >= MANY_SPANS:
            self._count_spans()

    def all_at_risk(self, kinds: Ints, from_s: Floats, to_s: Floats) -> None:
        """`at_risk` for many paths at once."""
        rows = len(self._kinds)
        self._at_risk_s[:rows] += seconds_at_risk(kinds, from_s, to_s, rows)

    def fit(self, num_new: int) -> None:
        """Learn from the counts so far; `num_new` records began since the last fit. Takes a few ms."""
        for _ in self.fit_in_parts(num_new):
            pass

    def fit_in_parts(self, num_new: int) -> Iterator[None]:
        """`fit`, interrupted by a yield after each part.

        It learns from the counts at its start, and `values` change with the last part. Between parts the
        model may be used and count on; two fits must not overlap.
        """
        self._count_spans()
        rows = len(self._kinds)
        uses, at_risk_s = self._uses[:rows].copy(), self._at_risk_s[:rows].copy()
        fade = 0.5 ** (num_new / self._half_life)
        self._uses[:rows] *= fade
        self._at_risk_s[:rows] *= fade
        levels = self._features[:rows].T
        members = [np.equal.outer(np.arange(LEVELS), of_kinds).astype(float) for of_kinds in levels]
        seen = [of_level @ uses for of_level in members]
        products = self._products(slice(0, rows))
        part_features = max(1, PART // max(1, rows))
        for _ in range(FIRST_ROUNDS if self.num_fits < FIRST_FITS else 1):
            yield
            self._fit_base(uses, at_risk_s * products)
            expected = at_risk_s * self._hazards(products)
            for number, of_level in enumerate(members):
                if number and number % part_features == 0:
                    yield
                change = self._fit_factor(number, seen[number], of_level @ expected)[levels[number]]
                expected *= change
                products *= change
        values: list[list[float]] = []
        while len(values) < len(self._kinds):  # new kinds may have come between the parts
            yield
            part = slice(len(values), min(len(values) + PART_KINDS, len(self._kinds)))
            values += _values(self._hazards(self._products(part))).tolist()
        self.values = values
        self.num_fits += 1

    def value(self, kind: int, age_s: float) -> float:
        """Expected uses per second of memory until the best time to stop. Needs a `fit`."""
        return self.values[kind][age_bin(age_s)]

    def _count_spans(self) -> None:
        """Add up the calls of `at_risk` since the last count."""
        kinds, from_s, to_s = self._spans
        self._spans = (array("q"), array("d"), array("d"))
        if kinds:
            self.all_at_risk(np.frombuffer(kinds, dtype=np.int64), np.frombuffer(from_s), np.frombuffer(to_s))

    def _grow(self) -> None:
        more = max(64, len(self._uses))
        self._features = np.concatenate(
            (self._features, np.zeros((more, self._features.shape[1]), dtype=np.int64))
        )
        self._uses = np.concatenate((self._uses, np.zeros((more, NUM_AGES))))
        self._at_risk_s = np.concatenate((self._at_risk_s, np.zeros((more, NUM_AGES))))

    def _hazards(self, products: Floats) -> Floats:
        """[kinds, ages], 1/s."""
        return np.minimum(self._base * products, MAX_HAZARD)

    def _products(self, rows: slice) -> Floats:
        """[kinds, ages]: all factors but the base rate."""
        features = self._features[rows]
        products: Floats = self._factors[0][features[:, 0]]
        for number in range(1, len(self._factors)):
            products *= self._factors[number][features[:, number]]
        return products

    def _fit_base(self, uses: Floats, weighted_s: Floats) -> None:
        """Fit the base rate by age. Without data it falls as 1 / (age + early)."""
        seconds = weighted_s.sum(axis=0)
        seen = uses.sum(axis=0)
        scale = (seen.sum() + 0.1) / ((seconds * self._prior).sum() + 0.1)
        prior_uses = 3.0
        self._base = (seen + prior_uses) / (seconds + prior_uses / (scale * self._prior))

    def _fit_factor(self, number: int, seen: Floats, expected: Floats) -> Floats:
        """Fit one feature's factors, given all others; returns by how much they changed.

        `seen` and `expected`: uses at the feature's levels, counted and by the model so far. All arrays are
        [levels, ages].
        """
        before = self._factors[number]
        due = expected / before
        weight = self._shrinkage
        level = (seen.sum(axis=1) + weight) / (due.sum(axis=1) + weight)
        weight *= 2
        shape = (seen @ _NEAR + weight) / ((due @ _NEAR) * level[:, None] + weight)
        after = level[:, None] * shape
        change: Floats = after / before
        before[:] = after
        return change


def _values(hazards: Floats) -> Floats:
    """The best ratio of uses to seconds from each age on. All are [kinds, ages].

    Where the hazard is at least the value of the next age, it is the value: nothing later is better.
    """
    hazards = np.ascontiguousarray(hazards.T)
    width_s = WIDTH_S[:, None]
    uses = hazards * width_s
    stay_s = np.where(uses > 1e-9, -np.expm1(-uses) / np.maximum(hazards, 1e-12), width_s)
    none = np.zeros((1, hazards.shape[1]))
    alive = np.exp(-np.minimum(MAX_USES, np.concatenate((none, np.cumsum(uses, axis=0)))))
    to_come_s = np.cumsum((alive[:-1] * stay_s)[::-1], axis=0)[::-1]
    to_come_s = np.concatenate((to_come_s, none))  # sums from the end, so that small ones stay exact
    ratios = (alive[_STARTS] - alive[_STOPS]) / (to_come_s[_STARTS] - to_come_s[_STOPS])
    best = np.maximum.reduceat(ratios, _FIRST_STOPS)
    values = hazards.copy()
    for age in range(NUM_AGES - 2, -1, -1):
        np.maximum(values[age], best[age], out=values[age], where=values[age] < values[age + 1])
    return values.T


def _values_of_one(hazards: list[float]) -> list[float]:
    """`_values` of a single kind, without the overhead of arrays.

    Goes from the oldest age back. `ahead` has the spans up to the next times to stop, each as its ratio of
    uses to seconds, its mean seconds and the chance to survive it. While the next span has the better ratio,
    it is worth keeping the extent through that span too.
    """
    ahead: list[tuple[float, float, float]] = []
    values = [0.0] * NUM_AGES
    for age in range(NUM_AGES - 1, -1, -1):
        hazard, width_s = hazards[age], _WIDTHS[age]
        uses = hazard * width_s
        survives = math.exp(-uses)
        held_s = (1.0 - survives) / hazard if uses > 1e-9 else width_s
        value = hazard
        while ahead and ahead[-1][0] > value:
            _, next_s, next_survives = ahead.pop()
            held_s += survives * next_s
            survives *= next_survives
            value = (1.0 - survives) / held_s
        ahead.append((value, held_s, survives))
        values[age] = value
    return values


def age_bin(age_s: float) -> int:
    """The bin of an age; ages beyond the oldest are in the last one."""
    return bisect_right(_INNER, age_s)


def seconds_at_risk(kinds: Ints, from_s: Floats, to_s: Floats, num_kinds: int) -> Floats:
    """[kinds, ages]: seconds that paths of each kind spent at each age.

    Each element of `kinds`, `from_s` and `to_s` is one path: its kind, and its ages at the start and the end.
    """
    return _seconds_from_birth(kinds, to_s, num_kinds) - _seconds_from_birth(kinds, from_s, num_kinds)


def _seconds_from_birth(kinds: Ints, ages_s: Floats, num_kinds: int) -> Floats:
    """As `seconds_at_risk`, from age 0 on.

    A path fills all bins below that of its end, and a part of that one. Two sums for each bin are enough,
    over the paths that end in it: how many, and their ages.
    """
    ages_s = np.clip(ages_s, 0.0, OLDEST_S)
    cells = kinds * NUM_AGES + np.searchsorted(_INNER, ages_s, side="right")
    size = num_kinds * NUM_AGES
    ends = np.bincount(cells, minlength=size).reshape(num_kinds, NUM_AGES)
    ended_s = np.bincount(cells, ages_s, size).reshape(num_kinds, NUM_AGES)
    beyond = ends[:, ::-1].cumsum(axis=1)[:, ::-1] - ends
    seconds: Floats = ended_s - ends * FROM_S + beyond * WIDTH_S
    return seconds
