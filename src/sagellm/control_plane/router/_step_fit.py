"""`StepFit`: how an instance's decode steps lengthen with their rows and their context.

It learns from reports alone, so that a router foresees what a placement does to an instance's steps.
"""

from __future__ import annotations

from typing import NamedTuple

KEEP = 0.998
"""Weight of all earlier steps when one more is added."""
SPREAD = 0.05
"""Rows or contexts must differ by this share of their mean, for a slope to be fitted."""
INDEPENDENT = 0.02
"""Both slopes are fitted where rows leave at least this share of the context's variance unexplained."""


class StepLine(NamedTuple):
    """Seconds of a decode step.

    At least, for each row, and for each token of KV that its rows read.
    """

    step_s: float = 0.0
    row_s: float = 0.0
    context_token_s: float = 0.0

    def of(self, num_rows: float, context: float) -> float:
        return self.step_s + num_rows * self.row_s + context * self.context_token_s


class StepFit:
    """Least squares over the steps seen; earlier ones count less and less.

    Neither a slope nor a step without rows is below 0. Where the best fit would have such a one, the slope
    that explains more stays, and the other is 0.
    """

    def __init__(self) -> None:
        self._sums = [0.0] * 9  # n, rows, context, step, rows², context², rows x context, ... x step

    def add(self, num_rows: float, context: float, step_s: float) -> None:
        seen = (
            1.0, num_rows, context, step_s, num_rows * num_rows, context * context, num_rows * context,
            num_rows * step_s, context * step_s,
        )  # fmt: skip
        self._sums = [KEEP * before + new for before, new in zip(self._sums, seen)]  # noqa: B905 - faster

    def line(self, prior: StepFit | None = None, weight: float = 0.0) -> StepLine:
        """The fit; zeros before the first step. `prior`: other steps, which count as `weight` of them."""
        sums = self._sums
        if prior is not None and prior._sums[0]:
            share = weight / prior._sums[0]
            sums = [own + share * other for own, other in zip(sums, prior._sums, strict=True)]
        if not sums[0]:
            return StepLine()
        rows, context, step_s, rows_2, context_2, both, rows_step, context_step = (
            value / sums[0] for value in sums[1:]
        )
        var_rows, var_context = rows_2 - rows * rows, context_2 - context * context
        cov, cov_rows, cov_context = (
            both - rows * context,
            rows_step - rows * step_s,
            context_step - context * step_s,
        )
        has_rows = var_rows > (SPREAD * rows) ** 2 and cov_rows > 0
        has_context = var_context > (SPREAD * context) ** 2 and cov_context > 0
        rest = var_rows * var_context - cov * cov
        if has_rows and has_context and rest > INDEPENDENT * var_rows * var_context:
            row_s = (cov_rows * var_context - cov_context * cov) / rest
            token_s = (cov_context * var_rows - cov_rows * cov) / rest
            least_s = step_s - row_s * rows - token_s * context
            if min(row_s, token_s, least_s) >= 0:
                return StepLine(least_s, row_s, token_s)
        if has_context and not (has_rows and cov_rows**2 * var_context > cov_context**2 * var_rows):
            slope = min(cov_context / var_context, step_s / context)
            return StepLine(step_s - slope * context, 0.0, slope)
        if has_rows:
            slope = min(cov_rows / var_rows, step_s / rows)
            return StepLine(step_s - slope * rows, slope, 0.0)
        return StepLine(step_s)
