"""When will an extent be used again: a model of hazards, learned online from all extents, kept or not.

The hazard of reuse (1/s) at an age is a base rate at that age times one factor per feature and age: a
multiplicative intensity model (Clayton and Cuzick 1985), fitted by proportional fitting to counts of uses and
seconds at risk, with shrinkage, so that few data mean few opinions. What an extent is worth is the best
ratio, over all times to give it up, of expected uses to expected seconds of memory: Gittins' index (1979),
which is hit density (Beckmann, Chen and Cidon, "LHD", 2018) without its assumption about when to stop.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Features = tuple[int, ...]
"""Small non-negative integers, below `LEVELS` each."""

LEVELS = 8
YOUNGEST_S, OLDEST_S, NUM_AGES = 1.0, 7200.0, 24
MAX_KINDS = 2048
MAX_HAZARD = 2.0
MANY_SPANS = 8192
MAX_USES = 600.0
"""Expected uses beyond which what is left of a life is too little for a floating point number."""
_RATIO = math.log(OLDEST_S / YOUNGEST_S) / (NUM_AGES - 1)
_BORDERS_S = np.concatenate(([0.0], np.geomspace(YOUNGEST_S, OLDEST_S, NUM_AGES)))
_FROM_S, _WIDTH_S = _BORDERS_S[:-1], np.diff(_BORDERS_S)
_WIDTHS: list[float] = _WIDTH_S.tolist()
AGE_ENDS_S: list[float] = [*_BORDERS_S[1:-1].tolist(), math.inf]
"""Where the bins of ages end; the last one never does."""
_MIDDLE_S = np.sqrt(np.maximum(_FROM_S, YOUNGEST_S / 2) * _BORDERS_S[1:])
_NEAR = np.maximum(0.0, 1.5 - 0.5 * np.abs(np.subtract.outer(np.arange(NUM_AGES), np.arange(NUM_AGES))))
_NEAR[_NEAR > 1.0] = 1.0
"""How much the neighbours of an age say about it: 1 for itself and the next, 1/2 for the one after."""


def age_bin(age_s: float) -> int:
    """The bin of an age; ages beyond the oldest count as that."""
    if age_s < YOUNGEST_S:
        return 0
    if age_s >= OLDEST_S:
        return NUM_AGES - 1
    return min(NUM_AGES - 1, 1 + int(math.log(age_s / YOUNGEST_S) / _RATIO))


class ReuseModel:
    """Counts by kind (a tuple of features) and age; `fit` turns them into values.

    `shrinkage`: a factor moves from 1 as far as data outweigh so many uses. `half_life`: lives after
    which what was learned counts half. `early_s`: until about that age the prior hardly falls.
    """

    def __init__(
        self,
        num_features: int,
        *,
        shrinkage: float = 4.0,
        half_life: float = 20_000.0,
        early_s: float = 20.0,
    ) -> None:
        self.fitted = False
        self.values: list[list[float]] = []
        self._shrinkage, self._half_life = shrinkage, half_life
        self._kinds: dict[Features, int] = {}
        self._features = np.zeros((0, num_features), dtype=np.int64)
        self._uses: Floats = np.zeros((0, NUM_AGES))
        self._at_risk_s: Floats = np.zeros((0, NUM_AGES))
        self._spans: list[tuple[int, float, float, float]] = []
        self._factors: Floats = np.ones((num_features, LEVELS, NUM_AGES))
        self._base: Floats = np.zeros(NUM_AGES)
        self._prior: Floats = 1.0 / (_MIDDLE_S + early_s)

    def __len__(self) -> int:
        return len(self._kinds)

    def kind(self, features: Features) -> int:
        """The row of a tuple of features; beyond `MAX_KINDS` all new ones share one row."""
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
        if self.fitted:
            self.values.append(_values_of_one(self._hazards(slice(row, row + 1))[0].tolist()))
        return row

    def used(self, kind: int, age_s: float, weight: float = 1.0) -> None:
        """An extent of that kind was used at that age."""
        self._uses[kind, age_bin(age_s)] += weight

    def at_risk(self, kind: int, from_s: float, to_s: float, weight: float = 1.0) -> None:
        """An extent of that kind lived unused from one age to another."""
        self._spans.append((kind, from_s, to_s, weight))
        if len(self._spans) >= MANY_SPANS:
            self._count_spans()

    def fit(self, num_lives: int) -> None:
        """Learn from the counts so far; `num_lives` came since the last fit. Takes milliseconds."""
        self._count_spans()
        rows = len(self._kinds)
        uses, at_risk_s = self._uses[:rows], self._at_risk_s[:rows]
        members = [
            np.equal.outer(np.arange(LEVELS), levels).astype(float) for levels in self._features[:rows].T
        ]
        for _ in range(3):
            self._fit_base(uses, at_risk_s)
            expected = at_risk_s * self._hazards(slice(0, rows))
            for number, of_level in enumerate(members):
                expected = self._fit_factor(number, of_level, uses, expected)
        self.values = _values(self._hazards(slice(0, rows))).tolist()
        self.fitted = True
        fade = 0.5 ** (num_lives / self._half_life)
        uses *= fade
        at_risk_s *= fade

    def value(self, kind: int, age_s: float) -> float:
        """Expected uses per second of memory, at the best time to stop; `fit` must have been called."""
        return self.values[kind][age_bin(age_s)]

    def _count_spans(self) -> None:
        """Add up what `at_risk` noted, all at once."""
        if not self._spans:
            return
        kinds, from_s, to_s, weights = (np.array(column) for column in zip(*self._spans, strict=True))
        self._spans.clear()
        seconds = np.clip(to_s[:, None] - _FROM_S, 0, _WIDTH_S) - np.clip(
            from_s[:, None] - _FROM_S, 0, _WIDTH_S
        )
        seconds *= weights[:, None]
        order = np.argsort(kinds, kind="stable")
        different, starts = np.unique(kinds[order], return_index=True)
        self._at_risk_s[different] += np.add.reduceat(seconds[order], starts, axis=0)

    def _grow(self) -> None:
        more = max(64, len(self._uses))
        self._features = np.concatenate(
            (self._features, np.zeros((more, self._features.shape[1]), dtype=np.int64))
        )
        self._uses = np.concatenate((self._uses, np.zeros((more, NUM_AGES))))
        self._at_risk_s = np.concatenate((self._at_risk_s, np.zeros((more, NUM_AGES))))

    def _hazards(self, rows: slice) -> Floats:
        """[kinds, ages], 1/s."""
        return np.minimum(self._base * self._products(rows), MAX_HAZARD)

    def _products(self, rows: slice) -> Floats:
        """[kinds, ages]: all factors but the base rate."""
        features = self._features[rows]
        products = np.ones((len(features), NUM_AGES))
        for number, factors in enumerate(self._factors):
            products *= factors[features[:, number]]
        return products

    def _fit_base(self, uses: Floats, at_risk_s: Floats) -> None:
        """The base rate by age; where there are no data, it falls with age as 1 / (age + early)."""
        seconds = (at_risk_s * self._products(slice(0, len(uses)))).sum(axis=0)
        seen = uses.sum(axis=0)
        scale = (seen.sum() + 0.1) / ((seconds * self._prior).sum() + 0.1)
        prior_uses = 3.0
        self._base = (seen + prior_uses) / (seconds + prior_uses / (scale * self._prior))

    def _fit_factor(self, number: int, of_level: Floats, uses: Floats, expected: Floats) -> Floats:
        """One feature's factors, given all others; returns the expected uses with them. `of_level`: [levels,
        kinds], 1 where a kind has that level."""
        levels = self._features[: len(uses), number]
        without = expected / self._factors[number][levels]
        due, seen = of_level @ without, of_level @ uses
        weight = self._shrinkage
        level = (seen.sum(axis=1) + weight) / (due.sum(axis=1) + weight)
        weight *= 2
        shape = (seen @ _NEAR + weight) / ((due @ _NEAR) * level[:, None] + weight)
        self._factors[number] = level[:, None] * shape
        updated: Floats = without * self._factors[number][levels]
        return updated


def _values(hazards: Floats) -> Floats:
    """[kinds, ages] hazards to [kinds, ages] of the best ratio of uses to seconds from that age on."""
    uses = hazards * _WIDTH_S
    stay_s = np.where(uses > 1e-9, -np.expm1(-uses) / np.maximum(hazards, 1e-12), _WIDTH_S)
    none = np.zeros((len(hazards), 1))
    alive = np.exp(-np.minimum(MAX_USES, np.concatenate((none, np.cumsum(uses, axis=1)), axis=1)))
    to_come_s = np.cumsum((alive[:, :-1] * stay_s)[:, ::-1], axis=1)[:, ::-1]
    to_come_s = np.concatenate((to_come_s, none), axis=1)  # sums from the end, so that small ones stay exact
    values = hazards.copy()  # giving it up at the end of this age
    for age in range(NUM_AGES):
        gone = alive[:, age : age + 1] - alive[:, age + 1 :]
        ratios = gone / (to_come_s[:, age : age + 1] - to_come_s[:, age + 1 :])
        np.maximum(values[:, age], ratios.max(axis=1), out=values[:, age])
    return values


def _values_of_one(hazards: list[float]) -> list[float]:
    """`_values` of a single kind, without the overhead of arrays."""
    leaves = [math.exp(-hazard * width_s) for hazard, width_s in zip(hazards, _WIDTHS, strict=True)]
    stays_s = [
        (1.0 - leave) / hazard if hazard * width_s > 1e-9 else width_s
        for hazard, width_s, leave in zip(hazards, _WIDTHS, leaves, strict=True)
    ]
    values = []
    for age in range(NUM_AGES):
        alive, held_s, best = 1.0, 0.0, 0.0
        for leave, stay_s in zip(leaves[age:], stays_s[age:], strict=True):
            held_s += alive * stay_s
            alive *= leave
            best = max(best, (1.0 - alive) / held_s)
        values.append(best)
    return values
