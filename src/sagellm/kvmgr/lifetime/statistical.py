"""Length prediction without a model: quantiles of what ended, by length of the prompt."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque

from sagellm.core.protocols.lifetime import Prediction, PredictionRequest
from sagellm.kvmgr.lifetime._pace import Pace

QUANTILES = (0.1, 0.5, 0.9)


class StatisticalLifetimePredictor:
    """Conditional quantiles: of the last `window` outputs in the prompt's length bucket (powers of two),
    those longer than what is generated already.

    Abstains below `min_samples` such outputs, with half of the room that is left as its answer. `max_open`
    bounds how many predicted sequences are remembered until their end.
    """

    def __init__(self, window: int = 512, min_samples: int = 8, max_open: int = 65536) -> None:
        self._window, self._min_samples, self._max_open = window, min_samples, max_open
        self._recent: dict[int, deque[int]] = {}
        self._sorted: dict[int, list[int]] = {}
        self._open: dict[str, int] = {}
        self._pace = Pace()

    def predict(self, request: PredictionRequest) -> Prediction:
        prompt = _prompt_length(request)
        if request.sequence_id not in self._open and len(self._open) >= self._max_open:
            del self._open[next(iter(self._open))]
        self._open[request.sequence_id] = prompt
        generated = max(0, request.current_length - prompt)
        room = max(0, request.max_length - request.current_length)
        outputs = self._sorted.get(prompt.bit_length(), [])
        longer = outputs[bisect_right(outputs, generated) :]
        if len(longer) < self._min_samples:
            return Prediction(room / 2, room / 2 * self._pace.seconds_per_token, 0.0, abstained=True)
        quantiles = {q: float(min(room, _quantile(longer, q) - generated)) for q in QUANTILES}
        spread = (quantiles[0.9] - quantiles[0.1]) / max(1.0, quantiles[0.5])
        seconds = quantiles[0.5] * self._pace.seconds_per_token
        return Prediction(quantiles[0.5], seconds, 1 / (1 + spread), quantiles)

    def update(self, sequence_id: str, actual_length: int, actual_time: float) -> None:
        prompt = self._open.pop(sequence_id, None)
        if prompt is None:
            return
        output = max(0, actual_length - prompt)
        self._pace.observe(output, actual_time)
        bucket = prompt.bit_length()
        recent = self._recent.setdefault(bucket, deque())
        ordered = self._sorted.setdefault(bucket, [])
        recent.append(output)
        insort(ordered, output)
        if len(recent) > self._window:
            ordered.remove(recent.popleft())


def _prompt_length(request: PredictionRequest) -> int:
    return request.current_length if request.num_prompt_tokens is None else request.num_prompt_tokens


def _quantile(ordered: list[int], q: float) -> int:
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


PLUGIN = StatisticalLifetimePredictor
