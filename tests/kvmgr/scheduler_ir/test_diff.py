"""The difference of two plans names requests and says what is other."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings

from sagellm.core.plan import (
    BlockCopy,
    BlockTableDelta,
    Chain,
    Decision,
    ExecutionPlan,
    Join,
    PhasePlacement,
    Prefill,
    Transfer,
)
from sagellm.core.types import SamplingParams, Tokens
from sagellm.kvmgr.scheduler_ir.diff import diff, diff_text
from sagellm.kvmgr.scheduler_ir.rows import Row, Rows
from tests.kvmgr.scheduler_ir.plan_strategies import plans, run_engine


def join(row: int, name: str, blocks: tuple[int, ...]) -> Join:
    return Join(row, name, Tokens(range(6)).tobytes(), 6, 0, blocks, SamplingParams(), frozenset())


FIRST = ExecutionPlan(
    4,
    joined=(join(2, "new", (4, 5)),),
    decode_rows=(0, 1),
    decode_positions=(8, 5),
    prefills=(Prefill(2, "new", 0, 6, True),),
)
ROWS = Rows({0: Row("old", 9, 3, 8, [1, 2]), 1: Row("calm", 6, 3, 5, [3])})


def test_one_step_under_two_schedulers() -> None:
    other = replace(
        FIRST,
        joined=(join(2, "new", (4,)),),
        left=(1,),
        table_deltas=(BlockTableDelta(0, 2, (9,)),),
        decode_rows=(0,),
        decode_positions=(8,),
        prefills=(Prefill(2, "new", 0, 4, False),),
        preempted=("calm",),
        rejected=(("big", "too long"),),
        copies=(BlockCopy(3, 1),),
        transfers=(Transfer("new", (4,), "d0"),),
        placements=(("new", PhasePlacement(decode="d0", ffn="f0")),),
        decisions=(Decision("memory_aware_preemption", "calm", "preempt", "old comes first"),),
    )
    assert diff_text(FIRST, other, ROWS, ROWS).splitlines() == [
        '+ "new" placed decode @d0, ffn @f0',
        '~ "new" computes prompt tokens 0:4, not prompt tokens 0:6, samples',
        '~ "new" blocks [4] from 0, not [4, 5] from 0',
        '+ "old" blocks [9] from 2',
        '+ "calm" preempted (memory_aware_preemption: old comes first)',
        '+ "calm" left',
        '- "calm" computes decode at 5',
        '+ "big" rejected: too long',
        "+ copy 3 to 1",
        '+ "new" sends blocks [4] to @d0',
    ]
    back = [change.sign for change in diff(other, FIRST, ROWS, ROWS)]
    assert back == ["-", "-", "+", "-", "-", "~", "~", "-", "-", "-"]


def test_two_steps_of_a_run() -> None:
    rows = ROWS.copy()
    rows.follow(FIRST)
    after = ExecutionPlan(5, left=(1,), decode_rows=(0, 2), decode_positions=(9, 6))
    assert diff_text(FIRST, after, ROWS, rows).splitlines() == [
        '~ "new" computes decode at 6, before prompt tokens 0:6, samples',
        '+ "calm" left',
        '- "calm" computes decode at 5',
    ]


def test_a_decode_that_jumps_is_a_change() -> None:
    jumped = replace(FIRST, decode_positions=(9, 5))
    assert diff_text(FIRST, jumped, ROWS, ROWS) == '~ "old" computes decode at 9, not decode at 8\n'
    assert diff_text(FIRST, jumped) == '~ "row 0" computes decode at 9, not decode at 8\n'


@given(plans())
@settings(deadline=None, max_examples=20)
def test_a_plan_does_not_differ_from_itself(plan: ExecutionPlan) -> None:
    assert diff(plan, plan) == []


def test_consecutive_steps_of_an_engine_differ_by_what_changed() -> None:
    executed = run_engine(2)
    for one, other in pairwise(executed):
        changed = {change.request_id for change in diff(one.plan, other.plan, one.before, other.before)}
        joined = {join.request_id for join in other.plan.joined}
        assert joined | set(other.plan.preempted) <= changed


def test_proposed_tokens_are_a_change_and_accepted_ones_are_not() -> None:
    chained = replace(FIRST, chains=(Chain(0, (7, 8)),))
    assert diff_text(FIRST, chained, ROWS, ROWS) == '+ "old" proposed are [7, 8]\n'
    assert diff_text(chained, replace(FIRST, chains=(Chain(0, (7,)),)), ROWS, ROWS) == (
        '~ "old" proposed are [7], not [7, 8]\n'
    )
    for accepted in (0, 1, 2):
        rows = ROWS.copy()
        rows.follow(chained, (accepted,))
        assert (rows[0].num_computed, rows[0].num_tokens) == (9 + accepted, 10 + accepted)
        after = ExecutionPlan(5, decode_rows=(0,), decode_positions=(9 + accepted,), chains=(Chain(0, (5,)),))
        lines = diff_text(chained, after, ROWS, rows).splitlines()
        assert '+ "old" proposed are [5]' in lines
        assert not any("computes decode" in line and "old" in line for line in lines)


def test_another_number_of_tokens_to_draft_is_a_change() -> None:
    other = replace(FIRST, num_draft_tokens=4)
    assert diff_text(FIRST, other, ROWS, ROWS) == "~ drafts 4 tokens for each decode, not 0\n"
