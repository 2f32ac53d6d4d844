"""Contract of chain-of-thought acceleration: fewer reasoning tokens for the same answer.

The one module of `accel` that may change output, so that what it did is always reported, and only requests
that ask for it are concerned. What it decides is a plan; `engines/llm` starts and ends what the plan says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from sagellm.core.errors import RequestError
from sagellm.core.types import MAX_N

MIN_WINDOW = 2
"""A window of one sample would always agree with itself."""


class StepAction(str, Enum):
    """What follows. CONTINUE: start the plan's number of steps. CONCLUDE: end those that run."""

    CONTINUE = "continue"
    CONCLUDE = "conclude"


@dataclass(frozen=True, slots=True)
class EarlyStop:
    """When samples of one prompt are enough; part of a request.

    `window` samples run at a time. Without `confidence` a window whose answers are all equal is enough. With
    it, samples are enough when the leading answer beats the second one with this probability.
    Raises `RequestError`.
    """

    window: int = 4
    confidence: float | None = None

    def __post_init__(self) -> None:
        window: object = self.window
        if not isinstance(window, int) or not MIN_WINDOW <= window <= MAX_N:
            raise RequestError(
                f"early_stop.window must be an integer in [{MIN_WINDOW}, {MAX_N}], got {window}", "early_stop"
            )
        if self.confidence is not None and not 0.5 < self.confidence < 1:
            raise RequestError(
                f"early_stop.confidence must be above 0.5 and below 1, got {self.confidence}", "early_stop"
            )


@dataclass(frozen=True, slots=True)
class ReasoningStep:
    """A piece of reasoning that ends in an answer.

    Such as one of several samples of a prompt. `answer`: in a form that equal answers share; None while the
    step runs, and where it has ended without.
    """

    index: int
    has_ended: bool = False
    answer: str | None = None

    def __post_init__(self) -> None:
        if self.answer is not None and not self.has_ended:
            raise ValueError(f"step {self.index} has an answer, {self.answer!r}, and has not ended")


@dataclass(frozen=True, slots=True)
class CoTPlan:
    """What follows the steps so far, and why.

    `num_to_start`: how many more steps to start now. `chosen`: index of the first step with the answer that
    has most votes, and `num_votes` of them; None and 0: no step has one.
    """

    action: StepAction
    reason: str
    num_to_start: int = 0
    chosen: int | None = None
    num_votes: int = 0

    def __post_init__(self) -> None:
        if self.num_to_start < 0 or (self.num_to_start and self.action is StepAction.CONCLUDE):
            raise ValueError(f"a plan to {self.action.value} cannot start {self.num_to_start} steps")


class CoTAccelerator(Protocol):
    """Decides what a request still computes. Deterministic for equal steps."""

    def accelerate_cot(self, reasoning_steps: Sequence[ReasoningStep]) -> CoTPlan:
        """What follows, given all steps that have been started, in order of their index.

        Without enough to go on it says `CONTINUE`: doing nothing is always right."""


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
