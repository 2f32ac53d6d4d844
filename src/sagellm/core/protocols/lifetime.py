"""Contracts of lifetime predictors: how long a request runs, whether blocks are reused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class PredictionRequest:
    """What is known of a sequence now. `max_length` is the limit on its total length in tokens.

    `session_id` joins the turns of one conversation or agent; `category` is what the caller knows of the
    kind of request (model, adapter, batch job). Both may be left out.
    """

    sequence_id: str
    token_ids: Sequence[int]
    current_length: int
    max_length: int
    num_prompt_tokens: int | None = None
    meta: Mapping[str, float] = field(default_factory=dict)
    session_id: str | None = None
    category: str = ""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Remaining output tokens and seconds, as a median with quantiles (probability -> tokens). `confidence`
    is 0 to 1; a predictor below its threshold abstains: `abstained`, with its base rate as numbers."""

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


class ReuseFeatures(NamedTuple):
    """What is known of a run of blocks at its last use.

    `num_uses`: uses so far, the last included. `turn`: the turn of its session that used it last (1 is the
    first; 0 unknown). `position`: blocks before it in the prompt; `num_blocks`: blocks of that prompt.
    `gap_s`: seconds between its last two uses, negative after a single use.
    """

    num_uses: int
    turn: int
    position: int
    num_blocks: int
    gap_s: float = -1.0


@dataclass(frozen=True, slots=True)
class ReusePrediction:
    """`probability` that the block is used again within the predictor's horizon from now.

    `quantiles` (probability -> seconds from now until then) hold for the case that it is; `abstained` means
    that too little was seen, and that the numbers are the base rate.
    """

    probability: float
    quantiles: Mapping[float, float]
    abstained: bool = False


class ReusePredictor(Protocol):
    """Predicts whether a block is used again, and when. Learns online; cheap enough to be asked for each
    extent that could be evicted."""

    @property
    def horizon_s(self) -> float: ...

    def predict(self, features: ReuseFeatures, age_s: float = 0.0) -> ReusePrediction:
        """Predict for a block that was last used `age_s` seconds ago, as `features` describe."""

    def update(self, features: ReuseFeatures, seconds: float, *, reused: bool, since_s: float = 0.0) -> None:
        """Learn what became of a block after the use that `features` describe.

        The block was used again after `seconds`, or had not been by then. An idle time may be reported in
        pieces, each from where the one before ended (`since_s`). A caller that reports idle times as they go
        on, and not only their end, keeps the predictor from seeing early reuses before all others.
        """
