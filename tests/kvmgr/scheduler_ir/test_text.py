"""The text form: complete, readable, and it says where it cannot be read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.core.errors import PlanError
from sagellm.core.ir import InstanceStep, Phase
from sagellm.core.plan import (
    BlockCopy,
    BlockTableDelta,
    Decision,
    ExecutionPlan,
    Join,
    PhasePlacement,
    Prefill,
    Transfer,
)
from sagellm.core.types import SamplingParams, Tokens
from sagellm.kvmgr.scheduler_ir.graph import IRGraph
from sagellm.kvmgr.scheduler_ir.rows import Row, Rows
from sagellm.kvmgr.scheduler_ir.text import parse_graph, parse_plan, print_graph, print_plan
from tests.kvmgr.scheduler_ir.plan_strategies import NAMES, PARAMS, plans, run_engine

PHASES = st.frozensets(st.sampled_from(list(Phase)))
ROWS = st.dictionaries(st.integers(0, 300), NAMES.map(lambda name: Row(name, 9, 4, 8)), max_size=5)

PLAN = ExecutionPlan(
    7,
    joined=(
        Join(
            3,
            "c",
            Tokens([*range(100, 121), 5]).tobytes(),
            21,
            8,
            (0, 1, 7),
            SamplingParams(temperature=0.0, logit_bias={5: 1.5}, stop=("\n",)),
            frozenset({2}),
        ),
    ),
    left=(3,),
    table_deltas=(BlockTableDelta(1, 3, (17,)),),
    decode_rows=(1,),
    decode_positions=(12,),
    prefills=(Prefill(3, "c", 8, 14, True),),
    copies=(BlockCopy(4, 7),),
    transfers=(Transfer("c", (0, 1), "d0"),),
    preempted=("b",),
    rejected=(("x", 'it said "no"'),),
    placements=(("a", PhasePlacement(attention="a0", ffn="f0")),),
    decisions=(Decision("chunked_prefill", "c", "admit", "14 tokens from 8 on"),),
)
TEXT = """\
step 7 @local
// chunked_prefill admit "c": "14 tokens from 8 on"
%0 = preempt "b"
%1 = reject "x" because "it said \\"no\\""
%2 = place "a" attention @a0 ffn @f0
%3 = leave row 3 "b" after %0
%4 = resume row 3 "c" computed 8 prompt 21 blocks [0, 1, 7] tokens [100:121, 5] \
params {"temperature": 0.0, "logit_bias": [[5, 1.5]], "stop": ["\\n"]} eos [2] after %3
%5 = table row 1 "a" from 3 blocks [17]
%6 = copy 4 to 7
%7 = decode row 1 "a" at 12 after %2, %5
%8 = prefill row 3 "c" tokens 8:22 samples after %4, %6
%9 = transfer "c" blocks [0, 1] to @d0 after %8
"""


def test_a_plan_reads_like_this() -> None:
    rows = Rows({1: Row("a", 13, 10, 12), 3: Row("b", 9, 9, 4)})
    assert print_plan(PLAN, rows) == TEXT
    assert parse_plan(TEXT) == PLAN
    assert "of 22 tokens" in print_plan(PLAN, tokens=False)


@given(plans(), NAMES, PHASES, ROWS)
@settings(deadline=None, max_examples=60)
def test_what_is_printed_is_read_back(
    plan: ExecutionPlan, name: str, phases: frozenset[Phase], rows: dict[int, Row]
) -> None:
    graph = IRGraph.of(plan, instance=name, phases=phases, rows=Rows(rows))
    assert graph.to_plan() == plan
    text = print_graph(graph)
    again = parse_graph(text)
    assert again == graph
    assert print_graph(again) == text
    assert again.to_plan() == plan


@given(plans(), plans())
@settings(deadline=None, max_examples=10)
def test_two_instances_are_read_back(one: ExecutionPlan, two: ExecutionPlan) -> None:
    graph = IRGraph.merged([IRGraph.of(one, instance="p0"), IRGraph.of(two, instance="d 0")])
    again = parse_graph(print_graph(graph))
    assert again == graph
    assert (again.to_plan("p0"), again.to_plan("d 0")) == (one, two)


@given(plans(), st.data())
@settings(deadline=None, max_examples=20)
def test_any_graph_is_read_back(plan: ExecutionPlan, data: st.DataObject) -> None:
    graph = IRGraph.of(plan)
    ops = tuple(
        replace(
            op,
            op_id=data.draw(st.integers(0, 999)),
            instance=data.draw(NAMES),
            after=tuple(data.draw(st.lists(st.integers(0, 999), max_size=3))),
        )
        for op in graph.ops
    )
    assert parse_graph(print_graph(replace(graph, ops=ops))) == replace(graph, ops=ops)


@given(PARAMS)
@settings(deadline=None, max_examples=30)
def test_every_parameter_is_read_back(params: SamplingParams) -> None:
    plan = replace(PLAN, joined=(replace(PLAN.joined[0], params=params),))
    assert parse_plan(print_plan(plan)) == plan


@given(plans(), st.data())
@settings(deadline=None, max_examples=40)
def test_a_damaged_text_is_read_or_refused(plan: ExecutionPlan, data: st.DataObject) -> None:
    text = print_plan(plan)
    at = data.draw(st.integers(0, len(text)))
    cut = data.draw(st.integers(0, 3))
    damaged = (
        text[:at]
        + data.draw(st.text(max_size=3) | st.sampled_from(["[", '"', "%", "9" * 30]))
        + text[at + cut :]
    )
    try:
        graph = parse_graph(damaged)
    except PlanError:
        return
    assert parse_graph(print_graph(graph)) == graph, "what is read is a graph like any other"


@pytest.mark.parametrize("seed", range(3))
def test_plans_of_an_engine_are_read_back(seed: int) -> None:
    for one in run_engine(seed):
        assert parse_plan(print_plan(one.plan, one.before)) == one.plan


def test_comments_and_empty_lines_are_left_out() -> None:
    graph = parse_graph('# mine\n\n  step 3 @local\r\n\t# more\n  %4 = preempt "a"\n')
    assert graph.instances == (InstanceStep("local", 3),)
    assert [op.name for op in graph.ops] == ['%4 preempt "a"']


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stop 3", "line 1, column 1: expected 'step', '//' or an operation, as %0 = ..., found stop"),
        ("step x @a", "line 1, column 6: expected the number of the step, found x"),
        ("step 3", "line 1, column 7: expected an instance, as @name, the line ends"),
        ("step 3 @a for lunch", "line 1, column 15: expected prefill or decode, found lunch"),
        ("step 3 @a b", "line 1, column 11: expected the end of the line, found b"),
        ('// p admit "a"', "line 1, column 1: expected a line 'step N @instance' before decisions"),
        ("step 3 @a\n// p admit a", "line 2, column 12: expected the request in double quotes, found a"),
        ("%0 = fly", "column 6: expected one of preempt, reject, place, leave"),
        ("%0 : leave row 1", "column 4: expected '=', found :"),
        ("%0 = leave row1", "column 12: expected 'row', found row1"),
        ('%0 = leave row 1 "a', 'expected the request in double quotes, found "a'),
        ('%0 = leave row 1 "\\q"', "expected the request as a JSON string"),
        ("%0 = decode row 1 at 3 after 2", "column 30: expected an operation, as %0, found 2"),
        ("%0 = decode row 1 at 3 after %1,", "column 33: expected an operation, as %0, the line ends"),
        ('%0 = prefill row 1 tokens 0:4', "column 20: expected the request in double quotes, found tokens"),
        ('%0 = prefill row 1 "a" tokens 0-4', "column 32: expected ':', found -4"),
        ('%0 = prefill row 1 "a" tokens 0:4 phase x', "expected prefill or decode, found x"),
        ('%0 = place "a" attention x', "column 26: expected an instance, as @name, found x"),
        ("%0 = table row 1 from 0 blocks [1 2]", "column 35: expected ',' or ']', found 2"),
        ("%0 = table row 1 from 0 blocks [4:4]", "column 35: expected an end from 5 to"),
        ("%0 = table row 1 from 0 blocks [0:99999999999]", "column 35: expected an end from 1 to"),
        ("%0 = table row 1 from 0 blocks 4", "column 32: expected blocks as [1, 4:7], found 4"),
        ("%0 = copy 4 into 5", "column 13: expected 'to', found into"),
        ('%0 = reject "a"', "column 16: expected 'because', the line ends"),
        (
            '%0 = join row 1 "a" computed 0 prompt 1 blocks [0] tokens [4294967296]',
            "column 59: expected token ids of 32 bits",
        ),
    ],
)  # fmt: skip
def test_an_error_says_where_and_what(text: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_graph(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ("{", "expected sampling parameters as a JSON object"),
        ("[1]", "expected sampling parameters as a JSON object, found ["),
        ('{"temprature": 1}', "Did you mean 'temperature'?"),
        ('{"temperature": -1}', "temperature must be in [0.0, 100.0]"),
        ('{"logit_bias": 3}', "expected sampling parameters that are valid"),
    ],
)
def test_parameters_are_checked(params: str, message: str) -> None:
    text = f'%0 = join row 1 "a" computed 0 prompt 1 blocks [0] tokens [1] params {params}'
    with pytest.raises(PlanError) as caught:
        parse_graph(text)
    assert f"line 1, column {len(text) - len(params) + 1}: " in str(caught.value)
    assert message in str(caught.value)


def test_the_word_of_older_texts_is_read() -> None:
    old = 'step 1 @local\n%0 = grow row 1 "a" from 3 blocks [17]\n'
    assert parse_graph(old) == parse_graph(old.replace("grow", "table"))
