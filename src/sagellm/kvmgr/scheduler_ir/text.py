"""The text form of a graph, in the spirit of MLIR: one operation a line, complete, and read back by `parse`.

    step 12 @local
    // chunked_prefill admit "c": "13 tokens from 8 on"
    %0 = leave row 3 "b"
    %1 = join row 3 "c" computed 8 prompt 21 blocks [0:2, 7] tokens [100:121] after %0
    %2 = decode row 1 "a" at 12
    %3 = prefill row 3 "c" tokens 8:21 samples after %1

A header line for each instance, the decisions of its passes under it, then the operations. `a:b` stands for
a, a + 1, ..., b - 1. Lines that begin with # are comments of whoever writes, and are not kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import singledispatch
from typing import Any

from sagellm.core.ir import (
    BOTH_PHASES,
    BlockTableOp,
    CopyOp,
    DecodeOp,
    InstanceStep,
    JoinOp,
    LeaveOp,
    Operation,
    Phase,
    PlaceOp,
    PreemptOp,
    PrefillOp,
    RejectOp,
    TransferOp,
)
from sagellm.core.plan import Decision, ExecutionPlan, Join
from sagellm.core.types import SamplingParams, Tokens
from sagellm.kvmgr.scheduler_ir._text_reader import WORD, GraphReader
from sagellm.kvmgr.scheduler_ir.graph import IRGraph
from sagellm.kvmgr.scheduler_ir.rows import Rows

MIN_RUN = 3
"""Consecutive numbers from so many on are written as a range."""
_DEFAULTS = SamplingParams()


def print_graph(graph: IRGraph, *, tokens: bool = True) -> str:
    """The graph as text; equal graphs give equal texts. Without `tokens`, those of joins are only counted: to
    be read by people, not by `parse_graph`."""
    lines = []
    for one in graph.instances:
        lines.append(_header(one))
        lines += map(_decision, one.decisions)
    first = graph.instances[0].name if graph.instances else None
    lines += [_line(op, first, tokens=tokens) for op in graph.ops]
    return "".join(f"{line}\n" for line in lines)


def parse_graph(text: str) -> IRGraph:
    """The graph of a text; raises `PlanError` with line, column and what was expected there."""
    return GraphReader().read(text)


def print_plan(plan: ExecutionPlan, rows: Rows | None = None, *, tokens: bool = True) -> str:
    """The text of a plan's graph; `rows`, the batch before it, gives names to rows."""
    return print_graph(IRGraph.of(plan, rows=rows), tokens=tokens)


def parse_plan(text: str) -> ExecutionPlan:
    """The plan of a text with one instance."""
    return parse_graph(text).to_plan()


# -- header and decisions


def _header(one: InstanceStep) -> str:
    phases = "".join(f" for {phase.value}" for phase in Phase if phase in one.phases)
    header = f"step {one.step} {instance(one.name)}"
    if one.phases != BOTH_PHASES:
        header += phases or " for none"
    return header + (f" drafts {one.num_draft_tokens}" if one.num_draft_tokens else "")


def _decision(decision: Decision) -> str:
    made = f"// {word(decision.pass_name)} {word(decision.action)} {quoted(decision.request_id)}"
    return made + (f": {quoted(decision.reason)}" if decision.reason else "")


# -- operations


def _line(op: Operation, first_instance: str | None, *, tokens: bool) -> str:
    parts = [f"%{op.op_id} = {_body(op)}"]
    if isinstance(op, JoinOp):
        parts[0] = f"%{op.op_id} = {_join(op, tokens=tokens)}"
    if op.instance != first_instance:
        parts.append(f"on {instance(op.instance)}")
    if op.after:
        parts.append("after " + ", ".join(f"%{one}" for one in op.after))
    return " ".join(parts)


@singledispatch
def _body(op: Operation) -> str:
    return op.word


@_body.register
def _(op: PreemptOp) -> str:
    return f"preempt {quoted(op.request)}"


@_body.register
def _(op: RejectOp) -> str:
    return f"reject {quoted(op.request)} because {quoted(op.reason)}"


@_body.register
def _(op: PlaceOp) -> str:
    one = op.placement
    named = ((each.name, getattr(one, each.name)) for each in fields(one))
    return " ".join([f"place {quoted(op.request)}", *(f"{part} {instance(at)}" for part, at in named if at)])


@_body.register
def _(op: LeaveOp) -> str:
    return f"leave {_row(op.row, op.request)}"


def _join(op: JoinOp, *, tokens: bool) -> str:
    join = op.join
    held = Tokens.frombytes(join.tokens)
    parts = [
        "resume" if op.resumes else "join",
        _row(join.row, join.request_id),
        f"computed {join.num_computed} prompt {join.num_prompt_tokens} blocks {numbers(join.block_ids)}",
        f"tokens {numbers(held)}" if tokens else f"of {len(held)} tokens",
    ]
    return " ".join([*parts, *_sampling(join)])


def _sampling(join: Join) -> Iterable[str]:
    given = {one.name: getattr(join.params, one.name) for one in fields(SamplingParams)}
    changed = {name: _plain(value) for name, value in given.items() if value != getattr(_DEFAULTS, name)}
    if changed:
        yield f"params {json.dumps(changed)}"
    if join.eos_token_ids:
        yield f"eos {numbers(sorted(join.eos_token_ids))}"


def _plain(value: Any) -> Any:
    return [[key, one] for key, one in value.items()] if isinstance(value, Mapping) else value


@_body.register
def _(op: BlockTableOp) -> str:
    growth = op.growth
    return f"grow {_row(growth.row, op.request)} from {growth.first} blocks {numbers(growth.block_ids)}"


@_body.register
def _(op: CopyOp) -> str:
    one = op.copy
    return f"copy {word(one.source_tier)} {one.source_block} to {word(one.target_tier)} {one.target_block}"


@_body.register
def _(op: DecodeOp) -> str:
    return f"decode {_row(op.row, op.request)} at {op.position}"


@_body.register
def _(op: PrefillOp) -> str:
    made = f"prefill {_row(op.row, op.request_id)} tokens {op.start}:{op.end}"
    made += " samples" if op.samples else ""
    return made if op.phase is Phase.PREFILL else f"{made} phase {op.phase.value}"


@_body.register
def _(op: TransferOp) -> str:
    sent = op.transfer
    target = instance(sent.target_instance)
    return f"transfer {quoted(sent.request_id)} blocks {numbers(sent.block_ids)} to {target}"


# -- words, texts, numbers


def _row(row: int, request: str | None) -> str:
    return f"row {row}" if request is None else f"row {row} {quoted(request)}"


def quoted(text: str) -> str:
    """A JSON string; what cannot be seen is escaped."""
    return json.dumps(text, ensure_ascii=not text.isprintable())


def word(text: str) -> str:
    """As it is where it is one word, else quoted."""
    return text if WORD.fullmatch(text) else quoted(text)


def instance(name: str) -> str:
    return f"@{word(name)}"


def numbers(values: Iterable[int]) -> str:
    """A list in which runs of consecutive numbers are ranges."""
    parts: list[str] = []
    run: list[int] = []
    for value in values:
        if run and value != run[-1] + 1:
            parts += _run(run)
            run = []
        run.append(value)
    return f"[{', '.join([*parts, *_run(run)])}]"


def _run(run: list[int]) -> list[str]:
    return [f"{run[0]}:{run[-1] + 1}"] if len(run) >= MIN_RUN else list(map(str, run))
