"""Contract of chain-of-thought acceleration: fewer reasoning tokens for the same answer.

The one module of `accel` that may change output, so that what it did is always reported, and switching it off
is always possible per request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from sagellm.core.types import Tokens


class StepAction(str, Enum):
    """What follows a reasoning step: continue, end the reasoning, or drop its KV."""

    CONTINUE = "continue"
    CONCLUDE = "conclude"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class ReasoningStep:
    """One step of a reasoning chain: its token range and the model's confidence. `confidence` in the answer
    that the model would give now is 0 to 1, or None where it was not measured."""

    index: int
    first_token: int
    num_tokens: int
    confidence: float | None = None


@dataclass(frozen=True, slots=True)
class CoTPlan:
    """One action per step, with its reason and the tokens that it should save."""

    actions: tuple[StepAction, ...]
    reason: str
    expected_saved_tokens: int


class CoTAccelerator(Protocol):
    """Decides while the chain grows. Deterministic for equal steps."""

    def accelerate_cot(self, reasoning_steps: Sequence[ReasoningStep]) -> CoTPlan:
        """An action for each step. Without enough to go on it says `CONTINUE` for all: doing nothing is
        always right. `CONCLUDE` stands at most once, at the last step."""

    def segment(self, tokens: Tokens, start: int) -> Sequence[ReasoningStep]:
        """Cut the reasoning from token `start` on into steps without gaps."""


class AccelController(Protocol):
    """What of `accel` is on, for which request, at this load. Asked once per request and once per step.

    It switches; it constructs nothing. What is not configured is off, and asking for it is answered with
    False.
    """

    def use_speculation(self, request_id: str, num_running: int) -> bool: ...

    def use_cot(self, request_id: str) -> bool: ...

    def kv_profile(self, phase: str) -> str | None:
        """The KV quantization profile for 'prefill' or 'decode'. None: the model's own format."""

    def report(self) -> dict[str, float]:
        """Figures by name since the start: acceptance rate, tokens saved, bytes saved, ..."""
