"""Trivial length predictors: what a learned one has to beat. They learn online under the same rules."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from sagellm.core.protocols.lifetime import LifetimePredictor, Prediction, PredictionRequest


class GroupMedian:
    """The median of all that ended with the same key, as long as there is one; before that, of all."""

    def __init__(self, key_of: Callable[[PredictionRequest], object]) -> None:
        self._key_of = key_of
        self._outputs: dict[object, list[int]] = {}
        self._all: list[int] = []
        self._open: dict[str, tuple[object, int]] = {}

    def predict(self, request: PredictionRequest) -> Prediction:
        key = self._key_of(request)
        prompt = _prompt(request)
        self._open[request.sequence_id] = key, prompt
        generated = request.current_length - prompt
        for outputs in (self._outputs.get(key, []), self._all):
            longer = outputs[bisect_right(outputs, generated) if generated else 0 :]
            if longer:
                return _certain(request, median(longer) - generated)
        return _certain(request, (request.max_length - request.current_length) / 2)

    def update(self, sequence_id: str, actual_length: int, actual_time: float) -> None:
        key, prompt = self._open.pop(sequence_id)
        insort(self._outputs.setdefault(key, []), actual_length - prompt)
        insort(self._all, actual_length - prompt)


class PreviousTurn:
    """What the session's last finished turn got; the median of all where there was none."""

    def __init__(self) -> None:
        self._medians = GroupMedian(lambda request: None)
        self._previous: dict[str, int] = {}
        self._open: dict[str, tuple[str | None, int]] = {}

    def predict(self, request: PredictionRequest) -> Prediction:
        prompt = _prompt(request)
        self._open[request.sequence_id] = request.session_id, prompt
        fallback = self._medians.predict(request)
        previous = self._previous.get(request.session_id or "")
        generated = request.current_length - prompt
        return (
            fallback if previous is None or previous < generated else _certain(request, previous - generated)
        )

    def update(self, sequence_id: str, actual_length: int, actual_time: float) -> None:
        session_id, prompt = self._open.pop(sequence_id)
        self._medians.update(sequence_id, actual_length, actual_time)
        if session_id is not None:
            self._previous[session_id] = actual_length - prompt


BASELINES: Mapping[str, Callable[[], LifetimePredictor]] = {
    "median so far": lambda: GroupMedian(lambda request: None),
    "input bucket": lambda: GroupMedian(lambda request: _prompt(request).bit_length()),
    "category": lambda: GroupMedian(lambda request: request.category),
    "previous turn": PreviousTurn,
}


def best_constant(outputs: Sequence[int]) -> float:
    """The median of what is to be predicted: no constant has a smaller mean error, and none can know it."""
    return float(median(outputs))


def _prompt(request: PredictionRequest) -> int:
    return request.current_length if request.num_prompt_tokens is None else request.num_prompt_tokens


def _certain(request: PredictionRequest, remaining: float) -> Prediction:
    tokens = min(max(0.0, float(remaining)), float(request.max_length - request.current_length))
    return Prediction(tokens, 0.0, 1.0)
