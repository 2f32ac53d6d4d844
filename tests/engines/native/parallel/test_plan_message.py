"""Plans as messages between ranks: what comes out is what went in, without what other ranks do not need."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sagellm.core.plan import BlockCopy, BlockTableDelta, Chain, ExecutionPlan, Join, Prefill
from sagellm.core.types import SamplingParams, Tokens
from sagellm.engines.native.parallel.plan_message import Drawn, decode, encode

small = st.integers(0, 2**31 - 1)
numbers = st.lists(small, max_size=4).map(tuple)


def joins() -> st.SearchStrategy[Join]:
    def join(row: int, tokens: list[int], computed: int, blocks: tuple[int, ...], scored: Any) -> Join:
        params = SamplingParams(temperature=0.0, prompt_logprobs=scored, stop=("x",))
        return Join(
            row, f"r{row}", Tokens(tokens).tobytes(), len(tokens), computed, blocks, params, frozenset({2})
        )

    scored = st.none() | st.integers(0, 5)
    return st.builds(join, small, st.lists(small, min_size=1, max_size=9), small, numbers, scored)


def tuples(*parts: st.SearchStrategy[Any], of: Any) -> st.SearchStrategy[Any]:
    return st.lists(st.builds(of, *parts), max_size=3).map(tuple)


plans = st.builds(
    ExecutionPlan,
    small,
    joined=st.lists(joins(), max_size=2).map(tuple),
    left=numbers,
    table_deltas=tuples(small, small, numbers, of=BlockTableDelta),
    decode_rows=numbers,
    decode_positions=numbers,
    prefills=tuples(small, st.just("r"), small, small, st.booleans(), of=Prefill),
    copies=tuples(small, small, of=BlockCopy),
    chains=tuples(small, numbers, numbers, of=Chain),
)


@given(plans, st.lists(st.tuples(small, small), max_size=4))
def test_a_message_holds_the_plan(plan: ExecutionPlan, drawn: list[tuple[int, int]]) -> None:
    rows, token_ids = tuple(row for row, _ in drawn), tuple(token for _, token in drawn)
    found, then = decode(encode(plan, Drawn(rows, token_ids, token_ids, rows)))
    assert then == (rows, token_ids, token_ids, rows)
    bare = [
        replace(
            join,
            request_id=f"row {join.row}",
            params=SamplingParams(prompt_logprobs=join.params.prompt_logprobs),
            eos_token_ids=frozenset(),
        )
        for join in plan.joined
    ]
    prefills = [replace(op, request_id=f"row {op.row}") for op in plan.prefills]
    assert found == replace(plan, joined=tuple(bare), prefills=tuple(prefills))
