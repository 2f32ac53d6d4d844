"""Asynchronous scheduling: step n + 1 is planned while step n computes, and step n is committed while step
n + 1 computes.

What step n leaves is known before it has landed, but for the tokens drawn and for who stops by itself:
rows, positions, blocks and what can be reused follow from its plan. So step n + 1 is planned on the
requests as they will be (`Foresight`), prompts and admissions included; a backend feeds its own tokens
back. Who turns out to have ended in between computes something for nothing, which is dropped; its blocks
are safe, because whoever gets them next writes later. Where requests would have to leave (preemption, no
memory), the step is planned when the one in flight has landed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

from sagellm.core.plan import Draft, ExecutionPlan, RequestState, StepResult
from sagellm.core.protocols.scheduler_ir import SchedulingView
from sagellm.core.types import RequestStatus
from sagellm.engines._planner import Planner
from sagellm.engines._request_table import RequestTable
from sagellm.kvmgr.manager import KVCacheManager
from sagellm.kvmgr.scheduler_ir import DecodeBatch

ANY_TOKEN = 0
"""Stands for the one that is being drawn."""


class Ahead(NamedTuple):
    """A bound step. `states`: those in decode that take part, in order of the plan."""

    draft: Draft
    plan: ExecutionPlan
    states: Sequence[RequestState]


@dataclass(slots=True, eq=False)
class Flight:
    """A step that the backend computes. `states`: those in decode that take part, in order of the plan.
    `future` gives its result, and the seconds that it took."""

    draft: Draft
    plan: ExecutionPlan
    states: Sequence[RequestState]
    began_s: float
    future: Future[tuple[StepResult, float]]

    def adjust(self, batch: DecodeBatch) -> None:
        """Who has ended since it was planned is none of its draft's any more."""
        draft, states = self.draft, self.states
        for name in [n for n, one in draft.chunks.items() if one.state.status is RequestStatus.FINISHED]:
            del draft.chunks[name]
        draft.decodes, draft.skipped_decodes, draft.decode_indices = batch, {}, None
        if batch.states != states:
            taking_part = set(states)
            draft.decode_indices = [i for i, state in enumerate(batch.states) if state in taking_part]
            draft.skipped_decodes = {one.request_id: one for one in batch.states if one not in taking_part}

    def settle(self, result: StepResult) -> tuple[ExecutionPlan, StepResult]:
        """Plan and result for those who are in its adjusted draft, in the batch's order."""
        plan, draft, states = self.plan, self.draft, self.states
        if draft.decode_indices is None:
            return plan, result
        place_of = {state: place for place, state in enumerate(states)}
        members = draft.decodes.states
        kept = [place_of[members[place]] for place in draft.decode_indices]
        rows, positions, tokens = plan.decode_rows, plan.decode_positions, result.token_ids
        count = len(states)
        plan = replace(
            plan,
            decode_rows=(*(rows[i] for i in kept), *rows[count:]),
            decode_positions=(*(positions[i] for i in kept), *positions[count:]),
        )
        return plan, replace(result, token_ids=(*(tokens[i] for i in kept), *tokens[count:]))


class Pipeline:
    """One worker thread, to which the backend belongs, and at most one step in flight between two calls."""

    def __init__(
        self,
        compute: Callable[[ExecutionPlan], tuple[StepResult, float]],
        planner: Planner,
        roster: RequestTable,
        kv: KVCacheManager,
        max_model_len: int,
    ) -> None:
        self._compute = compute
        self._planner = planner
        self._request_table = roster
        self._kv = kv
        self._max_model_len = max_model_len
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="sagellm-backend")
        self.flight: Flight | None = None

    def submit(self, ahead: Ahead, began_s: float) -> Flight:
        """Have the backend compute a step; returns at once."""
        future = self._worker.submit(self._compute, ahead.plan)
        self.flight = Flight(*ahead, began_s, future)
        return self.flight

    def plan_ahead(self, view: SchedulingView) -> Ahead | None:
        """The step after the one in flight, bound; None where that has to land first."""
        flight = self.flight
        if flight is None or not self._is_foreseeable(flight.draft):
            return None
        flight.adjust(self._request_table.decodes)
        foresight = Foresight(flight.draft, self._request_table, self._kv, self._max_model_len)
        with foresight as ended:
            planned = self._planner.plan_ahead(flight.plan.step + 1, view, ended, len(flight.plan.left))
            if planned is None:
                return None
            return self.bound(*planned)

    def bound(self, draft: Draft, plan: ExecutionPlan) -> Ahead:
        """A plan with those who take part in it now."""
        members = self._request_table.decodes.states
        taking_part = (
            list(members) if draft.decode_indices is None else [members[i] for i in draft.decode_indices]
        )
        return Ahead(draft, plan, taking_part)

    def _is_foreseeable(self, draft: Draft) -> bool:
        """Not where blocks behind a window would be given up before it is sure that they are done with, nor
        where requests wait for the last block of one that computes its prompt."""
        ends_shared = any(c.samples and c.state.request.group is not None for c in draft.chunks.values())
        return self._kv.window is None and not ends_shared

    def grown_ahead(self) -> frozenset[str]:
        """Requests that have a block for a token that is not drawn yet."""
        if self.flight is None:
            return frozenset()
        return frozenset(state.request_id for state in self.flight.draft.appended.states)

    def close(self) -> None:
        """Wait for what is in flight; its result is nobody's."""
        self._worker.shutdown(wait=True)
        self.flight = None


class Foresight:
    """The requests as the step in flight will leave them, with some token drawn for each; until it is undone.

    What that step computes stays in the index (`KVCacheManager.foresee`): it is committed next, or rolled
    back. Passes see columns, prompts and rows moved; `tokens` of those in decode before lack the one that is
    being drawn.
    """

    def __init__(self, draft: Draft, roster: RequestTable, kv: KVCacheManager, max_model_len: int) -> None:
        self._chunks = list(draft.chunks.values())
        self._places = draft.decode_indices
        self._request_table = roster
        self._kv = kv
        self._max_model_len = max_model_len
        self._joined: list[RequestState] = []

    def __enter__(self) -> list[RequestState]:
        """Returns who will have ended by its length."""
        roster = self._request_table
        self._kv.foresee(self._chunks)
        self._prefilling = dict(roster.prefilling)
        self._columns = roster.decodes.foresee(self._places)
        for chunk in self._chunks:
            state, samples = chunk.state, chunk.samples
            state.num_computed = chunk.end
            if samples:
                state.tokens.append(ANY_TOKEN)
                roster.decode(state, self._kv.num_slots(state.request_id), self._max_model_len)
                self._joined.append(state)
        return roster.decodes.full()

    def __exit__(self, *_: object) -> None:
        roster = self._request_table
        for state in reversed(self._joined):
            roster.decodes.leave(state)
            state.tokens.pop()
        for chunk in self._chunks:
            chunk.state.num_computed = chunk.start
        roster.decodes.recall(self._columns)
        roster.prefilling = self._prefilling | roster.prefilling
