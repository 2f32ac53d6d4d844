"""How fast the backend computes, learned from the steps that it took."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sagellm.core.protocols.scheduler_ir import NO_STEP, StepFacts

STEADY = 0.9
"""Weight of the past in what is known of steps of one size, and in the mean of steps that only decode."""
OUTLIER = 8.0
"""A step that took so many times what was expected waited for something else, and counts as that many."""
RIDGE = 1e-4
"""Keeps the least squares solvable where parts of a step were never seen apart: they share the time."""
SHORTEST_S = 1e-12
"""Of a token, so that times can be divided by it."""

Matrix = npt.NDArray[np.float64]


class StepPace:
    """Seconds of a step = `fixed_s` + decodes * `row_s` + prompt tokens * `token_s`, and for steps that only
    decode their mean, `step_s`.

    The three parts are those of all steps with prompts that fit best, by relative error (least squares, none
    below 0). Steps are remembered by size, in powers of two of their prompt tokens, so that many steps of one
    size do not wipe out what others taught. The figures given hold until the first step of each kind;
    `is_known` once there was one with prompts.
    """

    def __init__(self, step_s: float = 0.01, token_s: float = 5e-5) -> None:
        self.step_s, self.token_s = step_s, token_s
        self.fixed_s, self.row_s = step_s, 0.0
        self.is_known = False
        self._decodes_known = False
        self._last: StepFacts = NO_STEP
        self._sizes: dict[int, Matrix] = {}

    def observe(self, facts: StepFacts) -> bool:
        """Learn from the last step; False for the same facts a second time, which teach nothing."""
        if facts is self._last:
            return False
        self._last = facts
        seconds = facts.duration_s
        if seconds <= 0 or not facts.num_prefill_tokens + facts.num_decodes:
            return False
        if facts.num_prefill_tokens:
            self._learn(facts)
        else:
            self.step_s = _mean(self.step_s, seconds) if self._decodes_known else seconds
            self._decodes_known = True
        return True

    def prefill_s(self, num_tokens: int, budget: int, num_decodes: int = 0) -> float:
        """Seconds for so many tokens of prompts in steps of `budget` of them beside `num_decodes`."""
        return num_tokens * (self.token_s + (self.fixed_s + self.row_s * num_decodes) / max(1, budget))

    def tokens_in(self, seconds: float, num_decodes: int) -> int:
        """Prompt tokens that fit into a step of this time beside so many decodes."""
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
    """Parts, none below 0, that solve the normal equations; one that would be negative is left out."""
    scale = np.sqrt(np.diag(square))
    chosen = [place for place in range(len(scale)) if scale[place] > 0]
    found = [0.0] * len(scale)
    while chosen:
        part = np.ix_(chosen, chosen)
        units = scale[chosen]
        solved = np.linalg.solve(
            square[part] / np.outer(units, units) + RIDGE * np.eye(len(chosen)), right[chosen] / units
        )
        worst = int(np.argmin(solved))
        if solved[worst] >= 0:
            for place, value in zip(chosen, (solved / units).tolist(), strict=True):
                found[place] = value
            break
        del chosen[worst]
    return found


def _mean(old: float, new: float) -> float:
    return old + (1 - STEADY) * (min(new, OUTLIER * old) - old)
