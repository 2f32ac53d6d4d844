"""`Speculation`: a step's proposed tokens, and how many of them the model accepts.

A request in decode computes its last token and the tokens that a proposer expects to follow: a chain
(`core.plan.Chain`). The output is that of decoding token by token, since at each position the model draws its
own token and only equal ones count; a wrong proposal costs computing time and nothing else. A proposer may
also propose a tree of tokens, which takes as many positions as it has tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from sagellm.accel.speculative.lengths import ChainLengths, Estimates
from sagellm.core.binding import Binding
from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.plan import Chain, Draft, ExecutionPlan, RequestState, StepResult
from sagellm.core.protocols.engine import SpeculationCounts
from sagellm.core.protocols.speculative import Asked, Proposal, Proposer, TokenDrafter
from sagellm.core.token_trees import ROOT, depths_of, is_chain, path_along
from sagellm.kvmgr.manager import KVCacheManager
from sagellm.kvmgr.scheduler_ir import DecodeBatch


class Speculation:
    """Owns a proposer for the life of an engine. `num_tokens`: the most that it may propose for a request and
    step, unless a pass sets another number. `lengths` decides how many of them are verified; None: all.
    `drafter`: what the proposer draws with, if that is the served model's head; it rests where proposals do
    not pay and its own keeping costs. Closes the proposer."""

    def __init__(
        self, proposer: Proposer, num_tokens: int, lengths: ChainLengths | None = None,
        clock: Clock | None = None, drafter: TokenDrafter | None = None,
    ) -> None:  # fmt: skip
        if num_tokens < 1:
            raise ValueError(f"num_tokens must be at least 1, got {num_tokens}: leave the proposer out")
        self.num_tokens = num_tokens
        self.is_on = True
        self._proposed: list[int] = []
        self._accepted: list[int] = []
        self._saved_s = 0.0
        self._proposing_s = 0.0
        self._kept_s = 0.0
        """What keeping hidden states has taken since the last call of the proposer."""
        self._has_asked = False
        """Whether the step has asked the proposer, and how long that took."""
        self._draft: Draft | None = None
        """The step that these two are of. One that fails is not observed."""
        self._trees: dict[int, Proposal] = {}
        """By row, the trees of the step."""
        self._proposer, self._lengths, self._clock = proposer, lengths, clock or MonotonicClock()
        self._drafter = drafter

    @property
    def num_proposed(self) -> int:
        return sum(self._proposed)

    @property
    def num_accepted(self) -> int:
        return sum(self._accepted)

    def counts(self) -> SpeculationCounts:
        return SpeculationCounts(tuple(self._proposed), tuple(self._accepted), self._saved_s)

    def should_ask(self, num_rows: int, num_prompt_tokens: int) -> bool:
        """Whether to propose anything in a step of so many requests in decode. Proposals have not paid else.

        The step may be planned ahead then.
        """
        lengths, drafter = self._lengths, self._drafter
        if lengths is None:
            return True
        if not lengths.should_ask(num_rows, num_prompt_tokens):
            return False
        return drafter is None or drafter.is_ready or drafter.rests

    def propose(self, binding: Binding, decodes: DecodeBatch, kv: KVCacheManager) -> None:
        """Fill the proposals of a bound draft.

        They take what the draft leaves of the token budget, and of the blocks that are free or can be made
        free all but one for each request in decode, so that proposals preempt nothing in the next step. No
        request gets more than it may still draw, or than it allows.
        """
        draft = binding.draft
        self._trees.clear()
        self._draft, self._proposing_s, self._has_asked = draft, 0.0, False
        num_prompt_tokens = sum(chunk.num_tokens for chunk in draft.chunks.values())
        num_rows = len(decodes) or len(draft.chunks)
        if not self.should_ask(num_rows, num_prompt_tokens):
            self._rest(num_rows)
            return
        if self._drafter is not None:
            self._drafter.wake()
        found = self._ask(draft, decodes)
        if found and self._lengths is not None:
            found = self._shortened(found, draft, self._lengths)
        spare_blocks = kv.quotes.available_blocks() - len(decodes)
        for state, proposal in found:
            num_bound, num_tokens = len(binding.appended_to), len(proposal.token_ids)
            proposal = proposal.first(kv.bind_proposed(binding, state, num_tokens, spare_blocks))
            spare_blocks -= len(binding.appended_to) - num_bound
            if not is_chain(proposal.parents):
                proposal = self._trees[state.row] = proposal.in_branches()
                draft.parents[state] = proposal.parents
            if proposal.token_ids:
                draft.proposals[state] = proposal.token_ids

    def _rest(self, num_rows: int) -> None:
        """Let the drafter rest where it costs more than it gives. No step is in flight."""
        lengths, drafter = self._lengths, self._drafter
        if lengths is None or drafter is None or drafter.rests or lengths.pays(num_rows):
            return
        if not lengths.is_trial_due(num_rows) and lengths.is_much(drafter.keeping_s, num_rows):
            drafter.rest()

    def _ask(self, draft: Draft, decodes: DecodeBatch) -> list[tuple[RequestState, Proposal]]:
        budget, lengths = draft.token_budget - draft.num_tokens, self._lengths
        most = min(draft.num_draft_tokens, budget)
        asked: list[tuple[RequestState, int]] = []
        for state, remaining in zip(decodes.states, decodes.remaining(), strict=True) if most > 0 else ():
            own = state.request.params.num_speculative_tokens
            if remaining < 2 or own == 0 or state.request_id in draft.skipped_decodes:
                continue
            if lengths is None or lengths.may_propose(state.request_id):
                asked.append((state, min(most, remaining - 1, most if own is None else own)))
        if not asked:
            return []
        if lengths is not None:
            most = lengths.worth_proposing([state.request_id for state, _ in asked], len(decodes), most)
        began_s = self._clock.now()
        proposals = self._proposer.propose(
            [Asked(state.request, state.tokens, min(most, wanted)) for state, wanted in asked]
        )
        self._proposing_s = self._clock.now() - began_s
        self._has_asked = True
        if lengths is not None:
            longest = max(len(each.token_ids) for each in proposals)
            lengths.proposing_took(longest, self._proposing_s)
        found: list[tuple[RequestState, Proposal]] = []
        for (state, wanted), proposal in zip(asked, proposals, strict=True):
            proposal = proposal.first(min(wanted, budget))
            if proposal.token_ids:
                found.append((state, proposal))
                budget -= len(proposal.token_ids)
        return found

    @staticmethod
    def _shortened(
        found: list[tuple[RequestState, Proposal]], draft: Draft, lengths: ChainLengths
    ) -> list[tuple[RequestState, Proposal]]:
        num_prompt_tokens = sum(chunk.num_tokens for chunk in draft.chunks.values())
        asked = [
            (state.request_id, proposal.acceptance or (None,) * len(proposal.token_ids))
            for state, proposal in found
        ]
        trees = {state.request_id: proposal.parents for state, proposal in found if proposal.parents}
        chosen = lengths.choose(asked, draft.num_decodes, num_prompt_tokens, trees)
        return [(state, each.first(n)) for (state, each), n in zip(found, chosen, strict=True) if n]

    def observe(self, draft: Draft, plan: ExecutionPlan, result: StepResult, took_s: float) -> None:
        """The step has been planned and executed, which took so long. Comes before its commit, while all its
        requests are in their rows."""
        if self._draft is not draft:  # planned ahead, or behind a failure: nothing was asked
            self._proposing_s, self._has_asked = 0.0, False
        spent_s = took_s - self._proposing_s
        if self._lengths is not None:
            num_rows, num_proposed = len(plan.decode_rows), plan.num_proposed_tokens
            self._lengths.step_took(num_rows, plan.num_prefill_tokens, num_proposed, spent_s)
            if self._drafter is not None and not self._drafter.rests:
                self._kept_s += self._drafter.keeping_s
            if self._has_asked:
                num_prompt_tokens, all_s = plan.num_prefill_tokens, took_s + self._kept_s
                self._lengths.asking_gave(num_rows, num_prompt_tokens, sum(result.num_accepted), all_s)
                self._kept_s = 0.0
            self._saved_s -= self._proposing_s  # also where none of it is verified
            self._proposing_s, self._has_asked = 0.0, False
        if not plan.chains:
            return
        names = {state.row: state.request_id for state in draft.proposals}
        drawn = result.drawn_by_row(plan) if plan.has_trees else {}
        for chain, num_accepted in zip(plan.chains, result.num_accepted, strict=True):
            name, num_proposed = names[chain.row], len(chain.token_ids)
            self._count(depths_of(chain.parents) or range(num_proposed), num_accepted)
            self._proposer.observe(name, num_accepted)
            if self._lengths is None:
                continue
            if chain.parents:
                decided = self._decided(chain, drawn[chain.row])
                self._lengths.acceptance.verified(name, num_accepted, decided)
            else:
                self._lengths.verified(name, num_proposed, num_accepted)
        if self._lengths is not None:
            plain_s = self._lengths.times.seconds(plan.num_tokens - plan.num_proposed_tokens)
            steps = sum(result.num_accepted) / len(plan.decode_rows)
            self._saved_s += (1 + steps) * plain_s - spent_s

    def _decided(self, chain: Chain, drawn: Sequence[int]) -> Estimates:
        """The estimates of the accepted tokens of a tree, then of those refused.

        Tokens were decided on if their parent was accepted.
        """
        path = path_along(chain.token_ids, chain.parents, drawn)
        reached = {ROOT, *path}
        refused = [i for i, parent in enumerate(chain.parents) if parent in reached and i not in reached]
        estimates = self._trees[chain.row].acceptance
        return [estimates[i] if estimates else None for i in (*path, *refused)]

    def _count(self, positions: Sequence[int], num_accepted: int) -> None:
        """Count proposed tokens at these positions. Those behind the accepted ones are refused."""
        missing = max(positions) + 1 - len(self._proposed)
        self._proposed += [0] * missing
        self._accepted += [0] * missing
        for position in positions:
            self._proposed[position] += 1
        for position in range(num_accepted):
            self._accepted[position] += 1

    def forget(self, state: RequestState) -> None:
        """The request has ended."""
        self._proposer.forget(state.request, state.tokens)
        if self._lengths is not None:
            self._lengths.forget(state.request_id)

    def close(self) -> None:
        self._proposer.close()
