"""Seconds per output token, learned from what ended."""

from __future__ import annotations


class Pace:
    """An exponential moving average of seconds per token; `decay` is the weight of the past."""

    def __init__(self, seconds_per_token: float = 0.02, decay: float = 0.9) -> None:
        self.seconds_per_token = seconds_per_token
        self._decay = decay

    def observe(self, num_tokens: int, seconds: float) -> None:
        if num_tokens > 0 and seconds >= 0:
            newest = seconds / num_tokens
            self.seconds_per_token = self._decay * self.seconds_per_token + (1 - self._decay) * newest
