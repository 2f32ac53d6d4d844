"""`SelfConsistency`: when enough samples of one prompt have been drawn to know their majority.

Self-consistency (Wang et al. 2022, arXiv 2203.11171) draws n samples and takes the answer with most votes.
Most prompts need fewer. Two published rules say when: early-stopping self-consistency (ESC, Li et al. 2024,
arXiv 2401.10480), where a window of samples agrees, and adaptive consistency (Aggarwal et al. 2023, arXiv
2305.11860), where the leading answer is confirmed. Under both it is also enough that no answer can catch up,
which never changes the majority.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb, ldexp

from sagellm.core.protocols.cot import CoTPlan, EarlyStop, ReasoningStep, StepAction


class SelfConsistency:
    """Implements `CoTAccelerator` for a request of at most `num_samples`; a step is a sample.

    Without a `rule` all samples run, and all at once.
    """

    def __init__(self, num_samples: int, rule: EarlyStop | None) -> None:
        self._num_samples = num_samples
        self._rule = rule

    def accelerate_cot(self, reasoning_steps: Sequence[ReasoningStep]) -> CoTPlan:
        ended = [step for step in reasoning_steps if step.has_ended]
        votes = Counter(step.answer for step in ended if step.answer is not None)
        ranked = sorted(votes.values(), reverse=True)
        first, second = (*ranked, 0, 0)[:2]
        chosen = next((step.index for step in ended if step.answer and votes[step.answer] == first), None)
        reason = self._enough(reasoning_steps, len(ended), first, second)
        if reason:
            return CoTPlan(StepAction.CONCLUDE, reason, 0, chosen, first)
        num_running = len(reasoning_steps) - len(ended)
        more = min(self._num_more(reasoning_steps, num_running), self._num_samples - len(reasoning_steps))
        reason = "more samples are needed" if more else "samples run"
        return CoTPlan(StepAction.CONTINUE, reason, more, chosen, first)

    def _enough(self, steps: Sequence[ReasoningStep], num_ended: int, first: int, second: int) -> str:
        """Why the samples are enough; empty: they are not."""
        num_left = self._num_samples - num_ended
        if not num_left:
            return f"all {self._num_samples} samples have ended"
        if self._rule is None:
            return ""
        if first > second + num_left:
            return f"no other answer can reach {first} votes"
        confidence = self._rule.confidence
        if confidence is None:
            for window in _windows(steps, self._rule.window):
                if len(window) == self._rule.window and _agree(window):
                    return f"{len(window)} samples in a row agree"
        elif first and leads(first, second) >= confidence:
            return f"{first} votes lead {second} with a probability of {leads(first, second):.4f}"
        return ""

    def _num_more(self, steps: Sequence[ReasoningStep], num_running: int) -> int:
        """How many samples may start, if there are so many."""
        if self._rule is None:
            return self._num_samples
        window = self._rule.window
        if self._rule.confidence is not None:
            return max(0, window - num_running)
        if not steps:
            return window
        can_agree = not all(map(_cannot_agree, _windows(steps, window)))
        return 0 if can_agree else max(window, (self._rule.growth - 1) * len(steps))


def leads(first: int, second: int) -> float:
    """How likely an answer with `first` votes is more frequent than one with `second`.

    That is the chance that p > 1/2 where p has the distribution Beta(first + 1, second + 1), after votes for
    these two alone and a uniform prior.
    """
    total = first + second + 1
    return ldexp(sum(comb(total, count) for count in range(first + 1)), -total)


def _windows(steps: Sequence[ReasoningStep], size: int) -> list[Sequence[ReasoningStep]]:
    return [steps[start : start + size] for start in range(0, len(steps), size)]


def _agree(window: Sequence[ReasoningStep]) -> bool:
    answer = window[0].answer
    return answer is not None and all(step.answer == answer for step in window)


def _cannot_agree(window: Sequence[ReasoningStep]) -> bool:
    """Whether ended samples of the window differ, or one has no answer."""
    answers = {step.answer for step in window if step.has_ended}
    return len(answers) > 1 or None in answers
