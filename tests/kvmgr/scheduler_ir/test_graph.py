"""The graph of a plan: what comes after what, and the plan back."""

from __future__ import annotations

import pytest

from sagellm.core.errors import PlanError
from sagellm.core.ir import DecodeOp, InstanceStep, JoinOp, Phase, PlaceOp, PrefillOp, TransferOp
from sagellm.core.plan import (
    BlockCopy,
    BlockTableDelta,
    ExecutionPlan,
    Join,
    PhasePlacement,
    Prefill,
    Transfer,
)
from sagellm.core.types import SamplingParams, Tokens
from sagellm.kvmgr.scheduler_ir.graph import IRGraph
from sagellm.kvmgr.scheduler_ir.rows import Row, Rows
from tests.kvmgr.scheduler_ir.plan_strategies import run_engine


def join(
    row: int, name: str, blocks: tuple[int, ...], *, length: int = 6, prompt: int = 6, at: int = 0
) -> Join:
    tokens = Tokens(range(length)).tobytes()
    return Join(row, name, tokens, prompt, at, blocks, SamplingParams(), frozenset())


def edges(graph: IRGraph) -> dict[str, list[str]]:
    names = {op.op_id: op.name.split(" ", 1)[1] for op in graph.ops}
    return {names[op.op_id]: [names[one] for one in op.after] for op in graph.ops}


def test_an_operation_comes_after_those_it_depends_on() -> None:
    plan = ExecutionPlan(
        1,
        left=(2,),
        joined=(join(2, "new", (4, 5)),),
        table_deltas=(BlockTableDelta(0, 1, (9,)),),
        decode_rows=(0, 1),
        decode_positions=(4, 3),
        prefills=(Prefill(2, "new", 0, 6, True),),
        copies=(
            BlockCopy(4, 20),
            BlockCopy(7, 8),
            BlockCopy(20, 3),
        ),
        transfers=(Transfer("old", (1,), "d0"),),
        preempted=("gone",),
    )
    rows = Rows({0: Row("old", 5, 4, 4, [1]), 1: Row("else", 4, 2, 3, [3]), 2: Row("gone", 9, 2, 8, [4, 6])})
    assert edges(IRGraph.of(plan, rows=rows)) == {
        'preempt "gone"': [],
        'leave "gone"': ['preempt "gone"'],
        'join "new"': ['leave "gone"'],
        'table "old"': [],
        "copy": ["copy"],  # the last: it reads what the first writes
        'decode "old"': ['table "old"'],
        'decode "else"': [],
        'prefill "new"': ['join "new"', "copy"],
        'transfer "old"': ['decode "old"'],
    }


def test_a_transfer_of_an_unknown_request_comes_after_all_unknown_rows() -> None:
    plan = ExecutionPlan(
        1, decode_rows=(0, 1), decode_positions=(4, 3), transfers=(Transfer("a", (1,), "d"),)
    )
    graph = IRGraph.of(plan)
    assert graph.ops[-1].after == (0, 1)


def test_who_resumes_has_output_or_was_seen_to_be_preempted() -> None:
    plan = ExecutionPlan(
        1,
        joined=(join(0, "new", (1, 2)), join(1, "spoke", (3, 4), length=8), join(2, "silent", (5, 6))),
    )
    rows = Rows()
    rows.follow(ExecutionPlan(0, preempted=("silent",)))
    resumed = [op.resumes for op in IRGraph.of(plan, rows=rows).ops if isinstance(op, JoinOp)]
    assert resumed == [False, True, True]
    rows.follow(plan)
    assert rows.preempted == set()


def test_a_request_enters_where_its_blocks_were_sent() -> None:
    sent = ExecutionPlan(
        4,
        joined=(join(0, "a", (1, 2)),),
        prefills=(Prefill(0, "a", 0, 5, False),),
        transfers=(Transfer("a", (1, 2), "d0"),),
    )
    got = ExecutionPlan(
        9,
        placements=(("a", PhasePlacement(ffn="f0")),),
        joined=(join(7, "a", (30, 31), at=5),),
        prefills=(Prefill(7, "a", 5, 1, True),),
    )
    graph = IRGraph.merged(
        [
            IRGraph.of(sent, instance="p0", phases=frozenset({Phase.PREFILL})),
            IRGraph.of(got, instance="d0", phases=frozenset({Phase.DECODE})),
        ]
    )
    assert [op.op_id for op in graph.ops] == list(range(6))
    place = next(op for op in graph.ops if isinstance(op, PlaceOp))
    transfer = next(op for op in graph.ops if isinstance(op, TransferOp))
    entered = next(op for op in graph.ops if isinstance(op, JoinOp) and op.instance == "d0")
    last = graph.ops[-1]
    assert entered.after == (transfer.op_id,)
    assert isinstance(last, PrefillOp)
    assert (last.phase, last.after) == (Phase.DECODE, (place.op_id, entered.op_id))
    assert (graph.to_plan("p0"), graph.to_plan("d0")) == (sent, got)
    with pytest.raises(PlanError, match="an instance has to be named: the graph has p0, d0"):
        graph.to_plan()
    with pytest.raises(PlanError, match="no single instance is named 'x': the graph has p0, d0"):
        graph.to_plan("x")


def test_an_empty_plan() -> None:
    graph = IRGraph.of(ExecutionPlan(3))
    assert graph == IRGraph((InstanceStep("local", 3),))
    assert graph.to_plan() == ExecutionPlan(3)


def test_rows_follow_an_engine() -> None:
    executed = run_engine(1)
    graphs = [IRGraph.of(one.plan, rows=one.before) for one in executed]
    decodes = [op for graph in graphs for op in graph.ops if isinstance(op, DecodeOp)]
    assert decodes, "the engine decodes"
    assert all(op.request_id is not None for op in decodes), "every row has a name"
    resumed = [op for graph in graphs for op in graph.ops if isinstance(op, JoinOp) and op.resumes]
    assert resumed, "the engine preempts"
    assert [graph.to_plan() for graph in graphs] == [one.plan for one in executed]


def test_rows_of_which_nothing_is_known_are_left_alone() -> None:
    rows = Rows()
    rows.follow(
        ExecutionPlan(
            5,
            left=(9,),
            table_deltas=(BlockTableDelta(1, 2, (3,)),),
            decode_rows=(1,),
            decode_positions=(4,),
            prefills=(Prefill(2, "a", 0, 3, True),),
        )
    )
    assert rows == {}
    rows.follow(
        ExecutionPlan(6, joined=(join(1, "b", (1, 2), at=4),), prefills=(Prefill(1, "b", 4, 2, True),))
    )
    assert rows.names == {1: "b"}
    assert (rows[1].num_computed, rows[1].num_tokens) == (6, 7)
    before = rows.copy()
    rows.follow(
        ExecutionPlan(7, table_deltas=(BlockTableDelta(1, 2, (3,)),), decode_rows=(1,), decode_positions=(6,))
    )
    assert rows[1] == Row("b", 8, 6, 7, [1, 2, 3])
    assert before[1] == Row("b", 7, 6, 6, [1, 2])
