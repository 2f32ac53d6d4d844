"""`early_stop`, `early_exit` and `speculative_reasoning` over HTTP: fields of requests and of answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sagellm.core.protocols.cot import (
    FINAL_ANSWER,
    JUDGE,
    MAX_JUDGE_CHARS,
    MAX_PROBE_CHARS,
    MAX_PROBE_TOKENS,
    MAX_SCORE,
    MAX_STEP_TOKENS,
    MIN_STEP_TOKENS,
    MIN_WINDOW,
    EarlyExit,
    EarlyStop,
    ProbePlace,
    SpeculativeReasoning,
)
from sagellm.core.types import MAX_N
from sagellm.engines.llm import Choice, Consensus, DraftedSteps, ReasoningExit, TextDelta

_DEFAULT = EarlyExit()
_DRAFTED = SpeculativeReasoning()
_NOTHING_ELSE = ConfigDict(strict=True, extra="forbid")
_ONE_METHOD: dict[str, Any] = {
    "anyOf": [
        {"properties": {"method": {"const": "confidence"}, "window": {"type": "null"}}},
        {
            "properties": {"method": {"const": "agreement"}, "threshold": {"type": "null"}},
            "required": ["method"],
        },
    ]
}
"""What the fields of `early_exit` demand of each other."""


class EarlyStopFields(BaseModel):
    """`window` choices run at first, until the answers of a window are equal.

    While none can be, `growth` times as many are started in all, at least another window. With `confidence`
    `window` choices run at a time, until the leading answer beats the second one with this probability.
    """

    model_config = _NOTHING_ELSE

    window: int = Field(default=EarlyStop().window, ge=MIN_WINDOW, le=MAX_N)
    confidence: float | None = Field(default=None, gt=0.5, lt=1)
    growth: int = Field(default=EarlyStop().growth, ge=1, le=MAX_N)

    def rule(self) -> EarlyStop:
        return EarlyStop(self.window, self.confidence, self.growth)


class EarlyExitFields(BaseModel):
    """Reasoning is closed once a probe answers with confidence `threshold`, or `window` probes agree.

    A probe follows at least `every` tokens of reasoning, `at` the end of a line or any token. It draws up to
    `max_probe_tokens` tokens behind the end marker and the text `probe`.
    """

    model_config = ConfigDict(**_NOTHING_ELSE, json_schema_extra=_ONE_METHOD)

    method: Literal["confidence", "agreement"] = "confidence"
    threshold: float | None = Field(default=None, gt=0, le=1)
    window: int | None = Field(default=None, ge=MIN_WINDOW, le=MAX_N)
    every: int = Field(default=_DEFAULT.every, ge=1, lt=2**31)
    at: ProbePlace = _DEFAULT.at
    probe: str = Field(default=FINAL_ANSWER, max_length=MAX_PROBE_CHARS)
    max_probe_tokens: int = Field(default=_DEFAULT.max_probe_tokens, ge=1, le=MAX_PROBE_TOKENS)

    @model_validator(mode="after")
    def _of_one_method(self) -> EarlyExitFields:
        other = "window" if self.method == "confidence" else "threshold"
        if getattr(self, other) is not None:
            raise ValueError(f"{other} is not for method {self.method!r}: leave it out, or send the other")
        return self

    def rule(self) -> EarlyExit:
        threshold, window = self.threshold, self.window
        if self.method == "confidence":
            threshold = _DEFAULT.threshold if threshold is None else threshold
        else:
            window = DEFAULT_AGREEING if window is None else window
        return EarlyExit(threshold, window, self.every, self.at, self.probe, self.max_probe_tokens)


DEFAULT_AGREEING = 3
"""So many probes in a row agree, if a request for agreement does not say how many."""


class SpeculativeReasoningFields(BaseModel):
    """A small model writes steps of reasoning; those that score `threshold` stay.

    A step is a line of at most `max_step_tokens` tokens. The served model scores it from 0 to 9 behind the
    text `judge`, or by its tokens' probabilities if that is empty. It writes itself what scores less, and all
    that follows `max_rejected` such steps in a row.
    """

    model_config = _NOTHING_ELSE

    threshold: float = Field(default=_DRAFTED.threshold, ge=0, le=MAX_SCORE)
    max_step_tokens: int = Field(default=_DRAFTED.max_step_tokens, ge=MIN_STEP_TOKENS, le=MAX_STEP_TOKENS)
    max_rejected: int = Field(default=_DRAFTED.max_rejected, ge=1, lt=2**31)
    judge: str = Field(default=JUDGE, max_length=MAX_JUDGE_CHARS)

    def rule(self) -> SpeculativeReasoning:
        return SpeculativeReasoning(self.threshold, self.max_step_tokens, self.max_rejected, self.judge)


Rule = TypeVar("Rule", covariant=True)


class RuleFields(Protocol[Rule]):
    """The fields of a rule, which all have defaults."""

    def rule(self) -> Rule: ...


def rule_of(given: bool | RuleFields[Rule] | None, fields: Callable[[], RuleFields[Rule]]) -> Rule | None:
    """The rule of a request, by its fields; true is the default one."""
    if not given:
        return None
    return (fields() if isinstance(given, bool) else given).rule()


class VoteOutcome(BaseModel):
    """What became of the `n` choices of one prompt, for `early_stop`.

    Used ones ended by themselves, saved ones were aborted or never started. `answer` has most votes, and
    choice `majority_index` is the first that gives it; null: none has an answer.
    """

    model_config = _NOTHING_ELSE

    samples_used: int
    samples_saved: int
    majority_index: int | None
    answer: str | None
    votes: int
    reason: str


class ExitOutcome(BaseModel):
    """What became of the reasoning of choice `index`, for `early_exit`.

    It was closed behind `reasoning_tokens_at_exit` tokens; null: it was not. `answer`: of the last probe that
    counted.
    """

    model_config = _NOTHING_ELSE

    index: int
    probes: int
    probe_tokens: int
    reasoning_tokens_at_exit: int | None
    answer: str | None
    reason: str


class DraftedOutcome(BaseModel):
    """What became of the steps of a small model in choice `index`, for `speculative_reasoning`.

    Accepted steps are in its reasoning. `draft_tokens`: drawn by the small model; `judge_tokens`: computed by
    the served model to score them.
    """

    model_config = _NOTHING_ELSE

    index: int
    steps: int
    accepted_steps: int
    accepted_tokens: int
    draft_tokens: int
    judge_tokens: int
    reason: str


def vote_outcome(consensus: Consensus, first_index: int) -> dict[str, Any]:
    """A `VoteOutcome`; the choices of its prompt are numbered from `first_index` on."""
    index = consensus.majority_index
    return {
        "samples_used": consensus.num_used,
        "samples_saved": consensus.num_samples - consensus.num_used,
        "majority_index": None if index is None else first_index + index,
        "answer": consensus.answer,
        "votes": consensus.num_votes,
        "reason": consensus.reason,
    }


def outcomes_of(ended: TextDelta | Choice, index: int) -> dict[str, dict[str, Any]]:
    """The `ExitOutcome` and the `DraftedOutcome` of a choice, by field of the answer."""
    found = {}
    if ended.exit is not None:
        found["early_exit"] = _exit_outcome(ended.exit, index)
    if ended.drafted is not None:
        found["speculative_reasoning"] = _drafted_outcome(ended.drafted, index)
    return found


def _drafted_outcome(result: DraftedSteps, index: int) -> dict[str, Any]:
    return {
        "index": index,
        "steps": result.num_steps,
        "accepted_steps": result.num_accepted,
        "accepted_tokens": result.num_accepted_tokens,
        "draft_tokens": result.num_draft_tokens,
        "judge_tokens": result.num_judge_tokens,
        "reason": result.reason,
    }


def _exit_outcome(result: ReasoningExit, index: int) -> dict[str, Any]:
    return {
        "index": index,
        "probes": result.num_probes,
        "probe_tokens": result.num_probe_tokens,
        "reasoning_tokens_at_exit": result.ended_at,
        "answer": result.answer,
        "reason": result.reason,
    }
