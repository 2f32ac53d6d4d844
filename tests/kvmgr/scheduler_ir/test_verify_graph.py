"""The verifier of graphs: hand-made wrong plans, one of each kind, and every plan of an engine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.core.errors import PlanError
from sagellm.core.plan import Chain, ExecutionPlan
from sagellm.core.types import AttentionChunk, Window
from sagellm.kvmgr.scheduler_ir.graph import IRGraph
from sagellm.kvmgr.scheduler_ir.rows import Row, Rows
from sagellm.kvmgr.scheduler_ir.text import parse_graph
from sagellm.kvmgr.scheduler_ir.verify_graph import problems, verify_graph
from tests.kvmgr.scheduler_ir.plan_strategies import plans, run_engine

BLOCK_SIZE = 4

RIGHT, *WRONG = (Path(__file__).parent / "wrong_plans.txt").read_text(encoding="utf-8").split("\n\n")[1:]


def before() -> Rows:
    return Rows(
        {
            0: Row("old", 9, 3, 8, [1, 2]),
            1: Row("calm", 6, 3, 5, [3, 5]),
            2: Row("gone", 5, 5, 4, [6, 7]),
        }
    )


def check(text: str, token_budget: int | None = 8) -> None:
    verify_graph(
        parse_graph(text), BLOCK_SIZE, token_budget=token_budget, before={"local": before()}, peers=["d0"]
    )


def test_the_right_plan_is_accepted() -> None:
    check(RIGHT)
    verify_graph(parse_graph(RIGHT), BLOCK_SIZE, peers=["d0"])


@pytest.mark.parametrize("wrong", WRONG, ids=lambda text: text.partition("\n")[0])
def test_a_wrong_plan_is_refused_by_name(wrong: str) -> None:
    _, right, other, message = (line.replace("\\n", "\n") for line in wrong.strip("\n").split("\n"))
    assert [right[0], other[0], message[0]] == ["-", "+", "="]
    assert RIGHT.count(right[2:]) == 1
    with pytest.raises(PlanError, match=re.escape(message[2:])):
        check(RIGHT.replace(right[2:], other[2:]))


def test_the_token_budget() -> None:
    with pytest.raises(PlanError, match='%9 prefill "new" brings the step to 7 tokens; the budget is 6'):
        check(RIGHT, token_budget=6)


def test_proposed_tokens_need_slots() -> None:
    check(RIGHT.replace("at 8 after", "at 8 chain [3:6] after"), token_budget=None)
    with pytest.raises(PlanError, match="computes up to token 13; the table of row 0 has 3 blocks for 12"):
        check(RIGHT.replace("at 8 after", "at 8 chain [3:7] after"), token_budget=None)


def test_proposed_tokens_that_are_no_tree() -> None:
    check(RIGHT.replace("at 8 after", "at 8 chain [3:6] parents [-1, 0, 0] after"), token_budget=None)
    with pytest.raises(PlanError, match="no tree: 3 tokens with 2 parents"):
        check(RIGHT.replace("at 8 after", "at 8 chain [3:6] parents [-1, 0] after"), token_budget=None)


def test_proposed_tokens_of_a_row_that_does_not_decode() -> None:
    with pytest.raises(PlanError, match="row 3 has a chain, and does not decode"):
        IRGraph.of(ExecutionPlan(0, chains=(Chain(3, (1,)),)))


def test_an_instance_twice() -> None:
    with pytest.raises(PlanError, match="instance @local is there twice"):
        check(f"step 5 @local\n{RIGHT}")


def test_a_transfer_and_a_join_elsewhere() -> None:
    other = 'step 1 @d0\n%0 = join row 0 "new" computed 8 prompt 9 blocks [1:4] tokens [0:9]\n'
    other += '%1 = prefill row 0 "new" tokens 8:9 samples after %0\n'
    graph = IRGraph.merged([parse_graph(RIGHT), parse_graph(other)])
    verify_graph(graph, BLOCK_SIZE)
    with pytest.raises(PlanError, match="brings the step to 7 tokens"):
        verify_graph(graph, BLOCK_SIZE, token_budget=6)


def test_all_that_is_wrong_is_listed() -> None:
    wrong = RIGHT.replace("4:9 samples", "4:4 samples").replace('reject "big"', 'reject "old"')
    assert len(list(problems(parse_graph(wrong), BLOCK_SIZE, peers=["d0"]))) == 2


def test_a_window_hides_what_lies_behind_it() -> None:
    overwritten = 'step 5 @local\n%0 = copy 20 to 1\n%1 = decode row 0 "old" at 8\n'
    rows = {"local": Rows({0: Row("old", 9, 3, 8, [1, 2, 4])})}
    verify_graph(parse_graph(overwritten), BLOCK_SIZE, before=rows, windows=(4,))
    with pytest.raises(PlanError, match="overwrites block 1"):
        verify_graph(parse_graph(overwritten), BLOCK_SIZE, before=rows, windows=(6,))


def test_each_kv_group_has_a_table_and_a_window() -> None:
    step = 'step 5 @local\n%0 = decode row 0 "old" at 8\n'
    rows = {"local": Rows({0: Row("old", 9, 3, 8, [1, -1, 2, 7, 4, 5])})}
    verify_graph(parse_graph(step), BLOCK_SIZE, before=rows, windows=(None, 4))
    with pytest.raises(PlanError, match="KV group that has let go of it"):
        verify_graph(parse_graph(step), BLOCK_SIZE, before=rows, windows=(None, 6))
    with pytest.raises(PlanError, match="has 6 blocks for 4 tokens, it needs 15"):
        verify_graph(parse_graph(step), 2, before=rows, windows=(None, 1, 1))


@given(plans(), plans(), st.dictionaries(st.integers(0, 20), st.integers(1, 30), max_size=4))
@settings(deadline=None, max_examples=25)
def test_any_plan_is_judged(one: ExecutionPlan, other: ExecutionPlan, lengths: dict[int, int]) -> None:
    """Whatever is in a plan, the verifier answers, and says where."""
    rows = {row: Row(f"r{row}", n, n, n - 1, list(range(n // 4))) for row, n in lengths.items()}
    graph = IRGraph.merged([IRGraph.of(one, instance="a"), IRGraph.of(other, instance="b")])
    for problem in problems(graph, 4, token_budget=9, windows=(5,), before={"a": Rows(rows)}):
        assert problem.startswith("%")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_proposed", [0, 6])
@pytest.mark.parametrize(
    ("windows", "failing_share"),
    [((None,), 0.0), ((6,), 0.0), ((None,), 0.05), ((None, 6, 6), 0.0), ((None, AttentionChunk(8)), 0.0)],
)
def test_every_plan_of_an_engine_is_right(
    seed: int, num_proposed: int, windows: tuple[Window | None, ...], failing_share: float
) -> None:
    executed = run_engine(seed, windows=windows, failing_share=failing_share, num_proposed=num_proposed)
    assert any(one.plan.chains for one in executed) == bool(num_proposed)
    assert len(executed) > 10
    for one in executed:
        graph = IRGraph.of(one.plan, rows=one.before)
        verify_graph(graph, BLOCK_SIZE, token_budget=32, windows=windows, before={"local": one.before})


def test_engines_under_pressure_do_all_kinds_of_things() -> None:
    plans = [one.plan for seed in range(8) for one in run_engine(seed)]
    assert any(plan.copies for plan in plans), "forks copy a block"
    assert any(plan.preempted for plan in plans)
    assert any(plan.table_deltas for plan in plans)
    assert any(plan.decode_rows and plan.prefills for plan in plans)
