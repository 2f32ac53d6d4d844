"""`ProbeExit`: when the answers of probes say that reasoning may end.

A probe closes the reasoning so far on a fork of the request's KV, and asks for the answer. Two published
rules say when that is enough: dynamic early exit (DEER, Yang et al. 2025, arXiv 2504.15895), where a probe is
confident, and Certaindex (Fu et al. 2024, Dynasor, arXiv 2412.20993), where several probes in a row agree.
`ProbePoints` says where probes stand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sagellm.accel.cot.answers import DECORATION, answer_of
from sagellm.core.protocols.cot import CoTPlan, EarlyExit, ReasoningStep, StepAction

_NO_ANSWER = DECORATION + "\n\r{}"


class ProbeExit:
    """Implements `CoTAccelerator` for one request; a step is the reasoning up to a probe."""

    def __init__(self, rule: EarlyExit) -> None:
        self._rule = rule

    def accelerate_cot(self, reasoning_steps: Sequence[ReasoningStep]) -> CoTPlan:
        last = reasoning_steps[-1] if reasoning_steps else ReasoningStep(-1)
        if last.answer is None:
            return CoTPlan(
                StepAction.CONTINUE, "the last probe has no answer" if reasoning_steps else "no probe"
            )
        if self._rule.window is None:
            return self._by_confidence(last)
        return self._by_agreement(reasoning_steps[-self._rule.window :], self._rule.window)

    def _by_confidence(self, last: ReasoningStep) -> CoTPlan:
        confidence, threshold = last.confidence or 0.0, self._rule.threshold or 1.0
        action = StepAction.CONCLUDE if confidence >= threshold else StepAction.CONTINUE
        return CoTPlan(action, f"a probe has confidence {confidence:.4f}", 0, last.index, 1)

    def _by_agreement(self, latest: Sequence[ReasoningStep], window: int) -> CoTPlan:
        last = latest[-1]
        votes = 0
        for step in reversed(latest):
            if step.answer != last.answer:
                break
            votes += 1
        action = StepAction.CONCLUDE if votes == window else StepAction.CONTINUE
        return CoTPlan(action, f"{votes} of {window} probes in a row agree", 0, last.index, votes)


@dataclass(slots=True)
class ProbePoints:
    """Follows reasoning token by token, and says behind which a probe stands.

    `num_since`: tokens of reasoning since its start or the last probe.
    """

    rule: EarlyExit
    num_since: int = 0

    def push(self, *, is_reasoning: bool, ends_line: bool) -> bool:
        """Whether a probe follows this token. `is_reasoning`: the token stands between the markers."""
        if not is_reasoning:
            self.num_since = 0
            return False
        self.num_since += 1
        if self.num_since < self.rule.every or (self.rule.at == "line" and not ends_line):
            return False
        self.num_since = 0
        return True


def completes_answer(probe: str, text: str, *, has_ended: bool) -> bool:
    """Whether the answer that a model gives behind `probe` is complete with `text`.

    Where the probe leaves a brace open, as that of `\\boxed{`, the answer ends with the brace that closes it;
    else with a line that is not empty, or where the model ends (`has_ended`).
    """
    depth = probe.count("{") - probe.count("}")
    if depth <= 0:
        return has_ended or "\n" in text.lstrip()
    for character in text:
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return True
    return False


def answer_behind(probe: str, text: str) -> str | None:
    """The answer that a complete `text` gives behind `probe`; None if it is empty.

    What the probe itself says is no answer.
    """
    if not text.strip(_NO_ANSWER):
        return None
    opens_brace = probe.count("{") > probe.count("}")
    return answer_of(probe + text if opens_brace else text)


def confidence_of(logprobs: Sequence[float]) -> float:
    """The geometric mean of probabilities, from their logarithms; of none, 0."""
    return math.exp(sum(logprobs) / len(logprobs)) if logprobs else 0.0
