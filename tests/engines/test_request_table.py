"""The table of requests: any order of legal transitions, and no other code that moves a request."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import sagellm
from sagellm.core.blocks import cdiv
from sagellm.core.errors import BookkeepingError
from sagellm.core.plan import NO_ROW, Chunk, RequestState
from sagellm.core.types import FinishReason, Request, RequestStatus, SamplingParams, Tokens
from sagellm.engines.request_table import ANY_TOKEN, RequestTable
from sagellm.kvmgr.scheduler_ir import DecodeBatch
from tests.effort import examples

BLOCK, VOCAB, LONGEST, ROWS = 4, 11, 30, 3
SOURCE = Path(sagellm.__file__).parent
OWNED = {"status", "row", "decoding", "num_prefilled", "num_computed", "num_preemptions", "compute_until"}
OF_OTHER_CLASSES = {
    ("kvmgr/scheduler_ir/rows.py", "row.num_computed"),
    ("serving/access_log.py", "record.status"),
    ("benchmarks/simulate/cluster.py", "self.served[int(name)].num_preemptions"),
    ("benchmarks/simulate/shared_budget.py", "each.num_computed"),
    ("control_plane/admission.py", "error.status"),
    ("control_plane/quota_waits.py", "error.status"),
    ("control_plane/fleet/messages.py", "made.status"),
    ("control_plane/fleet/questions.py", "error.status"),
    ("serving/admin.py", "refused.status"),
    ("serving/gateway.py", "error.status"),
    ("engines/reasoning_kv.py", "own.num_preemptions"),
    ("engines/native/medusa_drafter.py", "self._held[row].num_computed"),
    ("engines/native/medusa_drafter.py", "self._held[op.row].num_computed"),
}
"""Attributes of the same name of objects that are no request states."""
OWNERS = {"engines/request_table.py", "engines/guests/hosted_passes.py"}
"""The second owns the states of requests that run in another engine."""


def slots(state: RequestState, num_tokens: int = 0) -> int:
    """Tokens that the blocks of a request hold, which are as many as it needs for its computed tokens."""
    return cdiv(state.num_computed + num_tokens, BLOCK) * BLOCK


def most_tokens(state: RequestState) -> int:
    """Tokens that a step may compute of a prompt."""
    limit = len(state.tokens) if state.compute_until is None else state.compute_until
    return limit - state.num_computed


class Tables(RuleBasedStateMachine):
    """Legal transitions in any order; `slots` of each request follow from what it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.table = RequestTable(ROWS, DecodeBatch(VOCAB, BLOCK), LONGEST)
        self.slots: dict[str, int] = {}
        self.count = 0

    def _of(self, data: st.DataObject, states: list[RequestState]) -> RequestState:
        return data.draw(st.sampled_from(states))

    @property
    def _prefilling(self) -> list[RequestState]:
        return list(self.table.prefilling.values())

    @rule(length=st.integers(1, 9))
    def add(self, length: int) -> None:
        self.count += 1
        request = Request(str(self.count), Tokens(range(length)), SamplingParams(max_tokens=9))
        self.table.add(RequestState.of(request))

    @precondition(lambda self: self.table.waiting and self.table.free_rows)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        state = self._of(data, list(self.table.waiting.values()))
        stop = len(state.tokens) if state.compute_until is None else state.compute_until
        cached = data.draw(st.integers(0, stop - 1))
        self.table.admit(state, cached, 1.0)
        self.slots[state.request_id] = slots(state)
        assert state.row != NO_ROW
        assert state.num_cached == cached or state.num_preemptions

    @precondition(lambda self: self.table.prefilling)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        """A chunk; behind the last one a token is drawn and the request decodes."""
        state = self._of(data, self._prefilling)
        most = most_tokens(state)
        if not most:  # it stands at its limit
            self.table.limit(state, None)
            most = state.num_uncomputed
        num_tokens = data.draw(st.integers(1, most))
        self.slots[state.request_id] = slots(state, num_tokens)
        self.table.advance(state, num_tokens)
        if state.num_uncomputed == 0:
            state.tokens.append(5)
            self.table.start_decode(state, self.slots[state.request_id])
            with pytest.raises(BookkeepingError, match="decodes"):
                self.table.advance(state, 1)

    @precondition(lambda self: self.table.waiting or self.table.prefilling)
    @rule(data=st.data(), stop=st.none() | st.integers(1, 9))
    def limit(self, data: st.DataObject, stop: int | None) -> None:
        state = self._of(data, [*self.table.waiting.values(), *self._prefilling])
        if stop is None or state.num_computed < stop < len(state.tokens):
            self.table.limit(state, stop)
        else:
            before = state.compute_until
            with pytest.raises(BookkeepingError, match="cannot stop"):
                self.table.limit(state, stop)
            assert state.compute_until == before

    @precondition(lambda self: len(self.table.decodes) > 0)
    @rule()
    def decode(self) -> None:
        for state in self.table.decodes.needing_block():
            self.slots[state.request_id] += BLOCK
        batch = self.table.decodes
        for index in batch.advance([5] * len(batch)):
            assert len(batch.states[index].tokens) >= batch.states[index].num_prompt_tokens + 9
        for state in [state for state in batch.states if state.num_output_tokens >= 9]:
            self.table.finish(state, FinishReason.LENGTH)

    @precondition(lambda self: self.table.running)
    @rule(data=st.data(), fails=st.booleans())
    def requeue(self, data: st.DataObject, fails: bool) -> None:
        state = self._of(data, self.table.running)
        count, row = state.num_preemptions, state.row
        (self.table.cancel_admission if fails else self.table.preempt)(state)
        assert state.num_preemptions == count + (not fails)
        assert next(iter(self.table.waiting.values())) is state
        assert (state.row, state.num_computed, state.decoding) == (NO_ROW, 0, False)
        assert state.compute_until is None
        assert self.table.left_rows[-1] == row

    @precondition(lambda self: self.table.states)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        state = self._of(data, list(self.table.states.values()))
        self.table.finish(state, FinishReason.ABORT)
        assert state.status is RequestStatus.FINISHED
        assert state.finish_reason is FinishReason.ABORT

    @precondition(lambda self: self.table.running)
    @rule(data=st.data())
    def order(self, data: st.DataObject) -> None:
        order = data.draw(st.permutations(self.table.running))
        self.table.set_order(order)
        assert self.table.num_new_running == 0
        assert self.table.in_order(reversed(order)) == order

    @rule(data=st.data())
    def plan_ahead(self, data: st.DataObject) -> None:
        """Requests look as they will, and are as they were afterwards, but for one that was admitted."""
        table, batch = self.table, self.table.decodes
        states = [state for state in self._prefilling if most_tokens(state)]
        sizes = [data.draw(st.integers(1, most_tokens(state))) for state in states]
        chunks = [Chunk(s, s.num_computed, size) for s, size in zip(states, sizes, strict=True)]
        before = {name: (s.num_computed, s.tokens.tolist(), s.decoding) for name, s in table.states.items()}
        columns, num_decodes = batch.positions(), len(batch)
        with table.as_if_executed(chunks, None, lambda name: slots(table.states[name])) as full:
            for state in full:
                is_drawing = state in batch.states[:num_decodes]
                assert state.num_output_tokens + is_drawing >= 9
            for chunk in chunks:
                drawn = chunk.state.tokens.tolist()[len(before[chunk.state.request_id][1]) :]
                assert drawn == [ANY_TOKEN] * chunk.state.decoding
            assert batch.positions()[:num_decodes] == tuple(at + 1 for at in columns)
            if table.waiting and table.free_rows:
                state = next(iter(table.waiting.values()))
                table.admit(state, 0, 2.0)
                self.slots[state.request_id] = 0
        assert batch.positions() == columns
        for name, state in table.states.items():
            assert (state.num_computed, state.tokens.tolist(), state.decoding) == before[name]

    @invariant()
    def books(self) -> None:
        self.table.check(lambda name: self.slots[name])


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)


def test_check_finds_what_is_wrong() -> None:
    for wrong in ("status", "decoding", "row"):
        table = RequestTable(ROWS, DecodeBatch(VOCAB, BLOCK), LONGEST)
        state = RequestState.of(Request("a", Tokens(range(3))))
        table.add(state)
        table.admit(state, 0, 0.0)
        setattr(state, wrong, {"status": RequestStatus.WAITING, "decoding": True, "row": 2}[wrong])
        with pytest.raises(BookkeepingError):
            table.check(lambda name: 0)


def _assigned(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Attributes of other objects than `self` that code assigns to."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = [part for target in node.targets for part in getattr(target, "elts", [target])]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) != "self":
                yield target


def test_only_the_table_moves_requests() -> None:
    found = {
        (str(path.relative_to(SOURCE)), ast.unparse(target))
        for path in SOURCE.rglob("*.py")
        for target in _assigned(ast.parse(path.read_text(encoding="utf-8")))
        if target.attr in OWNED
    }
    assert {place for place in found if place[0] not in OWNERS} == OF_OTHER_CLASSES
