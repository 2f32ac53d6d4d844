"""`verify_graph`: what must hold of a plan, whoever made or rewrote it.

Slow and complete, for tests, tools and `sagellm explain`; the engine's own check of each step is `verify`.

Four looks, each at what the one before it left standing: the graph itself; one fate for each request; rows,
their tokens and tables; blocks, and who reads and writes them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from sagellm.core.errors import PlanError
from sagellm.core.ir import (
    BOTH_PHASES,
    DecodeOp,
    JoinOp,
    Operation,
    Phase,
    PlaceOp,
    PreemptOp,
    PrefillOp,
    RejectOp,
    TransferOp,
)
from sagellm.kvmgr.scheduler_ir._graph_blocks import block_problems
from sagellm.kvmgr.scheduler_ir._graph_order import GraphOrder, find_cycle
from sagellm.kvmgr.scheduler_ir._graph_rows import InstanceRows, row_problems
from sagellm.kvmgr.scheduler_ir.graph import IRGraph
from sagellm.kvmgr.scheduler_ir.rows import Rows


def verify_graph(
    graph: IRGraph,
    block_size: int,
    *,
    token_budget: int | None = None,
    window: int | None = None,
    before: Mapping[str, Rows] | None = None,
    peers: Collection[str] = (),
) -> None:
    """Raise `PlanError` naming the first operation that is wrong, and what would be right.

    `token_budget`: of each instance; `window`: no token attends further back. `before`: the batch of each
    instance before the step; without it, rows that do not join are believed. `peers`:
    instances outside the graph.
    """
    for problem in problems(
        graph, block_size, token_budget=token_budget, window=window, before=before, peers=peers
    ):
        raise PlanError(problem)


def problems(
    graph: IRGraph,
    block_size: int,
    *,
    token_budget: int | None = None,
    window: int | None = None,
    before: Mapping[str, Rows] | None = None,
    peers: Collection[str] = (),
) -> Iterator[str]:
    """All that is wrong, as far as it can be told: what stands on something wrong is not looked at."""
    ops: dict[int, Operation] = {}
    found = [*_graph_problems(graph, ops, {one.name for one in graph.instances} | {*peers})]
    if found:
        yield from found
        return
    order = GraphOrder(ops)
    for instance in graph.instances:
        own = [op for op in graph.ops if op.instance == instance.name]
        found = [*_fate_problems(own), *_budget_problems(own, token_budget)]
        rows = InstanceRows(own, (before or {}).get(instance.name))
        found = found or [*row_problems(own, rows, order, block_size)]
        yield from found or block_problems(own, rows, order, block_size, window)


# -- the graph itself


def _graph_problems(graph: IRGraph, ops: dict[int, Operation], known: set[str]) -> Iterator[str]:
    """Fills `ops`, by id."""
    names: set[str] = set()
    for one in graph.instances:
        if one.name in names:
            yield f"instance @{one.name} is there twice: an instance has one step in a graph"
        names.add(one.name)
    for op in graph.ops:
        if op.op_id in ops:
            yield f"{op.name}: %{op.op_id} is also {ops[op.op_id].name}; each operation has its own number"
        ops.setdefault(op.op_id, op)
        if op.instance not in names:
            yield f"{op.name} is on unknown instance @{op.instance}; the graph has {_listed(names)}"
    dangling = False
    for op in graph.ops:
        for missing in sorted(set(op.after) - ops.keys()):
            dangling = True
            yield f"{op.name} comes after %{missing}, and there is no such operation"
    cycle = () if dangling else find_cycle(ops)
    if cycle:
        path = " after ".join(op.name for op in (*cycle, cycle[0]))
        yield f"{path}: a cycle; nothing can come after itself"
    yield from _place_problems(graph, known)


def _place_problems(graph: IRGraph, known: set[str]) -> Iterator[str]:
    """Who does what where."""
    phases = {one.name: one.phases for one in graph.instances}
    for op in graph.ops:
        able = phases.get(op.instance, BOTH_PHASES)
        if isinstance(op, DecodeOp | PrefillOp) and op.phase not in able:
            listed = " or ".join(sorted(one.value for one in able)) or "nothing"
            yield f"{op.name}: @{op.instance} computes {listed} only, not {op.phase.value}"
        if isinstance(op, PrefillOp) and op.phase is Phase.DECODE and op.end - op.start != 1:
            yield f"{op.name}: phase decode with {op.end - op.start} tokens; decode computes one a step"
        if isinstance(op, PlaceOp):
            one = op.placement
            for name in sorted({one.prefill, one.decode, one.attention, one.ffn} - known - {""}):
                yield f"{op.name} names unknown instance @{name}; known: {_listed(known)}"
        if isinstance(op, TransferOp):
            target = op.transfer.target_instance
            if target not in known:
                yield f"{op.name} goes to unknown instance @{target}; known: {_listed(known)}"
            elif target == op.instance:
                yield f"{op.name} goes to @{target}, where it is; name another instance"


def _listed(names: Collection[str]) -> str:
    return ", ".join(f"@{name}" for name in sorted(names)) or "none"


# -- requests


def _fate_problems(ops: list[Operation]) -> Iterator[str]:
    """A request is scheduled, preempted or rejected, once, in one row."""
    fates: dict[str, PreemptOp | RejectOp | JoinOp | DecodeOp | PrefillOp] = {}
    for op in ops:
        about = op.request_id
        if about is None or not isinstance(op, PreemptOp | RejectOp | DecodeOp | PrefillOp | JoinOp):
            continue
        other = fates.setdefault(about, op)
        if other is op:
            continue
        if isinstance(op, PreemptOp | RejectOp) or isinstance(other, PreemptOp | RejectOp):
            yield f"{op.name}: {other.name} is in the same step; a request has one fate a step"
        elif op.row != other.row:
            yield f"{op.name} is in row {op.row}, {other.name} in row {other.row}; a request has one row"
    yield from _compute_problems(ops)


def _compute_problems(ops: list[Operation]) -> Iterator[str]:
    """Ranges that are no ranges, and tokens that two operations compute."""
    by_row: defaultdict[int, list[DecodeOp | PrefillOp]] = defaultdict(list)
    for op in ops:
        if not isinstance(op, DecodeOp | PrefillOp):
            continue
        if op.start < 0:
            yield f"{op.name} starts at {op.start}; the first token is 0"
        if op.end <= op.start:
            yield f"{op.name} computes tokens {op.start}:{op.end}; a prefill has at least one token"
        for other in by_row[op.row]:
            if op.start < other.end and other.start < op.end:
                theirs = f"{other.name} computes {other.start}:{other.end}"
                yield f"{op.name} computes {op.start}:{op.end}, {theirs}; they overlap"
            elif isinstance(op, DecodeOp) or isinstance(other, DecodeOp):
                yield f"{op.name}: {other.name} is in row {op.row} too; a row prefills or decodes in a step"
        by_row[op.row].append(op)


def _budget_problems(ops: list[Operation], budget: int | None) -> Iterator[str]:
    total = 0
    for op in ops:
        if budget is None or not isinstance(op, DecodeOp | PrefillOp):
            continue
        total += op.end - op.start
        if total > budget:
            yield f"{op.name} brings the step to {total} tokens; the budget is {budget}"
            return
