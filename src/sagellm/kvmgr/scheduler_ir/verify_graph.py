"""`verify_graph` checks all that must hold of a plan, also of a rewritten one.

Slow and complete, for tests, tools and `sagellm explain`. The engine checks each step with `verify` instead.

There are four stages, and each looks only at what the stage before found correct: the graph itself (ids,
cycles, instances); requests (what happens to each, token ranges, the budget); rows (which request is in each,
with which tokens and table); blocks (readers and writers, and their order).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

from sagellm.core.blocks import NO_PAGE, cdiv
from sagellm.core.errors import PlanError
from sagellm.core.ir import (
    BOTH_PHASES,
    BlockTableOp,
    ComputeOp,
    CopyOp,
    DecodeOp,
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
from sagellm.core.token_trees import check_tree
from sagellm.core.types import Window, first_seen
from sagellm.kvmgr.scheduler_ir.graph import IRGraph, only_of
from sagellm.kvmgr.scheduler_ir.rows import Row, Rows


def verify_graph(
    graph: IRGraph,
    block_size: int,
    *,
    token_budget: int | None = None,
    windows: Sequence[Window | None] = (None,),
    before: Mapping[str, Rows] | None = None,
    peers: Collection[str] = (),
) -> None:
    """Raise `PlanError` naming the first operation that is wrong, and what would be right.

    `token_budget` is that of each instance. `windows` has an entry for each KV group: what a token attends
    to, None for all before it. `before` is the batch of each instance before the step; without it, a
    row that does not join is assumed to be there. `peers` are instances outside the graph.
    """
    for problem in problems(
        graph, block_size, token_budget=token_budget, windows=windows, before=before, peers=peers
    ):
        raise PlanError(problem)


def problems(
    graph: IRGraph,
    block_size: int,
    *,
    token_budget: int | None = None,
    windows: Sequence[Window | None] = (None,),
    before: Mapping[str, Rows] | None = None,
    peers: Collection[str] = (),
) -> Iterator[str]:
    """All problems of the first stage that finds any, for each instance."""
    ops: dict[int, Operation] = {}
    found = [*_graph_problems(graph, ops, {step.name for step in graph.instances} | {*peers})]
    if found:
        yield from found
        return
    order = GraphOrder(ops)
    for instance in graph.instances:
        own = [op for op in graph.ops if op.instance == instance.name]
        computes = [op for op in own if isinstance(op, ComputeOp)]
        found = [
            *_request_problems(own),
            *_range_problems(computes),
            *_budget_problems(computes, token_budget),
        ]
        rows = InstanceRows(own, (before or {}).get(instance.name))
        found = found or [*_row_problems(own, rows, order, block_size, len(windows))]
        yield from found or _block_problems(own, [*_accesses(computes, rows, block_size, windows)], order)


# -- order of operations


class GraphOrder:
    """The order of operations in an acyclic graph, as one bit set per operation."""

    def __init__(self, ops: Mapping[int, Operation]) -> None:
        self._bits = {op_id: 1 << i for i, op_id in enumerate(ops)}
        self._before: dict[int, int] = {}
        for op_id in _sorter(ops).static_order():
            before = 0
            for earlier in ops[op_id].after:
                before |= self._before[earlier] | self._bits[earlier]
            self._before[op_id] = before

    def comes_after(self, later: int, earlier: int) -> bool:
        """Whether `later` sees the effects of `earlier`."""
        return bool(self._before[later] & self._bits[earlier])

    def are_ordered(self, a: int, b: int) -> bool:
        return self.comes_after(a, b) or self.comes_after(b, a)


def find_cycle(ops: Mapping[int, Operation]) -> list[Operation]:
    """A cycle: each operation comes after the next, the last after the first. Empty if there is none."""
    try:
        _sorter(ops).prepare()
    except CycleError as error:
        cycle = error.args[1][:0:-1]  # it repeats the first at the end, and each comes before the next
        start = min(cycle, key=list(ops).index)
        at = cycle.index(start)
        return [ops[op_id] for op_id in cycle[at:] + cycle[:at]]
    return []


def _sorter(ops: Mapping[int, Operation]) -> TopologicalSorter[int]:
    return TopologicalSorter({op_id: op.after for op_id, op in ops.items()})


# -- stage 1: the graph itself


def _graph_problems(graph: IRGraph, ops: dict[int, Operation], known: set[str]) -> Iterator[str]:
    """Problems of ids, instances and order. Fills `ops`, by id."""
    names: set[str] = set()
    for step in graph.instances:
        if step.name in names:
            yield f"instance @{step.name} is there twice: an instance has one step in a graph"
        names.add(step.name)
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
    """Phases on instances that do not compute them, and unknown instances."""
    phases = {step.name: step.phases for step in graph.instances}
    for op in graph.ops:
        able = phases.get(op.instance, BOTH_PHASES)
        if isinstance(op, ComputeOp) and op.phase not in able:
            listed = " or ".join(sorted(phase.value for phase in able)) or "nothing"
            yield f"{op.name}: @{op.instance} computes {listed} only, not {op.phase.value}"
        if isinstance(op, PrefillOp) and op.phase is Phase.DECODE and op.end - op.start != 1:
            yield f"{op.name}: phase decode with {op.end - op.start} tokens; decode computes one a step"
        if isinstance(op, PlaceOp):
            for name in sorted({op.prefill, op.decode, op.attention, op.ffn} - known - {""}):
                yield f"{op.name} names unknown instance @{name}; known: {_listed(known)}"
        if isinstance(op, TransferOp):
            target = op.target_instance
            if target not in known:
                yield f"{op.name} goes to unknown instance @{target}; known: {_listed(known)}"
            elif target == op.instance:
                yield f"{op.name} goes to @{target}, where it is; name another instance"


def _listed(names: Collection[str]) -> str:
    return ", ".join(f"@{name}" for name in sorted(names)) or "none"


# -- stage 2: requests


def _request_problems(ops: list[Operation]) -> Iterator[str]:
    """A request computes, is preempted or is rejected, once and in one row."""
    first: dict[str, PreemptOp | RejectOp | JoinOp | DecodeOp | PrefillOp] = {}
    for op in ops:
        request_id = op.request_id
        if request_id is None or not isinstance(op, PreemptOp | RejectOp | DecodeOp | PrefillOp | JoinOp):
            continue
        other = first.setdefault(request_id, op)
        if other is op:
            continue
        if isinstance(op, PreemptOp | RejectOp) or isinstance(other, PreemptOp | RejectOp):
            yield f"{op.name}: {other.name} is in the same step; a request has one fate a step"
        elif op.row != other.row:
            yield f"{op.name} is in row {op.row}, {other.name} in row {other.row}; a request has one row"


def _range_problems(computes: list[ComputeOp]) -> Iterator[str]:
    """Empty or negative token ranges, and tokens that two operations compute."""
    by_row: defaultdict[int, list[ComputeOp]] = defaultdict(list)
    for op in computes:
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


def _budget_problems(computes: list[ComputeOp], token_budget: int | None) -> Iterator[str]:
    total = 0
    for op in computes:
        total += op.end - op.start
        if token_budget is not None and total > token_budget:
            yield f"{op.name} brings the step to {total} tokens; the budget is {token_budget}"
            return


# -- stage 3: rows


@dataclass(slots=True)
class RowState:
    """A row as its compute operation finds it.

    `row` is None if nothing is known of it but what this step says. `changes` are the operations of this step
    that changed it, and `new_blocks` the blocks that they added to its table.
    """

    row: Row | None
    changes: list[Operation] = field(default_factory=list)
    new_blocks: set[int] = field(default_factory=set)
    left_by: LeaveOp | None = None


class InstanceRows:
    """The batch of one instance after its leaves, joins and table changes. Without `before`, a row that does
    not join is assumed to be there."""

    def __init__(self, ops: Sequence[Operation], before: Rows | None) -> None:
        self.known = before is not None
        batch = Rows() if before is None else before.copy()
        self._rows = {number: RowState(row) for number, row in batch.items()}
        self.problems: list[str] = []
        self._row_of = {row.request_id: number for number, row in batch.items()}
        for leave in only_of(ops, LeaveOp):  # leaves, joins, table changes: the order of effects
            old = self._rows.get(leave.row)
            if old is not None and old.row is not None:
                self._row_of.pop(old.row.request_id, None)
            self._rows[leave.row] = RowState(None, [leave], left_by=leave)
        for join in only_of(ops, JoinOp):
            self._join(join)
        for change in only_of(ops, BlockTableOp):
            self._change_table(change)

    def get(self, row: int) -> RowState | None:
        """The row, or None if it is not in the batch."""
        if row not in self._rows and not self.known:
            self._rows[row] = RowState(None)
        found = self._rows.get(row)
        return None if found is None or found.left_by is not None else found

    def left_by(self, row: int) -> LeaveOp | None:
        return self._rows[row].left_by if row in self._rows else None

    def _join(self, op: JoinOp) -> None:
        old = self._rows.get(op.row)
        elsewhere = self._row_of.get(op.request_id)
        if old is not None and old.left_by is None:
            occupant = "another request" if old.row is None else f'"{old.row.request_id}"'
            if old.changes:
                occupant = old.changes[0].name
            self.problems.append(f"{op.name} enters row {op.row}, where {occupant} is; choose an empty row")
        elif elsewhere is not None:
            self.problems.append(f"{op.name} enters row {op.row} and is in row {elsewhere}; it has one row")
        earlier = old.changes if old is not None else []
        self._rows[op.row] = RowState(Row.of(op), [*earlier, op], set(op.block_ids))
        self._row_of[op.request_id] = op.row

    def _change_table(self, op: BlockTableOp) -> None:
        state = self.get(op.row)
        if state is None:
            self.problems.append(f"{op.name} changes the table of row {op.row}, which is empty")
            return
        state.changes.append(op)
        state.new_blocks.update(op.block_ids)
        if state.row is None:
            return
        held = len(state.row.block_ids)
        if not 0 <= op.first <= held:
            self.problems.append(
                f"{op.name} begins at index {op.first}; the table of row {op.row} has {held} blocks: "
                f"begin at {held} at most"
            )
            return
        state.new_blocks -= set(state.row.block_ids[: op.first])
        state.row.block_ids[op.first :] = op.block_ids


def _row_problems(
    ops: Sequence[Operation], rows: InstanceRows, order: GraphOrder, block_size: int, num_groups: int
) -> Iterator[str]:
    """Problems of rows, and of what is computed in them."""
    yield from rows.problems
    for op in ops:
        if isinstance(op, JoinOp):
            yield from _join_problems(op)
        elif isinstance(op, ComputeOp):
            state = rows.get(op.row)
            if state is None:
                gone = rows.left_by(op.row)
                if gone is not None:
                    yield f"{op.name} computes row {op.row}, which {gone.name} has emptied; leave it out"
                else:
                    yield f"{op.name} computes row {op.row}, which is empty; join a request first"
                continue
            for change in state.changes:
                late = isinstance(change, JoinOp | BlockTableOp)
                if late and not order.comes_after(op.op_id, change.op_id):
                    yield f"{op.name} does not come after {change.name}; its row is not ready before that"
            if state.row is not None:
                yield from _compute_problems(op, state.row, block_size, num_groups)
    for join in only_of(ops, JoinOp):
        state = rows.get(join.row)
        for leave in only_of(state.changes[:-1], LeaveOp) if state is not None else ():
            if not order.comes_after(join.op_id, leave.op_id):
                yield f"{join.name} does not come after {leave.name}, which empties its row"


def _join_problems(op: JoinOp) -> Iterator[str]:
    row = Row.of(op)
    if not 1 <= row.num_prompt_tokens <= row.num_tokens:
        yield f"{op.name} has a prompt of {row.num_prompt_tokens} tokens; it brings {row.num_tokens} in all"
    if not 0 <= row.num_computed < row.num_tokens:
        yield (
            f"{op.name} has {row.num_computed} of {row.num_tokens} tokens computed; at least one is left "
            "to compute"
        )


def _compute_problems(op: ComputeOp, row: Row, block_size: int, num_groups: int) -> Iterator[str]:
    """A compute operation against the request, the tokens and the table of its row."""
    if op.request_id not in (None, row.request_id):
        yield f'{op.name} computes row {op.row}, where "{row.request_id}" is'
    if op.start != row.num_computed and isinstance(op, PrefillOp):
        yield f"{op.name} starts at {op.start}; {row.num_computed} tokens are computed: start there"
    chain = op.chain if isinstance(op, DecodeOp) else ()
    end = op.end - len(chain)
    if end > row.num_tokens:
        yield f"{op.name} ends at {end}; the request has {row.num_tokens} tokens"
    elif op.samples and end < row.num_tokens:
        yield f"{op.name} draws a token after {end} of {row.num_tokens} tokens; draw after the last"
    if chain and min(chain) < 0:
        yield f"{op.name} has a proposed token {min(chain)}; tokens are numbered from 0 on"
    try:
        check_tree(chain, op.parents if isinstance(op, DecodeOp) else ())
    except ValueError as error:
        yield f"{op.name} has proposed tokens that are no tree: {error}"
    room = len(row.block_ids) // num_groups * block_size
    if op.end > room:
        yield (
            f"{op.name} computes up to token {op.end}; the table of row {op.row} has {len(row.block_ids)} "
            f"blocks for {room} tokens, it needs {cdiv(op.end, block_size) * num_groups}"
        )


# -- stage 4: blocks


@dataclass(frozen=True, slots=True)
class Access:
    """The blocks that a compute operation reads and writes. `new` blocks joined its table in this step."""

    op: ComputeOp
    reads: frozenset[int]
    writes: frozenset[int]
    new: frozenset[int]


def _block_problems(ops: Sequence[Operation], accesses: Sequence[Access], order: GraphOrder) -> Iterator[str]:
    """Two writers, copies into blocks that are read, transfers before the KV is there."""
    copies = list(only_of(ops, CopyOp))
    yield from _id_problems(ops, accesses)
    yield from _writer_problems(accesses, order)
    yield from _copy_problems(copies, order)
    for copy in copies:
        for access in accesses:
            yield from _race_problems(copy, access, order)
    for transfer in only_of(ops, TransferOp):
        yield from _transfer_problems(transfer, accesses, order)
    yield from _keep_problems(ops, accesses)


def _keep_problems(ops: Sequence[Operation], accesses: Sequence[Access]) -> Iterator[str]:
    """Kept states that their rows do not pass, or in blocks that are taken."""
    computes = {op.row: op for op in ops if isinstance(op, ComputeOp)}
    taken: dict[int, Operation] = {}
    for access in accesses:
        taken.update(dict.fromkeys(access.reads | access.writes, access.op))
    for join in only_of(ops, JoinOp):
        taken.update(dict.fromkeys(join.state_pages, join))
    for op in only_of(ops, KeepOp):
        compute = computes.get(op.row)
        if compute is None:
            yield f"{op.name} keeps the state of row {op.row}, which computes nothing"
        elif not compute.start <= op.num_tokens <= compute.end:
            span = f"[{compute.start}, {compute.end}]"
            yield f"{op.name} keeps a state behind {op.num_tokens} tokens; {compute.name} passes {span}"
        for page in op.pages:
            other = taken.setdefault(page, op)
            if other is not op:
                yield f"{op.name} writes block {page}, which {other.name} has"


def _accesses(
    computes: Sequence[ComputeOp], rows: InstanceRows, block_size: int, windows: Sequence[Window | None]
) -> Iterator[Access]:
    """The accesses in rows whose whole table is known."""
    for op in computes:
        state = rows.get(op.row)
        if state is None or state.row is None:
            continue
        reads: list[int] = []
        writes: list[int] = []
        for group, window in enumerate(windows):
            table = state.row.block_ids[group :: len(windows)]
            end = cdiv(op.end, block_size)
            reads += table[first_seen(window, op.start) // block_size : end]
            writes += table[op.start // block_size : end]
        yield Access(op, frozenset(reads), frozenset(writes), frozenset(state.new_blocks))


def _id_problems(ops: Sequence[Operation], accesses: Sequence[Access]) -> Iterator[str]:
    for access in accesses:
        if NO_PAGE in access.reads:
            yield f"{access.op.name} reads a block of a KV group that has let go of it"
    for op in ops:
        ids: Sequence[int] = ()
        if isinstance(op, JoinOp | BlockTableOp):
            ids = [block for block in op.block_ids if block != NO_PAGE]
        elif isinstance(op, TransferOp):
            ids = op.block_ids
        elif isinstance(op, CopyOp):
            ids = (op.source, op.target)
        elif isinstance(op, KeepOp):
            ids = op.pages
        if any(block < 0 for block in ids):
            yield f"{op.name} names block {min(ids)}; blocks are numbered from 0 on"


def _writer_problems(accesses: Sequence[Access], order: GraphOrder) -> Iterator[str]:
    """Blocks with two writers, and blocks read before another request has written them."""
    writers: dict[int, Access] = {}
    for access in accesses:
        for block in sorted(access.writes):
            other = writers.setdefault(block, access)
            if other.op.row != access.op.row:
                both = f"{access.op.name} writes block {block}, and so does {other.op.name}"
                yield f"{both}; a block that is written has one owner"
    for access in accesses:
        for block in sorted(access.reads & writers.keys()):
            op, writer = access.op, writers[block].op
            if op.row != writer.row and not order.comes_after(op.op_id, writer.op_id):
                both = f"{op.name} reads block {block}, which {writer.name} writes"
                yield f"{both}; it has to come after that"


def _copy_problems(copies: Sequence[CopyOp], order: GraphOrder) -> Iterator[str]:
    """Each copy alone, and copies with each other."""
    targets: dict[int, CopyOp] = {}
    for op in copies:
        if op.source == op.target:
            yield f"{op.name} copies block {op.source} to itself; leave it out"
        other = targets.setdefault(op.target, op)
        if other is not op:
            yield f"{op.name} copies into block {op.target}, and so does {other.name}; one can be right"
    for op in copies:
        writer = targets.get(op.source)
        if writer is not None and writer is not op and not order.are_ordered(op.op_id, writer.op_id):
            both = f"{writer.name} copies into block {op.source}, which {op.name} reads in the same step"
            yield f"{both}; one has to come after the other"


def _race_problems(copy: CopyOp, access: Access, order: GraphOrder) -> Iterator[str]:
    """A copy and a compute operation that use the same block. KV that a row had before the step may be
    copied, never overwritten. A block that the row got in this step is ready once the copies from and into it
    are done."""
    op = access.op
    if copy.target in access.reads:
        if copy.target not in access.new:
            yield f"{copy.name} overwrites block {copy.target}, which {op.name} reads; choose a free block"
        elif not order.comes_after(op.op_id, copy.op_id):
            yield f"{op.name} reads block {copy.target}, which {copy.name} fills; it has to come after that"
    overwritten = copy.source in access.writes & access.new
    if overwritten and not order.comes_after(op.op_id, copy.op_id):
        yield f"{op.name} writes block {copy.source}, which {copy.name} reads; it has to come after that"


def _transfer_problems(op: TransferOp, accesses: Sequence[Access], order: GraphOrder) -> Iterator[str]:
    sent = set(op.block_ids)
    if not sent:
        yield f"{op.name} sends no blocks; leave it out"
    for access in accesses:
        if access.op.request_id != op.request_id:
            continue
        early = not order.comes_after(op.op_id, access.op.op_id)
        if early and (access.writes & sent):
            yield f"{op.name} does not come after {access.op.name}, which computes what it sends"
        foreign = sent - access.reads
        if foreign:
            yield f"{op.name} sends block {min(foreign)}, which is not in the request's table"
