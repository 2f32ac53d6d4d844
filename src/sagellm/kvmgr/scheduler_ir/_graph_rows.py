"""Rows of one instance within a step: who is in them, with which tokens and table, and what is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sagellm.core.blocks import cdiv
from sagellm.core.ir import BlockTableOp, DecodeOp, JoinOp, LeaveOp, Operation, PrefillOp
from sagellm.kvmgr.scheduler_ir._graph_order import GraphOrder
from sagellm.kvmgr.scheduler_ir.rows import Row, Rows


@dataclass(slots=True)
class RowNow:
    """A row as its compute operation finds it. `row` is None where nothing is known but what the step
    says; `changes` are the operations that made it so, `new_blocks` those of its table that they brought."""

    row: Row | None
    changes: list[Operation] = field(default_factory=list)
    new_blocks: set[int] = field(default_factory=set)
    left_by: LeaveOp | None = None


class InstanceRows:
    """The batch of one instance after left, joined and grown. `before` None: rows that do not join are
    believed to be there."""

    def __init__(self, ops: Sequence[Operation], before: Rows | None) -> None:
        self.known = before is not None
        there = Rows() if before is None else before.copy()
        self._rows = {number: RowNow(row) for number, row in there.items()}
        self.problems: list[str] = []
        self._at = {row.row.request_id: number for number, row in self._rows.items() if row.row}
        for kind in (LeaveOp, JoinOp, BlockTableOp):  # the order of effects
            for op in ops:
                if isinstance(op, kind):
                    self._apply(op)

    def get(self, row: int) -> RowNow | None:
        """The row, or None for one that is not in the batch."""
        if row not in self._rows and not self.known:
            self._rows[row] = RowNow(None)
        found = self._rows.get(row)
        return None if found is None or found.left_by is not None else found

    def left_by(self, row: int) -> LeaveOp | None:
        return self._rows[row].left_by if row in self._rows else None

    def _apply(self, op: Operation) -> None:
        if isinstance(op, LeaveOp):
            gone = self._rows.get(op.row)
            if gone is not None and gone.row is not None:
                self._at.pop(gone.row.request_id, None)
            self._rows[op.row] = RowNow(None, [op], left_by=op)
        elif isinstance(op, JoinOp):
            self._join(op)
        elif isinstance(op, BlockTableOp):
            self._grow(op)

    def _join(self, op: JoinOp) -> None:
        there = self._rows.get(op.row)
        elsewhere = self._at.get(op.join.request_id)
        if there is not None and there.left_by is None:
            who = _who(there)
            self.problems.append(f"{op.name} enters row {op.row}, where {who} is; choose an empty row")
        elif elsewhere is not None:
            self.problems.append(f"{op.name} enters row {op.row} and is in row {elsewhere}; it has one row")
        earlier = there.changes if there is not None else []
        self._rows[op.row] = RowNow(Row.of(op.join), [*earlier, op], set(op.join.block_ids))
        self._at[op.join.request_id] = op.row

    def _grow(self, op: BlockTableOp) -> None:
        now, growth = self.get(op.row), op.growth
        if now is None:
            self.problems.append(f"{op.name} changes the table of row {op.row}, where nobody is")
            return
        now.changes.append(op)
        now.new_blocks.update(growth.block_ids)
        if now.row is None:
            return
        held = len(now.row.block_ids)
        if not 0 <= growth.first <= held:
            self.problems.append(
                f"{op.name} begins at index {growth.first}; the table of row {op.row} has {held} blocks: "
                f"begin at {held} at most"
            )
            return
        now.new_blocks -= set(now.row.block_ids[: growth.first])
        now.row.block_ids[growth.first :] = growth.block_ids


def _who(now: RowNow) -> str:
    if now.changes:
        return now.changes[0].name
    return "somebody" if now.row is None else f'"{now.row.request_id}"'


def row_problems(
    ops: Sequence[Operation], rows: InstanceRows, order: GraphOrder, block_size: int
) -> Iterator[str]:
    """What is wrong with rows, and with what is computed in them."""
    yield from rows.problems
    for op in ops:
        if isinstance(op, JoinOp):
            yield from _join_problems(op)
        elif isinstance(op, DecodeOp | PrefillOp):
            now = rows.get(op.row)
            if now is None:
                yield _nobody_there(op, rows)
                continue
            yield from _late_changes(op, now, order)
            if now.row is not None:
                yield from _range_problems(op, now.row, block_size)
    for op in ops:
        now = rows.get(op.row) if isinstance(op, JoinOp) else None
        for change in now.changes[:-1] if now is not None else ():
            if isinstance(change, LeaveOp) and not order.comes_after(op.op_id, change.op_id):
                yield f"{op.name} does not come after {change.name}, which empties its row"


def _nobody_there(op: DecodeOp | PrefillOp, rows: InstanceRows) -> str:
    gone = rows.left_by(op.row)
    if gone is not None:
        return f"{op.name} computes row {op.row}, which {gone.name} has emptied; leave it out"
    return f"{op.name} computes row {op.row}, where nobody is; join a request first"


def _join_problems(op: JoinOp) -> Iterator[str]:
    row = Row.of(op.join)
    if not 1 <= row.num_prompt_tokens <= row.num_tokens:
        yield f"{op.name} has a prompt of {row.num_prompt_tokens} tokens; it brings {row.num_tokens} in all"
    if not 0 <= row.num_computed < row.num_tokens:
        yield (
            f"{op.name} has {row.num_computed} of {row.num_tokens} tokens computed; at least one is left "
            "to compute"
        )


def _late_changes(op: DecodeOp | PrefillOp, now: RowNow, order: GraphOrder) -> Iterator[str]:
    for change in now.changes:
        if isinstance(change, JoinOp | BlockTableOp) and not order.comes_after(op.op_id, change.op_id):
            yield f"{op.name} does not come after {change.name}; its row is not ready before that"


def _range_problems(op: DecodeOp | PrefillOp, row: Row, block_size: int) -> Iterator[str]:
    if op.request_id not in (None, row.request_id):
        yield f'{op.name} computes row {op.row}, where "{row.request_id}" is'
    if op.start != row.num_computed and isinstance(op, PrefillOp):
        yield f"{op.name} starts at {op.start}; {row.num_computed} tokens are computed: start there"
    if op.end > row.num_tokens:
        yield f"{op.name} ends at {op.end}; the request has {row.num_tokens} tokens"
    elif op.samples and op.end < row.num_tokens:
        yield f"{op.name} draws a token after {op.end} of {row.num_tokens} tokens; draw after the last"
    room = len(row.block_ids) * block_size
    if op.end > room:
        yield (
            f"{op.name} computes up to token {op.end}; the table of row {op.row} has {len(row.block_ids)} "
            f"blocks for {room} tokens, it needs {cdiv(op.end, block_size)}"
        )
