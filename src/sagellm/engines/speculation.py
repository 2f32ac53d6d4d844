"""`Speculation`: a step's proposed tokens, and how many of them the model accepts.

A request in decode computes its last token and the tokens that a proposer expects to follow: a chain
(`core.plan.Chain`). The output is that of decoding token by token, since at each position the model draws its
own token and only equal ones count; a wrong proposal costs computing time and nothing else.
"""

from __future__ import annotations

from sagellm.core.binding import Binding
from sagellm.core.plan import Draft, ExecutionPlan, RequestState, StepResult
from sagellm.core.protocols.speculative import Proposer
from sagellm.kvmgr.manager import KVCacheManager
from sagellm.kvmgr.scheduler_ir import DecodeBatch


class Speculation:
    """Owns a proposer for the life of an engine. `num_tokens`: the most that it may propose for a request and
    step, unless a pass sets another number. Counts what was proposed and accepted."""

    def __init__(self, proposer: Proposer, num_tokens: int) -> None:
        if num_tokens < 1:
            raise ValueError(f"num_tokens must be at least 1, got {num_tokens}: leave the proposer out")
        self.num_tokens = num_tokens
        self.num_proposed = self.num_accepted = 0
        self._proposer = proposer

    def propose(self, binding: Binding, decodes: DecodeBatch, kv: KVCacheManager) -> None:
        """Fill the proposals of a bound draft.

        They take what the draft leaves of the token budget, and of the blocks that are free or can be made
        free all but one for each request in decode, so that proposals preempt nothing in the next step. No
        request gets more than it may still draw.
        """
        draft = binding.draft
        budget = draft.token_budget - draft.num_tokens
        spare_blocks = kv.quotes.available_blocks() - len(decodes)
        for state, remaining in zip(decodes.states, decodes.remaining(), strict=True):
            most = min(draft.num_draft_tokens, budget, remaining - 1)
            if most < 1 or state.request_id in draft.skipped_decodes:
                continue
            token_ids = self._proposer.propose(state.request, state.tokens, most).token_ids[:most]
            num_bound = len(binding.appended_to)
            token_ids = token_ids[: kv.bind_proposed(binding, state, len(token_ids), spare_blocks)]
            spare_blocks -= len(binding.appended_to) - num_bound
            if token_ids:
                draft.proposals[state] = token_ids
                budget -= len(token_ids)

    def observe(self, draft: Draft, plan: ExecutionPlan, result: StepResult) -> None:
        """The step has been executed. Comes before its commit, while all its requests are in their rows."""
        names = {state.row: state.request_id for state in draft.proposals}
        for chain, num_accepted in zip(plan.chains, result.num_accepted, strict=True):
            self.num_proposed += len(chain.token_ids)
            self.num_accepted += num_accepted
            self._proposer.observe(names[chain.row], num_accepted)

    def forget(self, state: RequestState) -> None:
        """The request has ended."""
        self._proposer.forget(state.request, state.tokens)
