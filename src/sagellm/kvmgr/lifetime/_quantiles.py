"""Quantiles of a prediction: which levels, how sure they are, and what to say knowing nothing."""

from __future__ import annotations

from collections.abc import Sequence

from sagellm.core.protocols.lifetime import Prediction, PredictionRequest

LEVELS = (0.1, 0.25, 0.5, 0.75, 0.9)
MEDIAN = LEVELS.index(0.5)


def prompt_length(request: PredictionRequest) -> int:
    return request.current_length if request.num_prompt_tokens is None else request.num_prompt_tokens


def room_of(request: PredictionRequest) -> int:
    """Tokens that the sequence may still get."""
    return max(0, request.max_length - request.current_length)


def uniform(room: int) -> list[float]:
    """The quantiles of knowing nothing: any length up to the limit is as likely as any other."""
    return [room * level for level in LEVELS]


def confidence_of(remaining: Sequence[float]) -> float:
    """1 where the quantiles agree, towards 0 as the middle 80 % spread over many times the median."""
    return 1 / (1 + (remaining[-1] - remaining[0]) / max(1.0, remaining[MEDIAN]))


def answer(remaining: Sequence[float], seconds_per_token: float, threshold: float) -> Prediction:
    """A prediction with these quantiles of remaining tokens; it abstains if it is less sure than that."""
    confidence = confidence_of(remaining)
    median = remaining[MEDIAN]
    quantiles = dict(zip(LEVELS, remaining, strict=True))
    return Prediction(median, median * seconds_per_token, confidence, quantiles, confidence < threshold)


def abstention(remaining: Sequence[float], seconds_per_token: float) -> Prediction:
    """The same numbers from one who does not stand by them."""
    median = remaining[MEDIAN]
    quantiles = dict(zip(LEVELS, remaining, strict=True))
    return Prediction(median, median * seconds_per_token, 0.0, quantiles, abstained=True)


def pinball(remaining: Sequence[float], actual: float) -> float:
    """Koenker and Bassett's (1978) quantile loss, summed over `LEVELS`."""
    return sum(
        max(level * (actual - value), (level - 1) * (actual - value))
        for level, value in zip(LEVELS, remaining, strict=True)
    )
