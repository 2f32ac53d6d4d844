"""Contract of chain-of-thought acceleration: fewer reasoning tokens for the same answer.

The one module of `accel` that may change output, so that what it did is always reported, and only requests
that ask for it are concerned. What it decides is a plan; `engines/llm` starts and ends what the plan says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Literal, Protocol, get_args

from sagellm.core.errors import RequestError, shown
from sagellm.core.field_checks import is_integer, is_number
from sagellm.core.types import MAX_N

MIN_WINDOW = 2
"""A window of one sample would always agree with itself."""

MAX_PROBE_CHARS = 256
MAX_PROBE_TOKENS = 64
FINAL_ANSWER = "\n\n**Final Answer**\n\\boxed{"
"""What DEER puts behind reasoning, so that a model gives its answer alone."""

MAX_SCORE = 9
MAX_JUDGE_CHARS = 1024
MIN_STEP_TOKENS = 2
"""To judge one token takes the served model a step, as to draw it: such steps could save nothing."""
MAX_STEP_TOKENS = 1024
JUDGE = (
    "\n\nWait, I rate the last step of this reasoning from 0 (wrong or useless) to 9 (right and useful), "
    "with a single digit.\nScore: "
)
"""What stands behind a step, so that a model gives its score alone."""

ProbePlace = Literal["line", "token"]
"""Where a probe may follow: behind the end of a line, or behind any token."""


class StepAction(str, Enum):
    """What follows. CONTINUE: start the plan's number of steps. CONCLUDE: end those that run."""

    CONTINUE = "continue"
    CONCLUDE = "conclude"


@dataclass(frozen=True, slots=True)
class EarlyStop:
    """When samples of one prompt are enough; part of a request.

    `window` samples run at first. Without `confidence` a window whose answers are all equal is enough; while
    none can be, `growth` times as many samples are started in all (1: one window more). With it, `window`
    samples run at a time, and are enough when the leading answer beats the second one with this probability.
    Raises `RequestError`.
    """

    window: int = 4
    confidence: float | None = None
    growth: int = 2

    def __post_init__(self) -> None:
        _check_types(self, "early_stop")
        window, growth = self.window, self.growth
        if not MIN_WINDOW <= window <= MAX_N:
            raise RequestError(
                f"early_stop.window must be an integer in [{MIN_WINDOW}, {MAX_N}], got {window}", "early_stop"
            )
        if self.confidence is not None and not 0.5 < self.confidence < 1:
            raise RequestError(
                f"early_stop.confidence must be above 0.5 and below 1, got {self.confidence}", "early_stop"
            )
        if not 1 <= growth <= MAX_N:
            raise RequestError(
                f"early_stop.growth must be an integer in [1, {MAX_N}], got {growth}", "early_stop"
            )


@dataclass(frozen=True, slots=True)
class EarlyExit:
    """When reasoning is closed because its answer is known; part of a request.

    Probes ask for the answer so far, each with at most `max_probe_tokens` tokens behind `probe`; there are at
    least `every` tokens of reasoning before each, and it stands `at` the end of a line or anywhere. Reasoning
    ends where a probe answers with a confidence of at least `threshold` (the geometric mean of its tokens'
    probabilities), or, with `window`, where so many probes in a row give one answer. Raises `RequestError`.
    """

    threshold: float | None = 0.95
    window: int | None = None
    every: int = 32
    at: ProbePlace = "line"
    probe: str = FINAL_ANSWER
    max_probe_tokens: int = 16

    def __post_init__(self) -> None:
        _check_types(self, "early_exit")
        if (self.threshold is None) == (self.window is None):
            both = f"{self.threshold} and {self.window}"
            raise _wrong("early_exit", "needs either a threshold or a window", both)
        if self.threshold is not None and not 0 < self.threshold <= 1:
            raise _wrong("early_exit", "threshold must be above 0 and at most 1", self.threshold)
        if self.window is not None and not MIN_WINDOW <= self.window <= MAX_N:
            raise _wrong("early_exit", f"window must be in [{MIN_WINDOW}, {MAX_N}]", self.window)
        if self.every < 1:
            raise _wrong("early_exit", "every must be at least 1", self.every)
        if self.at not in get_args(ProbePlace):
            raise _wrong("early_exit", f"at must be one of {', '.join(get_args(ProbePlace))}", self.at)
        if len(self.probe) > MAX_PROBE_CHARS:
            raise _wrong("early_exit", f"probe has at most {MAX_PROBE_CHARS} characters", len(self.probe))
        if not 1 <= self.max_probe_tokens <= MAX_PROBE_TOKENS:
            limit = f"max_probe_tokens must be in [1, {MAX_PROBE_TOKENS}]"
            raise _wrong("early_exit", limit, self.max_probe_tokens)


@dataclass(frozen=True, slots=True)
class SpeculativeReasoning:
    """How a small model writes reasoning that is judged; part of a request.

    A step is a line of at most `max_step_tokens` tokens. Behind it and the text `judge` the served model
    gives a score from 0 to 9; with an empty `judge` the score is 9 times the geometric mean of the
    probabilities that it gives the step's tokens. From `threshold` on the step stays as it is, else the
    served model writes it. After `max_rejected` rejected steps in a row it writes all that follows. Raises
    `RequestError`.
    """

    threshold: float = 7.0
    max_step_tokens: int = 128
    max_rejected: int = 3
    judge: str = JUDGE

    def __post_init__(self) -> None:
        field = "speculative_reasoning"
        _check_types(self, field)
        if not 0 <= self.threshold <= MAX_SCORE:
            raise _wrong(field, f"threshold must be in [0, {MAX_SCORE}]", self.threshold)
        if not MIN_STEP_TOKENS <= self.max_step_tokens <= MAX_STEP_TOKENS:
            limit = f"max_step_tokens must be in [{MIN_STEP_TOKENS}, {MAX_STEP_TOKENS}]"
            why = "to judge one token takes the served model as many steps as to draw it"
            raise _wrong(field, f"{limit} ({why})", self.max_step_tokens)
        if self.max_rejected < 1:
            raise _wrong(field, "max_rejected must be at least 1", self.max_rejected)
        if len(self.judge) > MAX_JUDGE_CHARS:
            raise _wrong(field, f"judge has at most {MAX_JUDGE_CHARS} characters", len(self.judge))


_TYPES: Mapping[str, tuple[str, Callable[[object], bool]]] = {
    "int": ("an integer", is_integer),
    "float": ("a number", is_number),
    "str": ("a text", lambda value: isinstance(value, str)),
}


def _check_types(rule: Any, field: str) -> None:
    """Raise `RequestError` for a value of another type than its field."""
    for each in fields(rule):
        name, *or_none = each.type.split(" | ")
        value = getattr(rule, each.name)
        if name in _TYPES and not (or_none and value is None) and not _TYPES[name][1](value):
            raise _wrong(field, f"{each.name} must be {_TYPES[name][0]}", value)


def _wrong(field: str, wanted: str, given: object) -> RequestError:
    return RequestError(f"{field}: {wanted}, got {shown(given)}", field)


@dataclass(frozen=True, slots=True)
class ReasoningStep:
    """A piece of reasoning that ends in an answer, or that is judged.

    Such as one of several samples of a prompt, the reasoning up to a probe, or a line. `answer`: in a form
    that equal answers share; None while the step runs, and where it has ended without. `confidence`: the
    geometric mean of the probabilities of the answer's tokens; `score`: a judge's, 0 to 9. None: not known.
    """

    index: int
    has_ended: bool = False
    answer: str | None = None
    confidence: float | None = None
    score: float | None = None

    def __post_init__(self) -> None:
        if self.answer is not None and not self.has_ended:
            raise ValueError(f"step {self.index} has an answer, {self.answer!r}, and has not ended")


@dataclass(frozen=True, slots=True)
class CoTPlan:
    """What follows the steps so far, and why.

    `num_to_start`: how many more steps to start now. `chosen`: index of the first step with the answer that
    has most votes, and `num_votes` of them, or of the last step if that is accepted; None and 0: of none.
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
