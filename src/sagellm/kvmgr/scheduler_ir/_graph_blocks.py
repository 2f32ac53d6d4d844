"""Blocks of one instance within a step: who reads them, who writes them, and in which order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sagellm.core.blocks import Tier, cdiv
from sagellm.core.ir import BlockTableOp, CopyOp, DecodeOp, JoinOp, Operation, PrefillOp, TransferOp
from sagellm.kvmgr.scheduler_ir._graph_order import GraphOrder
from sagellm.kvmgr.scheduler_ir._graph_rows import InstanceRows


@dataclass(frozen=True, slots=True)
class Access:
    """The blocks that a compute operation reads, those among them that it writes, and those that its table
    got in this step."""

    op: DecodeOp | PrefillOp
    reads: frozenset[int]
    writes: frozenset[int]
    new: frozenset[int]


def block_problems(
    ops: Sequence[Operation], rows: InstanceRows, order: GraphOrder, block_size: int, window: int | None
) -> Iterator[str]:
    """What is wrong with blocks: two writers, copies into what is read, transfers before the KV is there."""
    accesses = list(_accesses(ops, rows, block_size, window))
    copies = [op for op in ops if isinstance(op, CopyOp)]
    yield from _id_problems(ops)
    yield from _writer_problems(accesses, order)
    yield from _copy_problems(copies, order)
    for copy in copies:
        for access in accesses:
            yield from _race(copy, access, order)
    for op in ops:
        if isinstance(op, TransferOp):
            yield from _transfer_problems(op, accesses, order)


def _accesses(
    ops: Sequence[Operation], rows: InstanceRows, block_size: int, window: int | None
) -> Iterator[Access]:
    """Of rows whose whole table is known."""
    for op in ops:
        now = rows.get(op.row) if isinstance(op, DecodeOp | PrefillOp) else None
        if not isinstance(op, DecodeOp | PrefillOp) or now is None or now.row is None:
            continue
        table = now.row.block_ids
        first = 0 if window is None else max(0, op.start + 1 - window)
        end = cdiv(op.end, block_size)
        yield Access(
            op,
            frozenset(table[first // block_size : end]),
            frozenset(table[op.start // block_size : end]),
            frozenset(now.new_blocks),
        )


def _id_problems(ops: Sequence[Operation]) -> Iterator[str]:
    for op in ops:
        ids: Sequence[int] = ()
        if isinstance(op, JoinOp):
            ids = op.join.block_ids
        elif isinstance(op, BlockTableOp):
            ids = op.growth.block_ids
        elif isinstance(op, TransferOp):
            ids = op.transfer.block_ids
        elif isinstance(op, CopyOp):
            ids = (op.copy.source_block, op.copy.target_block)
        if any(block < 0 for block in ids):
            yield f"{op.name} names block {min(ids)}; blocks are numbered from 0 on"


def _writer_problems(accesses: Sequence[Access], order: GraphOrder) -> Iterator[str]:
    """Two writers of a block, and readers of what another request writes."""
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
    """Copies alone, and with each other."""
    targets: dict[tuple[str, int], CopyOp] = {}
    for op in copies:
        for tier in {op.copy.source_tier, op.copy.target_tier} - set(Tier):
            yield f"{op.name}: there is no tier {tier!r}; tiers are {', '.join(Tier)}"
        source, target = _source(op), _target(op)
        if source == target:
            yield f"{op.name} copies {_block(*source)} to itself; leave it out"
        other = targets.setdefault(target, op)
        if other is not op:
            yield f"{op.name} copies into {_block(*target)}, and so does {other.name}; one can be right"
    for op in copies:
        writer = targets.get(_source(op))
        if writer is not None and writer is not op and not order.are_ordered(op.op_id, writer.op_id):
            both = f"{writer.name} copies into {_block(*_source(op))}, which {op.name} reads in the same step"
            yield f"{both}; one has to come after the other"


def _race(copy: CopyOp, access: Access, order: GraphOrder) -> Iterator[str]:
    """A copy and a compute operation that meet in a block. The KV that a row has since before the step may be
    copied, never overwritten; blocks that it got are ready when the copies with them are done."""
    op = access.op
    tier, block = _target(copy)
    if tier == Tier.HBM and block in access.reads:
        if block not in access.new:
            yield f"{copy.name} overwrites {_block(tier, block)}, which {op.name} reads; choose a free block"
        elif not order.comes_after(op.op_id, copy.op_id):
            yield f"{op.name} reads {_block(tier, block)}, which {copy.name} fills; it has to come after that"
    tier, block = _source(copy)
    overwritten = tier == Tier.HBM and block in access.writes & access.new
    if overwritten and not order.comes_after(op.op_id, copy.op_id):
        yield f"{op.name} writes {_block(tier, block)}, which {copy.name} saves; it has to come after that"


def _transfer_problems(op: TransferOp, accesses: Sequence[Access], order: GraphOrder) -> Iterator[str]:
    sent = set(op.transfer.block_ids)
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


def _source(op: CopyOp) -> tuple[str, int]:
    return op.copy.source_tier, op.copy.source_block


def _target(op: CopyOp) -> tuple[str, int]:
    return op.copy.target_tier, op.copy.target_block


def _block(tier: str, block: int) -> str:
    return f"{tier} block {block}"
