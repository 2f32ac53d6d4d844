"""From a bound draft to the frozen plan that a backend executes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from sagellm.core.plan import (
    BlockTableDelta,
    BlockTableDeltas,
    Chunk,
    Draft,
    ExecutionPlan,
    Join,
    Prefill,
    Transfer,
)


class BlockTables(Protocol):
    """Whoever knows the block table of a running request."""

    def block_table(self, request_id: str) -> Sequence[int]: ...


class DecodeRows(Protocol):
    """Whoever knows the rows and positions of the requests in decode, in one order."""

    @property
    def rows(self) -> tuple[int, ...]: ...

    def positions(self) -> tuple[int, ...]: ...


def freeze(
    draft: Draft,
    left: tuple[int, ...],
    tables: BlockTables,
    decodes: DecodeRows,
) -> ExecutionPlan:
    """The plan of a draft whose blocks are bound and whose requests have rows. Copies; shares nothing
    live."""
    rows, positions = decodes.rows, decodes.positions()
    if draft.decode_indices is not None:
        rows = tuple(rows[i] for i in draft.decode_indices)
        positions = tuple(positions[i] for i in draft.decode_indices)
    chunks = list(draft.chunks.values())
    single = [chunk for chunk in chunks if chunk.is_decode]
    others = [_growth(chunk, table) for chunk in chunks if (table := _outdated(chunk, tables))]
    return ExecutionPlan(
        step=draft.step,
        joined=tuple(_join(chunk, tables) for chunk in chunks if chunk.admits),
        left=left,
        table_deltas=_grown(draft, others),
        decode_rows=(*rows, *(chunk.state.row for chunk in single)),
        decode_positions=(*positions, *(chunk.start for chunk in single)),
        prefills=tuple(_prefill(chunk) for chunk in chunks if not chunk.is_decode),
        copies=tuple(draft.copies),
        transfers=tuple(_sent(draft.transfers, tables)) if draft.transfers else (),
        placements=tuple(draft.placements.items()),
        preempted=tuple(state.request_id for state in draft.preempted),
        rejected=tuple(draft.rejected.items()),
        num_draft_tokens=draft.num_draft_tokens,
        decisions=tuple(draft.decisions),
    )


def _grown(draft: Draft, others: list[BlockTableDelta]) -> Sequence[BlockTableDelta]:
    news = draft.appended.news
    if not news[0]:
        return (*draft.table_deltas, *others)
    return BlockTableDeltas(*news, (*draft.table_deltas, *others))


def _outdated(chunk: Chunk, tables: BlockTables) -> tuple[int, ...]:
    """The part of a running request's block table that the backend does not know."""
    return () if chunk.admits else tuple(tables.block_table(chunk.state.request_id)[chunk.first_block :])


def _growth(chunk: Chunk, table: tuple[int, ...]) -> BlockTableDelta:
    return BlockTableDelta(chunk.state.row, chunk.first_block, table)


def _join(chunk: Chunk, tables: BlockTables) -> Join:
    state = chunk.state
    request = state.request
    return Join(
        state.row,
        state.request_id,
        state.tokens.tobytes(),
        state.num_prompt_tokens,
        chunk.start,
        tuple(tables.block_table(state.request_id)),
        request.params,
        request.eos_token_ids,
    )


def _prefill(chunk: Chunk) -> Prefill:
    state = chunk.state
    return Prefill(state.row, state.request_id, chunk.start, chunk.num_tokens, chunk.samples)


def _sent(transfers: Sequence[Transfer], tables: BlockTables) -> Iterator[Transfer]:
    """Those of requests that still run, each with its blocks."""
    for transfer in transfers:
        try:
            table = tables.block_table(transfer.request_id)
        except KeyError:  # preempted or ended since it was planned
            continue
        yield transfer if transfer.block_ids else replace(transfer, block_ids=tuple(table))
