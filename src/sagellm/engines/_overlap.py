"""Asynchronous scheduling: step n + 1 is planned while step n computes, and step n is committed while step
n + 1 computes.

A step is planned ahead where it can only decode: its rows, positions and blocks are known before the tokens
of the step in flight are, since a backend feeds its own tokens back. Who turns out to have ended in between
computes one token for nothing, which is dropped; its blocks are safe, because whoever gets them next writes
later. Everything else (admission, prompts, preemption) is planned when the step in flight has landed.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from sagellm.core.errors import CapacityError
from sagellm.core.plan import Draft, ExecutionPlan, RequestState, StepResult
from sagellm.core.protocols.engine import InferenceBackend
from sagellm.engines._leap import can_leap
from sagellm.engines._roster import Roster
from sagellm.kvmgr.manager import KVCacheManager
from sagellm.kvmgr.scheduler_ir import BaseSchedulerIR, DecodeBatch, freeze


@dataclass(slots=True, eq=False)
class Flight:
    """A step that the backend computes. `states`: whose tokens are drawn, in order of the decode rows."""

    draft: Draft
    plan: ExecutionPlan
    states: Sequence[RequestState]
    began_s: float
    future: Future[StepResult]

    def settle(self, result: StepResult, batch: DecodeBatch) -> tuple[ExecutionPlan, StepResult]:
        """Plan and result for those who are still there, in the batch's order; a step that was not planned
        ahead has met no change."""
        if not isinstance(self.draft.decodes, AheadBatch):
            return self.plan, result
        self.draft.decodes = batch
        if batch.states == self.states:
            return self.plan, result
        drawn = dict(zip(self.states, result.token_ids, strict=True))
        at = dict(zip(self.states, self.plan.decode_positions, strict=True))
        positions = tuple(at[state] for state in batch.states)
        plan = replace(self.plan, decode_rows=batch.rows, decode_positions=positions)
        return plan, replace(result, token_ids=tuple(drawn[state] for state in batch.states))


class AheadBatch:
    """Implements `Decodes`: the batch as it will be when every request in it has one token more."""

    def __init__(self, batch: DecodeBatch) -> None:
        self.states: Sequence[RequestState] = list(batch.states)
        self.rows = batch.rows
        self._positions = tuple(position + 1 for position in batch.positions())
        self._growing = batch.growing_next()

    def __len__(self) -> int:
        return len(self.states)

    @property
    def num_growing(self) -> int:
        return len(self._growing)

    def growing(self) -> Sequence[RequestState]:
        return self._growing

    def positions(self) -> tuple[int, ...]:
        return self._positions


class Pipeline:
    """One worker thread, to which the backend belongs, and at most one step in flight between two calls."""

    def __init__(self, backend: InferenceBackend) -> None:
        self._backend = backend
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="sagellm-backend")
        self.flight: Flight | None = None

    def submit(self, draft: Draft, plan: ExecutionPlan, began_s: float) -> Flight:
        """Have the backend compute a step; returns at once."""
        states = draft.decodes.states if isinstance(draft.decodes, AheadBatch) else ()
        future = self._worker.submit(self._backend.execute, plan)
        self.flight = Flight(draft, plan, states, began_s, future)
        return self.flight

    def grown_ahead(self) -> dict[str, int]:
        """Blocks that requests have for a token that is not drawn yet."""
        if self.flight is None or not isinstance(self.flight.draft.decodes, AheadBatch):
            return {}
        return {state.request_id: 1 for state, _ in self.flight.draft.stretched}

    def close(self) -> None:
        """Wait for what is in flight; its result is nobody's."""
        self._worker.shutdown(wait=True)
        self.flight = None


def plan_ahead(
    flight: Flight, roster: Roster, kv: KVCacheManager, scheduler: BaseSchedulerIR, token_budget: int
) -> tuple[Draft, ExecutionPlan] | None:
    """The step after the one in flight, bound, if it can only decode; None where that has to be seen."""
    batch = roster.decodes
    before = flight.draft
    regular = not (before.chunks or before.out or before.preempted or before.rejected)
    if not regular or len(batch) != len(flight.plan.decode_rows) or batch.num_regular < 1:
        return None
    if len(batch) > token_budget or not can_leap(scheduler, kv, roster, told=flight.plan.left):
        return None
    ahead = AheadBatch(batch)
    draft = Draft(flight.plan.step + 1, before.now_s, token_budget, list(roster.running), [], decodes=ahead)
    try:
        kv.bind(draft)
    except CapacityError:
        return None
    return draft, freeze(draft, (), kv, ahead)
