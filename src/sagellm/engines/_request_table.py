"""Where each request of an engine is: waiting, or running in a row, in prefill or in decode."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from sagellm.core.errors import BookkeepingError
from sagellm.core.plan import NO_ROW, RequestState
from sagellm.core.types import RequestStatus
from sagellm.kvmgr.scheduler_ir import DecodeBatch


class RequestTable:
    """Every request is in exactly one place; `running` is ordered by who comes first, the rest as they came.

    `left`: rows that were left since the backend was last told.
    """

    def __init__(self, max_num_seqs: int, decodes: DecodeBatch) -> None:
        self.states: dict[str, RequestState] = {}
        self.waiting: OrderedDict[str, RequestState] = OrderedDict()
        self.running: list[RequestState] = []
        self.prefilling: dict[str, RequestState] = {}
        self.decodes = decodes
        self.free_rows = list(range(max_num_seqs - 1, -1, -1))
        self.left: list[int] = []
        self.num_new_running = 0

    def add(self, state: RequestState) -> None:
        self.states[state.request_id] = state
        self.waiting[state.request_id] = state

    def enter(self, state: RequestState) -> None:
        """From the queue into a row."""
        del self.waiting[state.request_id]
        state.row = self.free_rows.pop()
        state.status = RequestStatus.RUNNING
        self.running.append(state)
        self.prefilling[state.request_id] = state
        self.num_new_running += 1

    def decode(self, state: RequestState, num_slots: int, max_length: int) -> None:
        """All is computed but its last token: from now on one token a step."""
        del self.prefilling[state.request_id]
        self.decodes.enter(state, num_slots, max_length)

    def leave(self, state: RequestState) -> None:
        """Out of its row."""
        if state.decoding:
            self.decodes.leave(state)
        else:
            del self.prefilling[state.request_id]
        place = self.running.index(state)
        if place >= len(self.running) - self.num_new_running:
            self.num_new_running -= 1
        del self.running[place]
        self.left.append(state.row)
        self.free_rows.append(state.row)
        state.row = NO_ROW

    def wait_again(self, state: RequestState) -> None:
        """Before all others in the queue; what it had computed is gone."""
        state.status = RequestStatus.WAITING
        state.num_computed = 0
        self.waiting[state.request_id] = state
        self.waiting.move_to_end(state.request_id, last=False)

    def end(self, state: RequestState) -> None:
        """It is nowhere any more."""
        if state.status is RequestStatus.RUNNING:
            self.leave(state)
        else:
            del self.waiting[state.request_id]
        state.status = RequestStatus.FINISHED
        del self.states[state.request_id]

    def in_order(self, states: Iterable[RequestState]) -> list[RequestState]:
        """Running requests in the order of the batch."""
        few = list(states)
        if len(few) > 1:
            rank = {state.request_id: place for place, state in enumerate(self.running)}
            few.sort(key=lambda state: rank[state.request_id])
        return few

    def check(self, num_slots: Callable[[str], int]) -> None:
        """Raise `BookkeepingError` unless each request is in one place. `num_slots`: tokens that the blocks
        of a running request hold."""
        self.decodes.check([num_slots(state.request_id) for state in self.decodes.states])
        parts = [*self.decodes.states, *self.prefilling.values()]
        inside = {id(state) for state in self.running}
        if len(parts) != len(inside) or {id(state) for state in parts} != inside:
            raise BookkeepingError(f"{len(inside)} requests run, {len(parts)} are in decode or prefill")
        if self.states.keys() != {state.request_id for state in parts} | self.waiting.keys():
            raise BookkeepingError(f"{len(self.states)} requests are known, others wait or run")
        rows = sorted([*self.free_rows, *(state.row for state in self.running)])
        if rows != list(range(len(rows))):
            raise BookkeepingError(f"rows are lost or used twice: {rows}")
