"""How fast the backend computes, learned from the steps that it took."""

from __future__ import annotations

from sagellm.core.protocols.scheduler_ir import NO_STEP, StepFacts

STEADY = 0.8
"""Weight of the past in each mean, for a step with at least `TYPICAL` prompt tokens."""
TYPICAL = 512
OUTLIER = 8.0
"""A step that took so many times what was expected waited for something else, and counts as that many."""


class StepPace:
    """Time of a step = `step_s` + prompt tokens * `token_s`: two running means, in seconds.

    `step_s` is learned from steps that only decode, `token_s` from what steps with prompts take beyond that.
    The figures given hold until the first of each kind; `is_known` once there was one with prompts.
    """

    def __init__(self, step_s: float = 0.01, token_s: float = 5e-5) -> None:
        self.step_s, self.token_s = step_s, token_s
        self.is_known = False
        self._decodes_known = False
        self._last: StepFacts = NO_STEP

    def observe(self, facts: StepFacts) -> None:
        """Told of the last step; the same facts a second time teach nothing."""
        if facts is self._last:
            return
        self._last = facts
        seconds, prompt_tokens = facts.duration_s, facts.num_prefill_tokens
        if seconds <= 0 or not prompt_tokens + facts.num_decodes:
            return
        if not prompt_tokens:
            self.step_s = _mean(self.step_s, seconds) if self._decodes_known else seconds
            self._decodes_known = True
            return
        beyond = seconds - (self.step_s if facts.num_decodes and self._decodes_known else 0.0)
        newest = max(beyond, 0.1 * seconds) / prompt_tokens
        weight = min(1.0, prompt_tokens / TYPICAL)
        self.token_s = _mean(self.token_s, newest, weight) if self.is_known else newest
        self.is_known = True

    def prefill_s(self, num_tokens: int, budget: int) -> float:
        """Seconds for so many tokens of prompts in steps of `budget` tokens."""
        return num_tokens * (self.token_s + self.step_s / max(1, budget))

    def tokens_in(self, seconds: float) -> int:
        """Prompt tokens that fit into a step of this time beside its decodes."""
        return max(0, int((seconds - self.step_s) / self.token_s))


def _mean(old: float, new: float, weight: float = 1.0) -> float:
    return old + (1 - STEADY) * weight * (min(new, OUTLIER * old) - old)
