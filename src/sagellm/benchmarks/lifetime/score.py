"""Scores predictions of lengths, and of whether and when a block is used again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
NUM_BINS = 10


@dataclass(frozen=True, slots=True)
class LengthScore:
    """`mae` and `within_10_percent` are over all requests, `*_answered` over those predicted.

    A predictor may abstain; then its request is not answered. `rank_correlation` is Spearman's, 0 for a
    constant. `coverage` maps each quantile level to the share of actual lengths at or below that quantile.
    `inside_80` is the share from the 10 % to the 90 % quantile, both included.
    """

    num_samples: int
    mae: float
    within_10_percent: float
    rank_correlation: float
    answered: float
    mae_answered: float | None
    coverage: dict[float, float]
    inside_80: float | None


def score_lengths(
    predicted: Sequence[float],
    actual: Sequence[int],
    answered: Sequence[bool],
    quantiles: Sequence[dict[float, float]],
) -> LengthScore:
    """Scores lengths in tokens, all arguments in the same order. Raises `ValueError` if there is nothing
    to score."""
    if not len(actual):
        raise ValueError("nothing to score")
    guess, truth = np.asarray(predicted, np.float64), np.asarray(actual, np.float64)
    error = np.abs(guess - truth)
    sure = np.asarray(answered, bool)
    levels = sorted(quantiles[0]) if all(quantiles) else []
    values = {level: np.asarray([by_level[level] for by_level in quantiles]) for level in levels}
    inside = (values[0.1] <= truth) & (truth <= values[0.9]) if {0.1, 0.9} <= set(levels) else None
    return LengthScore(
        num_samples=len(truth),
        mae=float(error.mean()),
        within_10_percent=float((error <= 0.1 * truth).mean()),
        rank_correlation=spearman(guess, truth),
        answered=float(sure.mean()),
        mae_answered=float(error[sure].mean()) if sure.any() else None,
        coverage={level: float((truth <= values[level]).mean()) for level in levels},
        inside_80=None if inside is None else float(inside.mean()),
    )


@dataclass(frozen=True, slots=True)
class CalibrationBin:
    """One tenth of the predictions: their mean, and the share that came true."""

    num_samples: int
    predicted: float
    happened: float


@dataclass(frozen=True, slots=True)
class ReuseScore:
    """How well probabilities of reuse fit the outcomes.

    `base_rate` is the share of blocks that are used again. `brier_of_base_rate` is the Brier score of always
    predicting that share, which no predictor can know beforehand; `skill` is how much lower the Brier score
    is, as a share of it. `calibration_error` is the mean distance of prediction and outcome over the tenths.
    `accuracy_of_never` is that of always predicting no reuse.
    """

    num_samples: int
    base_rate: float
    auc: float
    brier: float
    brier_of_base_rate: float
    skill: float
    calibration_error: float
    accuracy: float
    accuracy_of_never: float
    bins: list[CalibrationBin]


def score_reuse(predicted: Sequence[float], happened: Sequence[bool]) -> ReuseScore:
    """Scores probabilities against outcomes; raises `ValueError` if there is nothing to score."""
    if not len(happened):
        raise ValueError("nothing to score")
    guess, truth = np.asarray(predicted, np.float64), np.asarray(happened, np.float64)
    base = float(truth.mean())
    brier, of_base = float(((guess - truth) ** 2).mean()), base * (1 - base)
    bins = calibration(guess, truth)
    return ReuseScore(
        num_samples=len(truth),
        base_rate=base,
        auc=auc(guess, truth > 0),
        brier=brier,
        brier_of_base_rate=of_base,
        skill=1 - brier / of_base if of_base else 0.0,
        calibration_error=sum(b.num_samples * abs(b.predicted - b.happened) for b in bins) / len(truth),
        accuracy=float(((guess >= 0.5) == (truth > 0)).mean()),
        accuracy_of_never=1 - base,
        bins=bins,
    )


def calibration(guess: Floats, truth: Floats) -> list[CalibrationBin]:
    """Splits the predictions, in ascending order, into ten bins of about equal size."""
    order = np.argsort(guess, kind="stable")
    parts = [part for part in np.array_split(order, NUM_BINS) if len(part)]
    return [CalibrationBin(len(p), float(guess[p].mean()), float(truth[p].mean())) for p in parts]


def auc(guess: Floats, truth: NDArray[np.bool_]) -> float:
    """Area under the ROC curve (Mann and Whitney's statistic). It is how often a case that came true has
    the higher prediction; ties count half. Returns 0.5 if all or none came true."""
    num_true = int(truth.sum())
    num_false = len(truth) - num_true
    if not num_true or not num_false:
        return 0.5
    rank_sum = float(ranks(guess)[truth].sum())
    return (rank_sum - num_true * (num_true + 1) / 2) / (num_true * num_false)


def spearman(first: Floats, second: Floats) -> float:
    """Correlation of the ranks, ties sharing their mean rank. 0 if either input is constant."""
    x, y = ranks(first), ranks(second)
    deviation = float(x.std() * y.std())
    return float(((x - x.mean()) * (y - y.mean())).mean()) / deviation if deviation else 0.0


def ranks(values: Floats) -> Floats:
    """Ranks from 1; equal values get the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean_rank: Floats = last - (counts - 1) / 2
    return mean_rank[inverse]
