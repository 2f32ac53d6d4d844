"""`RequestTable` holds the requests of an engine, and alone moves them.

    add -> WAITING -- admit --> RUNNING, computes its prompt -- start_decode --> RUNNING, decodes
            |   ^                  |  advance                                       |
            |   +------ preempt ---+------------------------------------------------+    finish: from anywhere
            +-- wait_for_kv --> WAITING_FOR_KV -- kv_arrived --> WAITING

Planner, committer and recovery return which requests must move; the engine calls these transitions. KV is not
moved here: the engine releases blocks before `preempt` and `finish`. A request that waits for KV keeps its
place in the queue. A request with a limit computes its prompt only up to that token, and is held there until
`limit` is called again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from sagellm.core.errors import BookkeepingError
from sagellm.core.plan import NO_ROW, Chunk, RequestState
from sagellm.core.types import FinishReason, RequestStatus
from sagellm.kvmgr.scheduler_ir import DecodeBatch

WAITING = frozenset({RequestStatus.WAITING, RequestStatus.WAITING_FOR_KV})
ANY_TOKEN = 0
"""Stands for a token that is being drawn."""


class RequestTable:
    """Owns status, row and token counts of each request from `add` to `finish`.

    `states`: all requests by id. `waiting`: in the order of the queue, which passes may change for one step;
    `num_for_kv` of them wait for KV and are not planned.
    `running`: in the order of the batch, the last is preempted first; the last `num_new_running` of them have
    been admitted since the order was set. A running request is in `prefilling` or a member of `decodes`.
    `limited`: by id, requests with `compute_until`, waiting or in `prefilling`.
    `left_rows`: rows that requests have left and of which no executed plan has told the backend yet.
    """

    def __init__(self, max_num_seqs: int, decodes: DecodeBatch, max_model_len: int) -> None:
        self.states: dict[str, RequestState] = {}
        self.waiting: OrderedDict[str, RequestState] = OrderedDict()
        self.running: list[RequestState] = []
        self.prefilling: dict[str, RequestState] = {}
        self.limited: dict[str, RequestState] = {}
        self.decodes = decodes
        self.free_rows = list(range(max_num_seqs - 1, -1, -1))
        self.left_rows: list[int] = []
        self.num_new_running = 0
        self.num_for_kv = 0
        self._max_model_len = max_model_len

    # -- transitions

    def add(self, state: RequestState) -> None:
        """A new request goes to the end of the queue."""
        self.states[state.request_id] = state
        self.waiting[state.request_id] = state

    def wait_for_kv(self, state: RequestState) -> None:
        """Blocks of a waiting request are on their way to the device."""
        state.status = RequestStatus.WAITING_FOR_KV
        self.num_for_kv += 1

    def kv_arrived(self, state: RequestState) -> None:
        """They are there, or do not come; the request can be planned."""
        state.status = RequestStatus.WAITING
        self.num_for_kv -= 1

    def plannable(self) -> list[RequestState]:
        """The waiting requests that do not wait for KV, in queue order."""
        if not self.num_for_kv:
            return list(self.waiting.values())
        return [state for state in self.waiting.values() if state.status is RequestStatus.WAITING]

    def admit(self, state: RequestState, num_computed: int, now_s: float) -> None:
        """Move a waiting request into a free row; `num_computed` tokens have KV."""
        del self.waiting[state.request_id]
        state.row = self.free_rows.pop()
        state.status = RequestStatus.RUNNING
        state.num_prefilled = num_computed
        if not state.num_preemptions:  # also after a failed step that had admitted it
            state.num_cached = num_computed
        if state.scheduled_s is None:
            state.scheduled_s = now_s
        self.running.append(state)
        self.prefilling[state.request_id] = state
        self.num_new_running += 1

    def advance(self, state: RequestState, num_tokens: int) -> None:
        """Count `num_tokens` more computed tokens of a request that computes its prompt."""
        if state.decoding:
            raise BookkeepingError(f"{state.request_id} decodes: its computed tokens follow from its tokens")
        state.num_prefilled += num_tokens

    def limit(self, state: RequestState, compute_until: int | None) -> None:
        """Let a request compute its prompt up to this token; None: all of it.

        Called by what brings the KV behind it (`KVWaits`, `ApproximateReuse`). `receive`, and leaving the row
        or the table, end the limit too.
        """
        if compute_until is None:
            self.limited.pop(state.request_id, None)
        elif state.decoding or not state.num_computed < compute_until <= state.max_reusable:
            raise BookkeepingError(f"{state.request_id} cannot stop at token {compute_until}")
        else:
            self.limited[state.request_id] = state
        state.compute_until = compute_until

    def receive(self, state: RequestState, num_tokens: int) -> None:
        """KV of so many tokens behind the limit has come; the limit ends."""
        self.advance(state, num_tokens)
        if not state.num_preemptions:
            state.num_cached += num_tokens
        self.limit(state, None)

    def start_decode(self, state: RequestState, num_slots: int) -> None:
        """The request computes one token per step from now on. All its tokens but the last are computed.
        `num_slots`: tokens that its blocks hold."""
        del self.prefilling[state.request_id]
        self.decodes.enter(state, num_slots, self._max_model_len)
        state.decoding = True

    def preempt(self, state: RequestState) -> None:
        """Move a running request to the front of the queue. Its blocks have been released: whole computed
        ones stay cached until they are evicted."""
        self.cancel_admission(state)
        state.num_preemptions += 1

    def cancel_admission(self, state: RequestState) -> None:
        """Undo `admit` after a failed step: the request is first in the queue."""
        self._leave_row(state)
        state.status = RequestStatus.WAITING
        state.num_prefilled = 0
        self.waiting[state.request_id] = state
        self.waiting.move_to_end(state.request_id, last=False)

    def finish(self, state: RequestState, reason: FinishReason) -> None:
        """A waiting or running request ends and leaves the table."""
        if state.status is RequestStatus.RUNNING:
            self._leave_row(state)
        else:
            self.num_for_kv -= state.status is RequestStatus.WAITING_FOR_KV
            del self.waiting[state.request_id]
            self.limit(state, None)
        state.status, state.finish_reason = RequestStatus.FINISHED, reason
        del self.states[state.request_id]

    def _leave_row(self, state: RequestState) -> None:
        self.limit(state, None)
        if state.decoding:
            self._stop_decode(state)
        else:
            del self.prefilling[state.request_id]
        index = self.running.index(state)
        if index >= len(self.running) - self.num_new_running:
            self.num_new_running -= 1
        del self.running[index]
        self.left_rows.append(state.row)
        self.free_rows.append(state.row)
        state.row = NO_ROW

    def _stop_decode(self, state: RequestState) -> None:
        self.decodes.leave(state)
        state.num_prefilled = state.num_computed
        state.decoding = False

    # -- order

    def set_order(self, running: Sequence[RequestState]) -> None:
        """Passes have put the running requests into this order."""
        self.running[:] = running
        self.num_new_running = 0

    def in_order(self, states: Iterable[RequestState]) -> list[RequestState]:
        """Some running requests in the order of the batch."""
        few = list(states)
        if len(few) > 1:
            rank = {state.request_id: index for index, state in enumerate(self.running)}
            few.sort(key=lambda state: rank[state.request_id])
        return few

    # -- planning ahead

    @contextmanager
    def as_if_executed(
        self, chunks: Sequence[Chunk], decode_indices: list[int] | None, num_slots: Callable[[str], int]
    ) -> Iterator[list[RequestState]]:
        """Show the requests as the in-flight step will leave them.

        The step computes `chunks` and the members of `decodes` at `decode_indices` (None: all). Yields the
        decoding requests that will then have reached their length. `ANY_TOKEN` is drawn for prompts that end;
        requests that decode already lack their new token. At the end all is as before, except for requests
        that have been admitted meanwhile.
        """
        prefilling = dict(self.prefilling)
        columns = self.decodes.assume_step(decode_indices)
        joined: list[RequestState] = []
        for chunk in chunks:
            state, samples = chunk.state, chunk.samples
            state.num_prefilled = chunk.end
            if samples:
                state.tokens.append(ANY_TOKEN)
                self.start_decode(state, num_slots(state.request_id))
                joined.append(state)
        try:
            yield self.decodes.at_full_length()
        finally:
            for state in reversed(joined):
                self._stop_decode(state)
                state.tokens.pop()
            for chunk in chunks:
                chunk.state.num_prefilled = chunk.start
            self.decodes.undo_assumed_step(columns)
            self.prefilling = prefilling | self.prefilling

    def check(self, num_slots: Callable[[str], int]) -> None:
        """Raise `BookkeepingError` unless all of these hold.

        `num_slots`: tokens that the blocks of a request hold.

        * Each running request is in `prefilling` or in `decodes`, never in both, and its flags say so.
        * Each known request waits or runs, never both.
        * Each limit is of a request in `limited`, which has not computed more.
        * Each row is free or belongs to one running request.
        * The columns of `decodes` agree with the tokens and blocks of its requests.
        """
        self.decodes.check([num_slots(state.request_id) for state in self.decodes.states])
        parts = [*self.decodes.states, *self.prefilling.values()]
        running = {id(state) for state in self.running}
        if len(parts) != len(running) or {id(state) for state in parts} != running:
            raise BookkeepingError(f"{len(running)} requests run, {len(parts)} are in decode or prefill")
        if any(state.decoding is (state.request_id in self.prefilling) for state in parts):
            raise BookkeepingError("a request in decode counts as prefilling, or the other way round")
        if self.states.keys() != {state.request_id for state in parts} | self.waiting.keys():
            raise BookkeepingError(f"{len(self.states)} requests are known, others wait or run")
        limits = {name: state for name, state in self.states.items() if state.compute_until is not None}
        if limits != self.limited:
            raise BookkeepingError(f"{[*limits]} have limits, {[*self.limited]} are known to")
        for state in limits.values():
            if state.decoding or state.num_computed > (state.compute_until or 0):
                raise BookkeepingError(f"{state.request_id} has computed more than its limit")
        wrong = [
            *(state for state in self.running if state.status is not RequestStatus.RUNNING),
            *(state for state in self.waiting.values() if state.status not in WAITING),
            *(state for state in self.waiting.values() if state.row != NO_ROW),
        ]
        if wrong:
            raise BookkeepingError(f"{wrong[0].request_id}: {wrong[0].status} in row {wrong[0].row}")
        num_for_kv = sum(s.status is RequestStatus.WAITING_FOR_KV for s in self.waiting.values())
        if num_for_kv != self.num_for_kv:
            raise BookkeepingError(f"{num_for_kv} requests wait for KV, {self.num_for_kv} are counted")
        rows = sorted([*self.free_rows, *(state.row for state in self.running)])
        if rows != list(range(len(rows))):
            raise BookkeepingError(f"rows are lost or used twice: {rows}")
