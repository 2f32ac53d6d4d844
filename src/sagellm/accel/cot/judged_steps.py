"""`JudgedSteps`: which steps of reasoning a small model writes, and which of them stay.

After SpecReason (Pan et al. 2025, arXiv 2504.07891): a small model writes the next step, the served model
reads it in one pass and scores it, and writes itself what scores too low. Reasoning that says the same in
other words is worth as much, so that, unlike with speculative decoding, tokens need not be equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sagellm.accel.cot.early_exit import confidence_of
from sagellm.core.protocols.cot import MAX_SCORE, CoTPlan, ReasoningStep, SpeculativeReasoning, StepAction


class JudgedSteps:
    """Implements `CoTAccelerator` for one choice; a step is a small model's.

    A plan that chooses the last step accepts it. A plan that starts one more has the small model write it;
    one that starts none leaves it to the served model, and one that concludes all that follow.
    """

    def __init__(self, rule: SpeculativeReasoning) -> None:
        self._rule = rule

    def accelerate_cot(self, reasoning_steps: Sequence[ReasoningStep]) -> CoTPlan:
        if not reasoning_steps:
            return CoTPlan(StepAction.CONTINUE, "no step", 1)
        last = reasoning_steps[-1]
        if self._is_accepted(last):
            return CoTPlan(StepAction.CONTINUE, f"a step has score {last.score:.2f}", 1, last.index, 1)
        latest, most = reasoning_steps[-self._rule.max_rejected :], self._rule.max_rejected
        if len(latest) == most and not any(map(self._is_accepted, latest)):
            return CoTPlan(StepAction.CONCLUDE, f"{most} steps in a row were rejected")
        score = "no score" if last.score is None else f"score {last.score:.2f}"
        return CoTPlan(StepAction.CONTINUE, f"a step has {score}")

    def _is_accepted(self, step: ReasoningStep) -> bool:
        return step.score is not None and step.score >= self._rule.threshold


def score_of(likeliest: Iterable[tuple[bytes, float]]) -> float | None:
    """The mean of the digits that a model may draw, weighted by their probabilities.

    `likeliest`: tokens and the logarithms of their probabilities. None: there is no digit among them.
    """
    total, weighted = 0.0, 0.0
    for data, logprob in likeliest:
        digit = data.strip()
        if len(digit) == 1 and digit.isdigit():
            total += math.exp(logprob)
            weighted += math.exp(logprob) * int(digit)
    return weighted / total if total else None


def likelihood_score(logprobs: Sequence[float]) -> float:
    """The score of a step by the probabilities of its tokens, from their logarithms."""
    return MAX_SCORE * confidence_of(logprobs)


@dataclass(slots=True)
class StepBounds:
    """Follows a step token by token, and says where it ends.

    That is with a line that is not empty, or behind `most` tokens.
    """

    most: int
    num_tokens: int = 0
    has_text: bool = False

    def push(self, data: bytes) -> bool:
        """Whether the step ends with this token, of which `data` are the bytes."""
        self.num_tokens += 1
        self.has_text = self.has_text or bool(data.strip())
        return self.num_tokens >= self.most or (self.has_text and b"\n" in data)
