"""Contract of lifetime predictors: how long will a request run, will a block be used again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PredictionRequest:
    """What is known of a sequence now. `max_length` is the limit on its total length in tokens."""

    sequence_id: str
    token_ids: Sequence[int]
    current_length: int
    max_length: int
    num_prompt_tokens: int | None = None
    meta: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Remaining output tokens and seconds, as a median with quantiles (probability -> tokens).

    `confidence` is 0 to 1; a predictor below its threshold abstains: `abstained`, with its base rate as
    numbers.
    """

    remaining_tokens: float
    estimated_time: float
    confidence: float
    quantiles: Mapping[float, float] = field(default_factory=dict)
    abstained: bool = False


class LifetimePredictor(Protocol):
    """Predicts, and learns online from what ended. Seeded; no wall clock."""

    def predict(self, request: PredictionRequest) -> Prediction: ...

    def update(self, sequence_id: str, actual_length: int, actual_time: float) -> None:
        """The sequence ended at `actual_length` tokens in total after `actual_time` seconds."""
        ...
