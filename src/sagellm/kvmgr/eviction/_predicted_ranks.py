"""Ranks from predictions: who is asked, what it is told, and what its answer is worth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeGuard

from sagellm.core.protocols.eviction import Extent
from sagellm.core.protocols.lifetime import (
    LifetimePredictor,
    PredictionRequest,
    ReuseFeatures,
    ReusePrediction,
    ReusePredictor,
)
from sagellm.kvmgr.eviction._queue import recency
from sagellm.kvmgr.eviction._rests import Rest, Sequence

Predictor = ReusePredictor | LifetimePredictor
Rank = tuple[float, int, int]

LONG_AGO_S = 1e12
"""Makes ranks by time of use smaller than any value."""
AGED = 0.33
"""A value is good until the extent has rested for this share more, or for a second."""
LEAST_HELD_S = 1.0
"""What is used at once costs that much memory all the same."""
MAX_VALUES = 4096
FULL_BLOCKS = 4
"""Of extents with fewer blocks only that share is told: one in so many blocks is heard of at most."""
PATIENCE_S = 1800.0
"""A sequence that was not used for so long has ended."""
MAX_BLOCKS = 1 << 20


def predicts_reuse(predictor: Predictor | None) -> TypeGuard[ReusePredictor]:
    return hasattr(predictor, "horizon_s")


def predicts_length(predictor: Predictor | None) -> TypeGuard[LifetimePredictor]:
    return predictor is not None and not predicts_reuse(predictor)


def ranks_by(predictor: Predictor | None) -> RanksByUse:
    """The ranks that fit the predictor."""
    if predicts_reuse(predictor):
        return RanksByReuse(predictor)
    return RanksByEnd(predictor) if predicts_length(predictor) else RanksByUse()


class RanksByUse:
    """LRU, where a candidate's predicted lifetime makes it look younger; tells nobody anything.

    `watched_s`: for how long rests are of interest; `by_value`: whether ranks are values, which change while
    time passes.
    """

    watched_s = 0.0
    by_value = False

    def rank(self, extent: Extent, rest: Rest, now_s: float) -> Rank:
        when_s, last_use, depth = recency(extent)
        lifetime_s = _given_lifetime_s(extent)
        return (when_s if lifetime_s is None else when_s + lifetime_s, last_use, depth)

    def began(self, rest: Rest, before: Rest | None) -> None: ...

    def used(self, rest: Rest, seconds: float) -> None: ...

    def rested(self, rest: Rest, seconds: float) -> None: ...

    def forgotten(self, rest: Rest) -> None: ...


class RanksByReuse(RanksByUse):
    """By uses expected per second of memory, once the predictor does not abstain; until then LRU."""

    def __init__(self, predictor: ReusePredictor) -> None:
        self._predictor = predictor
        self.watched_s = predictor.horizon_s
        self._values: dict[int, tuple[ReusePrediction, float]] = {}

    def rank(self, extent: Extent, rest: Rest, now_s: float) -> Rank:
        age_s = max(0.0, now_s - extent.used_s - extent.bonus_s)
        prediction = self._predictor.predict(rest.features, age_s)
        if not self.by_value:
            if prediction.abstained:
                return below_values(extent)
            self.by_value = True
        rest.due_s = now_s + max(1.0, AGED * age_s)
        known = self._values.get(id(prediction))  # predictors with tables give the same answer many times
        value = known[1] if known is not None else self._remember(prediction)
        return (value, extent.last_use, -extent.first_position)

    def used(self, rest: Rest, seconds: float) -> None:
        if _is_told(rest):
            self._predictor.update(rest.features, seconds, reused=True, since_s=rest.told_s)

    def rested(self, rest: Rest, seconds: float) -> None:
        if _is_told(rest):
            self._predictor.update(rest.features, seconds, reused=False, since_s=rest.told_s)

    def _remember(self, prediction: ReusePrediction) -> float:
        """The prediction is kept with its value, so that no other object gets its id."""
        if len(self._values) >= MAX_VALUES:
            self._values.clear()
        value = density(prediction, self._predictor.horizon_s)
        self._values[id(prediction)] = (prediction, value)
        return value


class RanksByEnd(RanksByUse):
    """By when a sequence is predicted to end: its last use, and how long it goes on after it."""

    watched_s = PATIENCE_S

    def __init__(self, predictor: LifetimePredictor) -> None:
        self._predictor = predictor
        self._num_begun = 0

    def rank(self, extent: Extent, rest: Rest, now_s: float) -> Rank:
        rank = super().rank(extent, rest, now_s)
        sequence = rest.sequence
        if sequence is None or _given_lifetime_s(extent) is not None:
            return rank
        return (rank[0] + sequence.goes_on_s, *rank[1:])

    def began(self, rest: Rest, before: Rest | None) -> None:
        sequence = before.sequence if before is not None else None
        if sequence is None or not sequence.open:
            self._num_begun += 1
            sequence = Sequence(f"sequence {self._num_begun}", rest.used_s, rest.end)
        sequence.used_s, sequence.end = rest.used_s, max(sequence.end, rest.end)
        rest.sequence = sequence
        prediction = self._predictor.predict(
            PredictionRequest(sequence.name, (), sequence.end, MAX_BLOCKS, sequence.num_prompt)
        )
        sequence.goes_on_s = 0.0 if prediction.abstained else max(0.0, prediction.estimated_time)

    def rested(self, rest: Rest, seconds: float) -> None:
        if seconds >= PATIENCE_S:
            self._ended(rest)

    def forgotten(self, rest: Rest) -> None:
        self._ended(rest)

    def _ended(self, rest: Rest) -> None:
        """The last rest of a sequence is over: of those before it, one or the other may lie here yet."""
        sequence = rest.sequence
        if sequence is not None and sequence.open and rest.used_s >= sequence.used_s:
            sequence.open = False
            self._predictor.update(sequence.name, sequence.end, sequence.used_s - sequence.began_s)


class ReadOnly:
    """A `ReusePredictor` that answers as another does, and learns nothing."""

    def __init__(self, predictor: ReusePredictor) -> None:
        self._predictor = predictor

    @property
    def horizon_s(self) -> float:
        return self._predictor.horizon_s

    def predict(self, features: ReuseFeatures, age_s: float = 0.0) -> ReusePrediction:
        return self._predictor.predict(features, age_s)

    def update(
        self, features: ReuseFeatures, seconds: float, *, reused: bool, since_s: float = 0.0
    ) -> None: ...


def below_values(extent: Extent) -> Rank:
    """In order of last use, before all that have a value."""
    when_s, last_use, depth = recency(extent)
    return (when_s - LONG_AGO_S, last_use, depth)


def density(prediction: ReusePrediction, horizon_s: float) -> float:
    """Expected uses per second of memory up to the best moment to give up: the index of Gittins (1979), of
    the moments that the quantiles name and the horizon. 0 where no use is expected."""
    probability, best = prediction.probability, 0.0
    held_s, level, time_s = LEAST_HELD_S, 0.0, 0.0
    for next_level, next_s in (*sorted(prediction.quantiles.items()), (1.0, horizon_s)):
        still_here = 1.0 - probability * (level + next_level) / 2
        held_s += max(0.0, next_s - time_s) * still_here
        level, time_s = next_level, max(time_s, next_s)
        best = max(best, probability * level / held_s)
    return best


def _given_lifetime_s(extent: Extent) -> float | None:
    """Some extents (those of candidates) bring a prediction, though the contract does not ask for it."""
    meta = getattr(extent, "meta", None)
    given = meta.get("estimated_lifetime") if isinstance(meta, Mapping) else None
    return float(given) if given is not None and math.isfinite(given) else None


def _is_told(rest: Rest) -> bool:
    """By content, so the same in each run: small extents are many, and their blocks count no more."""
    return rest.num_blocks >= FULL_BLOCKS or rest.key % FULL_BLOCKS < rest.num_blocks
