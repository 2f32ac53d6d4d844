"""Asynchronous scheduling: the backend computes one step while the next one is planned (`engine.overlap`).

    host      plan n+1 | commit n  | plan n+2 | commit n+1 |
    backend   compute n            | compute n+1           |

Rows, positions, blocks and reuse after step n follow from its plan. Only two things are unknown: the tokens
that it draws, and which requests these tokens end. So `Planner.plan_ahead` plans step n+1 on the requests as
step n will leave them, prompts and admissions included; the backend feeds its own tokens back. A request that
ends in step n still takes part in step n+1, where its token is dropped. Its blocks are safe: a request that
gets them writes in a later step. Where a request would have to leave the batch (preemption, rejection, short
memory), step n+1 is planned only after step n is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from sagellm.core.binding import Binding
from sagellm.core.plan import ExecutionPlan, RequestState, StepResult
from sagellm.core.types import RequestStatus
from sagellm.kvmgr.scheduler_ir import DecodeBatch


class PlannedStep(NamedTuple):
    """A step with blocks and rows. `decoding`: its requests in decode, in the order of the plan."""

    binding: Binding
    plan: ExecutionPlan
    decoding: Sequence[RequestState]

    @classmethod
    def of(cls, binding: Binding, plan: ExecutionPlan, batch: DecodeBatch) -> PlannedStep:
        """Keep the members of the batch as they are now."""
        members, indices = batch.states, binding.decode_indices
        return cls(binding, plan, list(members) if indices is None else [members[i] for i in indices])


@dataclass(slots=True, eq=False)
class InFlightStep:
    """A planned step that the backend computes, until the engine commits it.

    `wait` returns the result and the seconds that the backend took, and raises what the backend raised.
    Without overlap it computes the step, and `decoding` is empty. `began_s`: when the planning of the step
    began or, for a step that was planned ahead, when the backend got it.
    """

    binding: Binding
    plan: ExecutionPlan
    decoding: Sequence[RequestState]
    began_s: float
    wait: Callable[[], tuple[StepResult, float]]

    def drop_finished(self, batch: DecodeBatch) -> None:
        """Take requests out of the draft that have finished since it was planned."""
        binding, draft = self.binding, self.binding.draft
        for name in [n for n, chunk in draft.chunks.items() if chunk.state.status is RequestStatus.FINISHED]:
            del draft.chunks[name]
        draft.proposals = {s: t for s, t in draft.proposals.items() if s.status is not RequestStatus.FINISHED}
        draft.skipped_decodes, binding.decode_indices = {}, None
        if batch.states != self.decoding:
            takes_part = set(self.decoding)
            binding.decode_indices = [i for i, state in enumerate(batch.states) if state in takes_part]
            draft.skipped_decodes = {s.request_id: s for s in batch.states if s not in takes_part}

    def reorder(self, result: StepResult) -> tuple[ExecutionPlan, StepResult]:
        """Plan and result of the requests still in the draft, in batch order."""
        plan, binding = self.plan, self.binding
        if binding.decode_indices is None or not self.decoding:
            return plan, result
        index_of = {state: index for index, state in enumerate(self.decoding)}
        members = binding.draft.decodes.states
        kept = [index_of[members[index]] for index in binding.decode_indices]
        rows, positions, num_drawn = plan.decode_rows, plan.decode_positions, result.num_drawn(plan)
        count, ends = len(self.decoding), list(accumulate(num_drawn))
        tokens = [result.token_ids[end - num : end] for num, end in zip(num_drawn, ends, strict=True)]
        rest = result.token_ids[ends[count - 1] :]
        chains = {chain.row: chain for chain in plan.chains}
        accepted = dict(zip(rows, num_drawn, strict=True))
        kept_chains = tuple(chains[rows[i]] for i in kept if rows[i] in chains)
        plan = replace(
            plan,
            decode_rows=(*(rows[i] for i in kept), *rows[count:]),
            decode_positions=(*(positions[i] for i in kept), *positions[count:]),
            chains=kept_chains,
        )
        num_accepted = tuple(accepted[chain.row] - 1 for chain in kept_chains)
        token_ids = (*(token for i in kept for token in tokens[i]), *rest)
        return plan, replace(result, token_ids=token_ids, num_accepted=num_accepted)
