"""Predict output lengths over a workload as a service would: in order, told of an end when it has come."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from sagellm.benchmarks.lifetime.baselines import BASELINES, best_constant
from sagellm.benchmarks.lifetime.samples import PARTS, LengthSample, LengthWorkload, Part
from sagellm.benchmarks.lifetime.score import LengthScore, score_lengths
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.lifetime import LifetimePredictor, Prediction, PredictionRequest

SECONDS_PER_TOKEN = 0.03
"""When a request of a trace ends is not recorded: it is taken to get a token every 30 ms."""
MAX_OUTPUT = 32768
BEST_CONSTANT = "best constant"


@dataclass(frozen=True, slots=True)
class LengthRow:
    """One predictor on one workload. `against_constant` is its mean error as a share of that of the best
    constant of the same part, less one: -0.3 is 30 % below. Times are medians per call in µs."""

    workload: str
    predictor: str
    score: LengthScore
    against_constant: float
    predict_us: float | None = None
    update_us: float | None = None


@dataclass(slots=True)
class _Scored:
    predictions: list[Prediction] = field(default_factory=list)
    actual: list[int] = field(default_factory=list)
    predict_s: list[float] = field(default_factory=list)
    update_s: list[float] = field(default_factory=list)


class Stream:
    """One predictor's way through a workload up to and through the scored part.

    `after`: tokens that are generated when it is asked; requests that end before are not scored.
    """

    def __init__(
        self, predictor: LifetimePredictor, workload: LengthWorkload, part: Part, after: int = 0
    ) -> None:
        self._predictor, self._workload, self._part, self._after = predictor, workload, part, after
        self._running: list[tuple[float, int, LengthSample]] = []
        self._scored = _Scored()

    def run(self) -> _Scored:
        last = PARTS.index(self._part)
        current: Part = "train"
        for number, sample in enumerate(self._workload.samples):
            if PARTS.index(sample.part) > last:
                break
            if sample.part != current:
                self._end_until(float("inf"))  # parts have times of their own
                current = sample.part
            self._end_until(sample.time_s)
            self._arrive(number, sample)
        return self._scored

    def _arrive(self, number: int, sample: LengthSample) -> None:
        scored = sample.part == self._part
        if sample.num_output <= self._after and self._after:
            if self._learns(sample):
                self._predict(sample, 0)
                self._wait(number, sample)
            return
        prediction, seconds = self._predict(sample, self._after)
        if scored:
            self._scored.predictions.append(prediction)
            self._scored.actual.append(sample.num_output - self._after)
            self._scored.predict_s.append(seconds)
        if self._learns(sample):
            self._wait(number, sample)

    def _learns(self, sample: LengthSample) -> bool:
        return sample.part != self._part or self._workload.learns_in_test

    def _predict(self, sample: LengthSample, generated: int) -> tuple[Prediction, float]:
        length = sample.num_input + generated
        request = PredictionRequest(
            sample.name,
            sample.tokens,
            length,
            sample.num_input + MAX_OUTPUT,
            sample.num_input,
            session_id=sample.session_id,
            category=sample.category,
        )
        begun = time.thread_time()
        prediction = self._predictor.predict(request)
        return prediction, time.thread_time() - begun

    def _wait(self, number: int, sample: LengthSample) -> None:
        ends = sample.time_s + sample.num_output * SECONDS_PER_TOKEN
        heapq.heappush(self._running, (ends, number, sample))

    def _end_until(self, now_s: float) -> None:
        while self._running and self._running[0][0] <= now_s:
            _, _, sample = heapq.heappop(self._running)
            length = sample.num_input + sample.num_output
            begun = time.thread_time()
            self._predictor.update(sample.name, length, sample.num_output * SECONDS_PER_TOKEN)
            self._scored.update_s.append(time.thread_time() - begun)


def evaluate_lengths(
    workload: LengthWorkload,
    predictors: dict[str, Callable[[], LifetimePredictor]],
    part: Part = "test",
    after: int = 0,
    on_row: Callable[[str], None] = lambda name: None,
) -> list[LengthRow]:
    """The best constant, the baselines, and the predictors; raises `ConfigError` for a part that is empty."""
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
        scored = Stream(make(), workload, part, after).run()
        rows.append(_row(workload.name, name, scored, best.mae))
    return rows


def _row(workload: str, name: str, scored: _Scored, best_mae: float) -> LengthRow:
    score = score_lengths(
        [one.remaining_tokens for one in scored.predictions],
        scored.actual,
        [not one.abstained for one in scored.predictions],
        [dict(one.quantiles) for one in scored.predictions],
    )
    against = score.mae / best_mae - 1 if best_mae else 0.0
    return LengthRow(
        workload, name, score, against, _median_us(scored.predict_s), _median_us(scored.update_s)
    )


def _median_us(seconds: list[float]) -> float | None:
    return 1e6 * median(seconds) if seconds else None
