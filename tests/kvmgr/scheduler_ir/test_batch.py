"""The kept batch beside a twin that counts for each request."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sagellm.core.blocks import cdiv
from sagellm.core.errors import BookkeepingError
from sagellm.core.plan import RequestState
from sagellm.core.types import Request, SamplingParams, Tokens
from sagellm.engines.commit import stop_reason
from sagellm.kvmgr.scheduler_ir import DecodeBatch
from sagellm.kvmgr.scheduler_ir.batch import ChainCounts
from tests.effort import examples

BLOCK, VOCAB, LONGEST = 4, 11, 30


def state(name: str, length: int, **params: object) -> RequestState:
    request = Request(
        name,
        Tokens(range(length)),
        SamplingParams(**params),  # type: ignore[arg-type]
        eos_token_ids=frozenset({3}),
    )
    made = RequestState.of(request)
    made.row = int(name)
    return made


class Batches(RuleBasedStateMachine):
    """`slots` is the twin: what each request's blocks hold."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = DecodeBatch(VOCAB, BLOCK)
        self.slots: dict[RequestState, int] = {}
        self.count = 0

    @rule(
        length=st.integers(1, 9),
        max_tokens=st.integers(1, 9) | st.none(),
        stops=st.sets(st.integers(0, VOCAB + 3), max_size=2),
        ignore=st.booleans(),
        spare=st.integers(0, 1),
    )
    def enter(self, length: int, max_tokens: int | None, stops: set[int], ignore: bool, spare: int) -> None:
        self.count += 1
        new = state(
            str(self.count), length, max_tokens=max_tokens, stop_token_ids=tuple(stops), ignore_eos=ignore
        )
        new.tokens.append(5)
        self.slots[new] = (cdiv(length, BLOCK) + spare) * BLOCK
        self.batch.enter(new, self.slots[new], LONGEST)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(list(self.slots)))
        self.batch.leave(gone)
        del self.slots[gone]

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def chains(self, data: st.DataObject) -> None:
        """All take part and compute several positions, for which they get blocks. Some of them count."""
        batch, parts, counts = self.batch, dict[RequestState, list[int]](), ChainCounts([], [])
        before = {one: one.tokens.tolist() for one in self.slots}
        for one, remaining in zip(batch.states, batch.remaining(), strict=True):
            computed = data.draw(st.integers(1, max(1, min(6, remaining))))
            parts[one] = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=computed))
            counts.num_computed.append(computed)  # type: ignore[attr-defined]
            counts.num_drawn.append(len(parts[one]))  # type: ignore[attr-defined]
            self.slots[one] = max(self.slots[one], cdiv(len(one.tokens) - 1 + computed, BLOCK) * BLOCK)
        drawn = [token for own in parts.values() for token in own]
        ends = batch.advance(drawn, None, counts)
        for i, (one, own) in enumerate(parts.items()):
            assert one.tokens.tolist() == [*before[one], *own]
            for _ in own:
                one.tokens.pop()
            for token in own:
                one.tokens.append(token)
                if stop_reason(one, token, LONGEST) is not None:
                    assert i in ends
        for one in [list(parts)[i] for i in ends]:
            reasons = [stop_reason(one, token, LONGEST) for token in parts[one]]
            if any(reasons):
                self.batch.leave(one)
                del self.slots[one]

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """All or some take part; those at a border get a block, as `bind` would give it."""
        batch = self.batch
        names = [one.request_id for one in self.slots]
        out = data.draw(st.sets(st.sampled_from(names), max_size=len(names) - 1))
        places = batch.indices_without(out) if out else None
        part = [one for one in batch.states if one.request_id not in out]
        needy = {one for one in self.slots if len(one.tokens) - 1 == self.slots[one]}
        assert set(batch.needing_block()) == needy
        assert len(batch.needing_block()) == len(needy)
        before = {one: one.tokens.tolist() for one in self.slots}
        for one in needy & set(part):
            self.slots[one] += BLOCK
        tokens = tuple(data.draw(st.integers(0, VOCAB - 1)) for _ in part)
        positions = dict(zip(batch.states, batch.positions(), strict=True))
        ends = batch.advance(tokens, places)
        for i, (one, token) in enumerate(zip(part, tokens, strict=True)):
            assert one.tokens.tolist() == [*before[one], token]
            assert positions[one] == len(before[one]) - 1
            if stop_reason(one, token, LONGEST) is not None:
                assert i in ends
        assert all(one.tokens.tolist() == before[one] for one in self.slots if one not in part)
        assert batch.lengths(places).tolist() == [len(one.tokens) for one in part]
        for i in ends:  # those whose length ended them do not come again
            if stop_reason(part[i], tokens[i], LONGEST) is not None:
                self.batch.leave(part[i])
                del self.slots[part[i]]

    @invariant()
    def books(self) -> None:
        self.batch.check([self.slots[one] for one in self.batch.states])
        assert set(self.batch.states) == set(self.slots)
        assert self.batch.rows == tuple(one.row for one in self.batch.states)


TestBatches = Batches.TestCase
TestBatches.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)


def test_repeated_tokens_need_one_for_each_request() -> None:
    batch = DecodeBatch(VOCAB, BLOCK)
    batch.enter(state("1", 3), 4, LONGEST)
    with pytest.raises(ValueError, match="zip"):
        batch.append_repeated((1, 2), 3)


def test_a_token_outside_the_vocabulary_changes_nothing() -> None:
    batch = DecodeBatch(VOCAB, BLOCK)
    one = state("1", 3)
    one.tokens.append(5)
    batch.enter(one, 4, LONGEST)
    for token in (-1, VOCAB):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            batch.advance((token,))
    with pytest.raises(BookkeepingError, match="2 tokens were drawn for 1"):
        batch.advance((1, 2))
    with pytest.raises(BookkeepingError, match="2 tokens were drawn for 1"):
        batch.advance((1, 2), None, ChainCounts([3], [3]))
    assert one.tokens.tolist() == [0, 1, 2, 5]
    batch.check([4])
    with pytest.raises(BookkeepingError, match="3 tokens computed of 8 slots"):
        batch.check([8])


def test_rare_ends_are_found_among_many() -> None:
    """The end-of-sequence token counts unless it is ignored, and is forgotten once nobody has it."""
    batch = DecodeBatch(VOCAB, BLOCK)
    deaf, keen = state("1", 3, ignore_eos=True), state("2", 3)
    for one in (deaf, keen):
        one.tokens.append(5)
        batch.enter(one, 8, LONGEST)
    assert batch.advance((3, 4)) == [0]  # somebody stops at 3: who, is looked at one by one
    assert stop_reason(deaf, 3, LONGEST) is None
    assert batch.advance((4, 3)) == [1]
    batch.leave(keen)
    batch.leave(deaf)
    batch.enter(deaf, 8, LONGEST)
    assert batch.advance((3,)) == []


@pytest.mark.parametrize("token", [0, VOCAB - 1])
def test_the_first_and_the_last_token_of_the_vocabulary_can_stop(token: int) -> None:
    batch = DecodeBatch(VOCAB, BLOCK)
    one = state("1", 3, stop_token_ids=(token,), ignore_eos=True)
    one.tokens.append(5)
    batch.enter(one, 8, LONGEST)
    assert batch.advance((5,)) == []
    assert batch.advance((token,)) == [0]


def test_tokens_outside_the_vocabulary_stop_nothing() -> None:
    batch = DecodeBatch(VOCAB, BLOCK)
    one = RequestState.of(
        Request("1", Tokens(range(3)), SamplingParams(), eos_token_ids=frozenset({-1, VOCAB}))
    )
    one.row = 1
    one.tokens.append(5)
    batch.enter(one, 8, LONGEST)
    for token in range(VOCAB - 1, VOCAB - 4, -1):
        assert batch.advance((token,)) == []
