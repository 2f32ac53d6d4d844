"""Sets how many tokens may be drafted per decode, given the load.

Drafting is free while a step is bound by memory bandwidth, and useless once it is bound by computing.

The tokens expected of a draft are those of Leviathan et al. (2023).
"""

from __future__ import annotations

from sagellm.core.plan import Draft
from sagellm.core.protocols.scheduler_ir import SchedulingView
from sagellm.kvmgr.scheduler_ir._step_time import StepTimeModel


class SpeculativeBudgetPass:
    """Sets `draft.num_draft_tokens` to the number, up to `max_tokens`, with most tokens per second.

    A draft token is accepted with probability `acceptance` and costs `draft_s` seconds to make. A step takes
    as long as one without prompts, or as long as its tokens take to compute, whichever is more; both are
    learned. The token budget of the step is never exceeded.
    """

    name = "speculative_budget"
    requires = frozenset({"speculative_decoding"})

    def __init__(self, max_tokens: int = 4, acceptance: float = 0.7, draft_s: float = 0.001) -> None:
        if max_tokens < 0 or not 0 <= acceptance < 1 or draft_s < 0:
            raise ValueError("max_tokens and draft_s must not be negative, acceptance must be in [0, 1)")
        self.max_tokens, self.acceptance, self.draft_s = max_tokens, acceptance, draft_s
        self.step_time = StepTimeModel()

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        self.step_time.observe(view.last_step)
        num_decodes = draft.num_decodes
        if not num_decodes:
            return
        num_tokens = min(draft.num_tokens, draft.token_budget)
        if draft.waiting:  # admitted prompts will use the rest of the budget
            num_tokens = draft.token_budget
        most = min(self.max_tokens, (draft.token_budget - num_tokens) // num_decodes)
        draft.num_draft_tokens = max(range(most + 1), key=lambda k: self.speed(k, num_decodes, num_tokens))

    def speed(self, k: int, num_decodes: int, num_tokens: int) -> float:
        """Expected tokens per second and request, if `k` are drafted for each of `num_decodes`. `num_tokens`
        are the other tokens of the step."""
        accepted = (1 - self.acceptance ** (k + 1)) / (1 - self.acceptance)
        compute_s = (num_tokens + k * num_decodes) * self.step_time.token_s
        return accepted / (max(self.step_time.step_s, compute_s) + k * self.draft_s)


PLUGIN = SpeculativeBudgetPass
