"""`VotedSamples`: the samples of a request with `early_stop`, and their answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from sagellm.accel.cot.answers import answer_of
from sagellm.core.protocols.acceleration import AccelController
from sagellm.core.protocols.cot import CoTPlan, EarlyStop, ReasoningStep
from sagellm.core.types import Request
from sagellm.engines.llm.accelerations import EARLY_STOP
from sagellm.engines.llm.completion import Consensus


class VotedSamples:
    """Owns engine requests until they are started, and the texts of those that are.

    `reasoning_end`: the text that ends reasoning, which is no answer.
    """

    def __init__(
        self, requests: Sequence[Request], rule: EarlyStop, accel: AccelController, reasoning_end: str
    ) -> None:
        self._waiting = deque(requests)
        self._num_samples = len(requests)
        self._accel = accel
        self._policy = accel.early_stop(len(requests), rule)
        self._reasoning_end = reasoning_end
        self._texts: list[list[str]] = []
        self._steps: list[ReasoningStep] = []

    def start(self, number: int) -> list[Request]:
        """The next so many samples, in order of their index."""
        requests = [self._waiting.popleft() for _ in range(number)]
        for _ in requests:
            self._steps.append(ReasoningStep(len(self._steps)))
            self._texts.append([])
        return requests

    def add(self, index: int, text: str, *, has_ended: bool, answers: bool) -> None:
        """Take in what a step has added to a sample. `answers`: it came to an answer, and was not cut."""
        self._texts[index].append(text)
        if has_ended:
            whole = "".join(self._texts[index])
            answer = answer_of(whole, self._reasoning_end) if answers else None
            self._steps[index] = ReasoningStep(index, has_ended=True, answer=answer)

    def plan(self) -> CoTPlan:
        """What follows the samples so far."""
        return self._policy.accelerate_cot(self._steps)

    def consensus(self, plan: CoTPlan) -> Consensus:
        """The result, by the plan that concludes the request. It is counted as saved."""
        num_used = sum(step.has_ended for step in self._steps)
        saved, aborted = self._num_samples - num_used, len(self._steps) - num_used
        self._accel.count(EARLY_STOP, saved={"samples": saved}, spent={"aborted samples": aborted})
        return Consensus(
            num_samples=self._num_samples,
            num_started=len(self._steps),
            num_used=num_used,
            majority_index=plan.chosen,
            answer=None if plan.chosen is None else self._steps[plan.chosen].answer,
            num_votes=plan.num_votes,
            reason=plan.reason,
        )
