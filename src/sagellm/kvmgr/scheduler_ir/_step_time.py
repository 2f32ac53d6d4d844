"""A model of how long a step takes, learned from past steps."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sagellm.core.protocols.scheduler_ir import NO_STEP, StepFacts

STEADY = 0.9
"""Weight of the past, in the moments of each step size and in the mean of steps that only decode."""
OUTLIER = 8.0
"""A step is counted as at most this many times the expected time: it waited for something else."""
RIDGE = 1e-4
"""Keeps the least squares solvable where two parts always came together: they share the time."""
SHORTEST_S = 1e-12
"""Least time of a token, so that it can be a divisor."""

Matrix = npt.NDArray[np.float64]


class StepTimeModel:
    """Seconds of a step: `fixed_s` + decodes * `row_s` + prompt tokens * `token_s`.

    A step without prompt tokens takes `step_s`, the mean of such steps. The three coefficients are fitted to
    all steps with prompts, by least squares of the relative error, none below 0. Moments are kept for each
    step size (power of two of the prompt tokens), so that many steps of one size do not replace what was
    learned from others. The constructor's values hold until the first step of each kind; `is_known` is set
    after the first one with prompts.
    """

    def __init__(self, step_s: float = 0.01, token_s: float = 5e-5) -> None:
        self.step_s, self.token_s = step_s, token_s
        self.fixed_s, self.row_s = step_s, 0.0
        self.is_known = False
        self._decodes_known = False
        self._last: StepFacts = NO_STEP
        self._sizes: dict[int, Matrix] = {}

    def observe(self, facts: StepFacts) -> bool:
        """Learn from the last step. False if there is nothing to learn, as from the same facts twice."""
        if facts is self._last:
            return False
        self._last = facts
        seconds = facts.duration_s
        if seconds <= 0 or not facts.num_prefill_tokens + facts.num_decodes:
            return False
        if facts.num_prefill_tokens:
            self._learn(facts)
        else:
            old = self.step_s if self._decodes_known else seconds
            self.step_s = old + (1 - STEADY) * (min(seconds, OUTLIER * old) - old)
            self._decodes_known = True
        return True

    def prefill_s(self, num_tokens: int, token_budget: int, num_decodes: int = 0) -> float:
        """Seconds to compute `num_tokens` prompt tokens, `budget` of them per step beside `num_decodes`."""
        return num_tokens * (self.token_s + (self.fixed_s + self.row_s * num_decodes) / max(1, token_budget))

    def tokens_in(self, seconds: float, num_decodes: int) -> int:
        """Prompt tokens that fit into a step of `seconds` beside `num_decodes`."""
        return max(0, int((seconds - self.fixed_s - self.row_s * num_decodes) / self.token_s))

    def _learn(self, facts: StepFacts) -> None:
        decodes, tokens, seconds = facts.num_decodes, facts.num_prefill_tokens, facts.duration_s
        expected_s = self.prefill_s(tokens, tokens, decodes) if self.is_known else seconds
        seconds = min(seconds, OUTLIER * expected_s)
        row = np.array([1.0, decodes, tokens, seconds]) / expected_s
        new = np.outer(row, row)
        size = tokens.bit_length()
        seen = self._sizes.get(size)
        self._sizes[size] = new if seen is None else STEADY * seen + (1 - STEADY) * new
        moments: Matrix = np.sum(list(self._sizes.values()), axis=0)
        self.fixed_s, self.row_s, token_s = _least_squares(moments[:3, :3], moments[:3, 3])
        self.token_s = max(token_s, SHORTEST_S)
        self.is_known = True


def _least_squares(square: Matrix, right: Matrix) -> list[float]:
    """Non-negative coefficients that solve the normal equations. A negative one is set to 0."""
    scale = np.sqrt(np.diag(square))
    chosen = [index for index in range(len(scale)) if scale[index] > 0]
    found = [0.0] * len(scale)
    while chosen:
        block = np.ix_(chosen, chosen)
        units = scale[chosen]
        solved = np.linalg.solve(
            square[block] / np.outer(units, units) + RIDGE * np.eye(len(chosen)), right[chosen] / units
        )
        worst = int(np.argmin(solved))
        if solved[worst] >= 0:
            for index, value in zip(chosen, (solved / units).tolist(), strict=True):
                found[index] = value
            break
        del chosen[worst]
    return found
