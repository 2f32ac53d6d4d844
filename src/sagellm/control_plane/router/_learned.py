"""What a router has learned of instances' speeds from finished requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from sagellm.core.protocols.router import ExecutionInstance

_KEEP = 0.95
"""Weight of all earlier requests when one more is observed."""
_PRIOR_S = 0.5
"""Seconds that predictions count as having been right for, before anything was observed."""
_MOST = 4.0
"""A correction is at most this factor, either way."""
_MOST_OPEN = 512


@dataclass(slots=True)
class _Learned:
    predictions: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_OPEN))
    predicted_s: float = _PRIOR_S
    observed_s: float = _PRIOR_S
    tpot_s: float = 0.0

    @property
    def factor(self) -> float:
        return min(_MOST, max(1 / _MOST, self.observed_s / self.predicted_s))


class LearnedSpeeds:
    """Seconds per prompt token and per decode step of each instance.

    The instance's own measurements count first. The times to the first token that were predicted for an
    instance are compared with those observed there, in sum, and its speed is corrected by their ratio: an
    instance that is slower than it says, or whose memory is short, gets less.
    """

    def __init__(self, prefill_token_s: float, step_s: float) -> None:
        self._prefill_token_s = prefill_token_s
        self._step_s = step_s
        self._learned: dict[str, _Learned] = {}

    def of(self, instance: ExecutionInstance) -> tuple[float, float]:
        """Seconds per prompt token, and per step of decode."""
        learned = self._learned.get(instance.instance_id)
        rate = instance.prefill_token_s or self._prefill_token_s
        step_s = instance.step_s
        if learned is None:
            return rate, step_s or self._step_s
        return rate * learned.factor, step_s or learned.tpot_s or self._step_s

    def predict(self, instance_id: str, ttft_s: float) -> None:
        """A request was placed, and its first token is expected after so long."""
        self._learned.setdefault(instance_id, _Learned()).predictions.append(ttft_s)

    def observe(self, instance_id: str, latencies_s: Mapping[str, float]) -> None:
        """A request has ended. Requests end in about the order in which they were placed, so sums suffice."""
        learned = self._learned.setdefault(instance_id, _Learned())
        tpot_s, ttft_s = latencies_s.get("tpot"), latencies_s.get("ttft")
        if tpot_s is not None and tpot_s > 0:
            learned.tpot_s = tpot_s if not learned.tpot_s else _KEEP * learned.tpot_s + (1 - _KEEP) * tpot_s
        if ttft_s is not None and learned.predictions:
            learned.predicted_s = _KEEP * learned.predicted_s + learned.predictions.popleft()
            learned.observed_s = _KEEP * learned.observed_s + ttft_s
