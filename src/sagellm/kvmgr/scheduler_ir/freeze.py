"""`freeze`: from a bound draft to the frozen plan that a backend executes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from sagellm.core.binding import Binding
from sagellm.core.plan import BlockTableDelta, Chain, Chunk, ExecutionPlan, Join, KeptState, Prefill, Transfer
from sagellm.kvmgr.scheduler_ir.batch import DecodeBatch


class BlockTableSource(Protocol):
    """The block tables of all running requests."""

    def block_table(self, request_id: str) -> Sequence[int]: ...

    def state_pages(self, request_id: str) -> tuple[int, ...]:
        """The checkpoint that an admitted request begins with."""


def freeze(
    binding: Binding, left: tuple[int, ...], tables: BlockTableSource, decodes: DecodeBatch
) -> ExecutionPlan:
    """The plan of a bound draft; its admitted requests have rows already. The plan shares no live array with
    the draft. `left`: the rows that requests have left and the backend has not been sent."""
    draft, chunks = binding.draft, list(binding.draft.chunks.values())
    rows, positions = decodes.rows, decodes.positions()
    if binding.decode_indices is not None:
        rows = tuple(rows[i] for i in binding.decode_indices)
        positions = tuple(positions[i] for i in binding.decode_indices)
    single = [chunk for chunk in chunks if chunk.is_decode]
    return ExecutionPlan(
        step=draft.step.number,
        joined=tuple([_join(chunk, tables) for chunk in chunks if chunk.admits]),
        left=left,
        table_deltas=_table_deltas(binding, tables),
        decode_rows=(*rows, *(chunk.state.row for chunk in single)),
        decode_positions=(*positions, *(chunk.start for chunk in single)),
        prefills=tuple(
            [
                Prefill(chunk.state.row, chunk.state.request_id, chunk.start, chunk.num_tokens, chunk.samples)
                for chunk in chunks
                if not chunk.is_decode
            ]
        ),
        copies=tuple(binding.copies),
        kept_states=tuple(
            [KeptState(state.row, num_tokens, pages) for state, num_tokens, pages in binding.kept_states]
        ),
        transfers=tuple(_transfers(draft.transfers, tables)) if draft.transfers else (),
        placements=tuple(draft.placements.items()),
        preempted=tuple([state.request_id for state in draft.preempted]),
        rejected=tuple(draft.rejected.items()),
        chains=tuple(
            [Chain(state.row, ids, draft.parents.get(state, ())) for state, ids in draft.proposals.items()]
        ),
        num_draft_tokens=draft.num_draft_tokens,
        decisions=tuple(draft.decisions),
    )


def _join(chunk: Chunk, tables: BlockTableSource) -> Join:
    state = chunk.state
    params = state.request.params
    if params.prompt_logprobs is not None and state.prompt_logprobs is None:  # they have been reported
        params = replace(params, prompt_logprobs=None)
    return Join(
        state.row,
        state.request_id,
        state.tokens.tobytes(),
        state.num_prompt_tokens,
        chunk.start,
        tuple(tables.block_table(state.request_id)),
        params,
        state.request.eos_token_ids,
        tables.state_pages(state.request_id),
    )


def _table_deltas(binding: Binding, tables: BlockTableSource) -> tuple[BlockTableDelta, ...]:
    """The unsent parts of block tables: of requests in decode, then of chunks."""
    deltas = binding.table_deltas.copy()
    for chunk in binding.draft.chunks.values():
        bound = binding.chunks.get(chunk.state.request_id)
        if bound is None or chunk.admits:
            continue
        unsent = tuple(tables.block_table(chunk.state.request_id)[bound.first_block :])
        if unsent:
            deltas.append(BlockTableDelta(chunk.state.row, bound.first_block, unsent))
    return tuple(deltas)


def _transfers(transfers: Sequence[Transfer], tables: BlockTableSource) -> Iterator[Transfer]:
    """The transfers of requests that still run, each with its blocks."""
    for transfer in transfers:
        try:
            table = tables.block_table(transfer.request_id)
        except KeyError:  # preempted or finished since the transfer was planned
            continue
        yield transfer if transfer.block_ids else replace(transfer, block_ids=tuple(table))
