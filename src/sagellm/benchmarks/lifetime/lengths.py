"""Evaluates predictors of output lengths online, beside trivial baselines.

Requests come in order of time, and a predictor learns a request's length only when the request ends, as in
service. The baselines learn under the same rules: a learned predictor has to beat them.
"""

from __future__ import annotations

import heapq
import time
from bisect import bisect_right, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from sagellm.benchmarks.lifetime.score import LengthScore, score_lengths
from sagellm.benchmarks.lifetime.workloads import PARTS, LengthSample, LengthWorkload, Part
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.lifetime import LifetimePredictor, Prediction, PredictionRequest

SECONDS_PER_TOKEN = 0.03
"""Traces do not record when a request ends: it is taken to get a token every 30 ms."""
MAX_OUTPUT = 32768
BEST_CONSTANT = "best constant"


class GroupMedian:
    """The median output of all finished requests with the same key. Without a finished request of that
    key, the median of all."""

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
    """The output length of the session's last finished turn. Without one, the median of all."""

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
    """Returns the median of the outputs to predict. No other constant has a smaller mean error. No
    predictor can know it beforehand."""
    return float(median(outputs))


def _prompt(request: PredictionRequest) -> int:
    return request.current_length if request.num_prompt_tokens is None else request.num_prompt_tokens


def _certain(request: PredictionRequest, remaining: float) -> Prediction:
    tokens = min(max(0.0, float(remaining)), float(request.max_length - request.current_length))
    return Prediction(tokens, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class LengthRow:
    """One predictor on one workload. `against_constant` is its mean error over that of the best constant
    of the same part, minus one: -0.3 is 30 % below. Times are medians per call in µs."""

    workload: str
    predictor: str
    score: LengthScore
    against_constant: float
    predict_us: float | None = None
    update_us: float | None = None


class LengthStream:
    """Feeds a workload to one predictor, up to the end of the scored part. With `after`, the predictor is
    asked when a request has generated so many tokens. Requests that end before are not scored."""

    def __init__(
        self, predictor: LifetimePredictor, workload: LengthWorkload, part: Part, after: int = 0
    ) -> None:
        self._predictor, self._workload, self._part, self._after = predictor, workload, part, after
        self._running: list[tuple[float, int, LengthSample]] = []
        self.predictions: list[Prediction] = []
        self.actual: list[int] = []
        self.predict_s: list[float] = []
        self.update_s: list[float] = []

    def run(self) -> LengthStream:
        current: Part = "train"
        for number, sample in enumerate(self._workload.samples):
            if PARTS.index(sample.part) > PARTS.index(self._part):
                break
            if sample.part != current:
                self._end_until(float("inf"))  # each part starts its own clock
                current = sample.part
            self._end_until(sample.time_s)
            learns = sample.part != self._part or self._workload.learns_in_test
            too_short = 0 < self._after >= sample.num_output
            if learns or not too_short:
                self._predict(sample, too_short=too_short)
            if learns:
                end_s = sample.time_s + sample.num_output * SECONDS_PER_TOKEN
                heapq.heappush(self._running, (end_s, number, sample))
        return self

    def _predict(self, sample: LengthSample, *, too_short: bool) -> None:
        """Predicts one request. One that is too short to be scored is predicted at its start, for learning
        only."""
        generated = 0 if too_short else self._after
        request = PredictionRequest(
            sample.name,
            sample.tokens,
            sample.num_input + generated,
            sample.num_input + MAX_OUTPUT,
            sample.num_input,
            session_id=sample.session_id,
            category=sample.category,
        )
        begun = time.thread_time()
        prediction = self._predictor.predict(request)
        seconds = time.thread_time() - begun
        if sample.part == self._part and not too_short:
            self.predictions.append(prediction)
            self.actual.append(sample.num_output - self._after)
            self.predict_s.append(seconds)

    def _end_until(self, now_s: float) -> None:
        while self._running and self._running[0][0] <= now_s:
            _, _, sample = heapq.heappop(self._running)
            length = sample.num_input + sample.num_output
            begun = time.thread_time()
            self._predictor.update(sample.name, length, sample.num_output * SECONDS_PER_TOKEN)
            self.update_s.append(time.thread_time() - begun)


def evaluate_lengths(
    workload: LengthWorkload,
    predictors: Mapping[str, Callable[[], LifetimePredictor]],
    part: Part = "test",
    after: int = 0,
    on_row: Callable[[str], None] = lambda name: None,
) -> list[LengthRow]:
    """Scores the best constant, the baselines and the predictors. Raises `ConfigError` if the part has no
    request to score."""
    outputs = [s.num_output - after for s in workload.of(part) if s.num_output > after or not after]
    if not outputs:
        raise ConfigError(
            f"workload {workload.name} has no request in its {part} part with more than {after} tokens"
        )
    constant = best_constant(outputs)
    best = score_lengths([constant] * len(outputs), outputs, [True] * len(outputs), [{}] * len(outputs))
    rows = [LengthRow(workload.name, BEST_CONSTANT, best, 0.0)]
    for name, make in {**BASELINES, **predictors}.items():
        on_row(f"{workload.name}: {name}")
        stream = LengthStream(make(), workload, part, after).run()
        score = score_lengths(
            [prediction.remaining_tokens for prediction in stream.predictions],
            stream.actual,
            [not prediction.abstained for prediction in stream.predictions],
            [dict(prediction.quantiles) for prediction in stream.predictions],
        )
        against = score.mae / best.mae - 1 if best.mae else 0.0
        times_us = (1e6 * median(times) if times else None for times in (stream.predict_s, stream.update_s))
        rows.append(LengthRow(workload.name, name, score, against, *times_us))
    return rows
