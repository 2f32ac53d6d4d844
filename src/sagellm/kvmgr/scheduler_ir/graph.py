"""A plan as a graph of operations, to print, compare, check or rewrite.

It is derived from an `ExecutionPlan` and gives it back exactly. No step of an engine builds one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from sagellm.core.errors import PlanError
from sagellm.core.ir import (
    BOTH_PHASES,
    LOCAL,
    BlockTableOp,
    CopyOp,
    DecodeOp,
    InstanceStep,
    JoinOp,
    KeepOp,
    LeaveOp,
    Operation,
    Phase,
    PlaceOp,
    PreemptOp,
    PrefillOp,
    RejectOp,
    TransferOp,
)
from sagellm.core.plan import (
    BlockCopy,
    BlockTableDelta,
    Chain,
    ExecutionPlan,
    Join,
    KeptState,
    PhasePlacement,
    Prefill,
    Transfer,
)
from sagellm.core.types import TOKEN_BYTES
from sagellm.kvmgr.scheduler_ir.rows import Rows

Op = TypeVar("Op", bound=Operation)
Record = TypeVar("Record", Join, Prefill, BlockCopy, Transfer, PhasePlacement)


@dataclass(frozen=True, slots=True)
class IRGraph:
    """Operations of one step on one or several instances. Within a kind, `ops` are in the order of the plan.
    Dependencies are in `Operation.after` alone. A graph may be wrong in any way: `verify_graph` checks it."""

    instances: tuple[InstanceStep, ...]
    ops: tuple[Operation, ...] = ()

    @classmethod
    def of(
        cls,
        plan: ExecutionPlan,
        *,
        instance: str = LOCAL,
        phases: frozenset[Phase] = BOTH_PHASES,
        rows: Rows | None = None,
    ) -> IRGraph:
        """The graph of one instance's plan. `rows`, the batch before it, says which request is in which row
        and which joins are resumed; without it, a joining request is resumed if it has output."""
        derivation = _Derivation(instance, phases, Rows() if rows is None else rows)
        derivation.add(plan)
        step = InstanceStep(instance, plan.step, phases, plan.num_draft_tokens, plan.decisions)
        return cls((step,), tuple(derivation.ops))

    @classmethod
    def merged(cls, graphs: Iterable[IRGraph]) -> IRGraph:
        """One graph of several instances' graphs, renumbered. A request joins the instance that its blocks
        are sent to after that transfer."""
        instances: list[InstanceStep] = []
        ops: list[Operation] = []
        for graph in graphs:
            instances += graph.instances
            numbers = {op.op_id: len(ops) + i for i, op in enumerate(graph.ops)}
            ops += [
                replace(op, op_id=numbers[op.op_id], after=tuple(numbers.get(i, i) for i in op.after))
                for op in graph.ops
            ]
        sent = {(op.request_id, op.target_instance): op.op_id for op in only_of(ops, TransferOp)}
        return cls(tuple(instances), tuple(_after_transfer(op, sent) for op in ops))

    def to_plan(self, instance: str | None = None) -> ExecutionPlan:
        """The plan of the named instance, or of the only one."""
        step = self.instance(instance)
        ops = [op for op in self.ops if op.instance == step.name]
        decodes = list(only_of(ops, DecodeOp))
        return ExecutionPlan(
            step=step.step,
            joined=tuple(_record(op, Join) for op in only_of(ops, JoinOp)),
            left=tuple(op.row for op in only_of(ops, LeaveOp)),
            table_deltas=tuple(
                BlockTableDelta(op.row, op.first, op.block_ids) for op in only_of(ops, BlockTableOp)
            ),
            decode_rows=tuple(op.row for op in decodes),
            decode_positions=tuple(op.position for op in decodes),
            chains=tuple(Chain(op.row, op.chain, op.parents) for op in decodes if op.chain),
            prefills=tuple(_record(op, Prefill) for op in only_of(ops, PrefillOp)),
            copies=tuple(_record(op, BlockCopy) for op in only_of(ops, CopyOp)),
            kept_states=tuple(KeptState(op.row, op.num_tokens, op.pages) for op in only_of(ops, KeepOp)),
            transfers=tuple(_record(op, Transfer) for op in only_of(ops, TransferOp)),
            preempted=tuple(op.request_id for op in only_of(ops, PreemptOp)),
            rejected=tuple((op.request_id, op.reason) for op in only_of(ops, RejectOp)),
            placements=tuple((op.request_id, _record(op, PhasePlacement)) for op in only_of(ops, PlaceOp)),
            num_draft_tokens=step.num_draft_tokens,
            decisions=step.decisions,
        )

    def instance(self, name: str | None = None) -> InstanceStep:
        """The step of the named instance, or of the only one. Else raises `PlanError` with the names."""
        found = [step for step in self.instances if name in (None, step.name)]
        if len(found) == 1:
            return found[0]
        known = ", ".join(step.name for step in self.instances) or "none"
        asked = "an instance has to be named" if name is None else f"no single instance is named {name!r}"
        raise PlanError(f"{asked}: the graph has {known}")


def only_of(ops: Iterable[Operation], kind: type[Op]) -> Iterator[Op]:
    """The operations of one kind."""
    return (op for op in ops if isinstance(op, kind))


def _after_transfer(op: Operation, sent: dict[tuple[str, str], int]) -> Operation:
    if not isinstance(op, JoinOp):
        return op
    transfer = sent.get((op.request_id, op.instance))
    return op if transfer is None else replace(op, after=tuple(sorted({*op.after, transfer})))


def _record(op: Operation, kind: type[Record]) -> Record:
    """The record that an operation was made from. Their fields have the same names."""
    return kind(**{field.name: getattr(op, field.name) for field in fields(kind)})


def _fields_of(record: Record) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


class _Derivation:
    """Makes a plan's operations in the order of their effects. An operation comes after earlier ones of the
    same row, the same block or the same request."""

    def __init__(self, instance: str, phases: frozenset[Phase], rows: Rows) -> None:
        self.instance = instance
        self.phases = phases
        self.rows = rows
        self.ops: list[Operation] = []
        self._names = rows.names
        self._placed: dict[str, int] = {}
        self._row_op: dict[int, int] = {}  # the last operation that changed the row or its table
        self._new_blocks: defaultdict[int, set[int]] = defaultdict(set)  # by row: added in this step
        self._reads: defaultdict[int, list[int]] = defaultdict(list)  # copies by block
        self._writes: defaultdict[int, list[int]] = defaultdict(list)
        self._computes: defaultdict[str | None, list[int]] = defaultdict(list)

    def add(self, plan: ExecutionPlan) -> None:
        preempted = {name: self._add(PreemptOp, request_id=name) for name in plan.preempted}
        for name, reason in plan.rejected:
            self._add(RejectOp, request_id=name, reason=reason)
        for name, placement in plan.placements:
            self._placed[name] = self._add(PlaceOp, request_id=name, **_fields_of(placement))
        for row in plan.left:
            occupant = self._names.pop(row, None)
            after = [preempted[occupant]] if occupant in preempted else []
            self._row_op[row] = self._add(LeaveOp, after, row=row, request_id=occupant)
        for join in plan.joined:
            has_output = len(join.tokens) // TOKEN_BYTES > join.num_prompt_tokens
            resumes = has_output or join.request_id in self.rows.preempted
            op_id = self._add(JoinOp, self._of_row(join.row), resumes=resumes, **_fields_of(join))
            self._row_op[join.row] = op_id
            self._names[join.row] = join.request_id
            self._new_blocks[join.row] = set(join.block_ids)
        for prefill in plan.prefills:
            self._names.setdefault(prefill.row, prefill.request_id)
        for delta in plan.table_deltas:
            self._new_blocks[delta.row].update(delta.block_ids)
            self._row_op[delta.row] = self._add(
                BlockTableOp,
                self._of_row(delta.row),
                request_id=self._names.get(delta.row),
                **delta._asdict(),
            )
        for copy in plan.copies:
            after_copies = {*self._writes[copy.source], *self._writes[copy.target], *self._reads[copy.target]}
            op_id = self._add(CopyOp, after_copies, **_fields_of(copy))
            self._reads[copy.source].append(op_id)
            self._writes[copy.target].append(op_id)
        self._compute(plan)
        for kept in plan.kept_states:
            occupant = self._names.get(kept.row)
            self._add(KeepOp, self._computes[occupant], request_id=occupant, **kept._asdict())
        for transfer in plan.transfers:
            known = self._computes.get(transfer.request_id)
            self._add(TransferOp, self._computes[None] if known is None else known, **_fields_of(transfer))

    def _add(self, kind: Callable[..., Operation], after: Iterable[int] = (), **values: Any) -> int:
        """Append an operation with these fields; returns its id."""
        op_id = len(self.ops)
        self.ops.append(kind(op_id=op_id, instance=self.instance, after=tuple(sorted(after)), **values))
        return op_id

    def _of_row(self, row: int) -> set[int]:
        return {self._row_op[row]} if row in self._row_op else set()

    def _compute(self, plan: ExecutionPlan) -> None:
        chains = {chain.row: chain for chain in plan.chains}
        for row, position in zip(plan.decode_rows, plan.decode_positions, strict=True):
            name, after = self._names.get(row), self._before_compute(row)
            _, chain, parents = chains.pop(row, Chain(row, ()))
            self._computes[name].append(
                self._add(
                    DecodeOp, after, row=row, position=position, chain=chain, parents=parents, request_id=name
                )
            )
        if chains:
            raise PlanError(f"row {next(iter(chains))} has a chain, and does not decode")
        for prefill in plan.prefills:
            only_decodes = Phase.PREFILL not in self.phases
            last_token = prefill.num_tokens == 1 and prefill.samples
            op_id = self._add(
                PrefillOp,
                self._before_compute(prefill.row),
                request_id=prefill.request_id,
                row=prefill.row,
                start=prefill.start,
                end=prefill.start + prefill.num_tokens,
                samples=prefill.samples,
                phase=Phase.DECODE if only_decodes and last_token else Phase.PREFILL,
            )
            self._computes[prefill.request_id].append(op_id)

    def _before_compute(self, row: int) -> set[int]:
        """Ids of operations that come before the computing in this row. They are the row's last change, its
        request's placement, and the copies from or to its new blocks."""
        after = self._of_row(row)
        if self._names.get(row) in self._placed:
            after.add(self._placed[self._names[row]])
        for copies in (self._reads, self._writes):
            for block, ops in copies.items():
                if block in self._new_blocks.get(row, ()):
                    after.update(ops)
        return after
