"""The verifier: what must hold of a draft, before the passes, after them, and once blocks are bound."""

from __future__ import annotations

from sagellm.core.errors import PlanError
from sagellm.core.plan import Chunk, Draft
from sagellm.core.protocols.scheduler_ir import SchedulingView
from sagellm.core.types import RequestStatus


def verify(draft: Draft, view: SchedulingView, *, scheduled: bool = True) -> None:
    """Raise `PlanError` naming the first operation that is wrong. Budgets must hold once the passes have
    run."""
    _check_one_fate_each(draft)
    for request_id, chunk in draft.chunks.items():
        _check_chunk(request_id, chunk)
    if scheduled:
        _check_bound(draft)
        _check_budgets(draft, view)


def _check_one_fate_each(draft: Draft) -> None:
    fates: dict[str, str] = {}
    scheduled = [(request_id, "scheduled") for request_id in draft.chunks]
    preempted = [(state.request_id, "preempted") for state in draft.preempted]
    rejected = [(request_id, "rejected") for request_id in draft.rejected]
    for request_id, fate in scheduled + preempted + rejected:
        if request_id in fates:
            raise PlanError(f"{request_id} is both {fates[request_id]} and {fate}")
        fates[request_id] = fate
    for state in draft.preempted:
        if state.status is not RequestStatus.RUNNING:
            raise PlanError(f"preempt {state.request_id}: it is {state.status.value}, not running")
    for request_id in draft.swapped:
        if fates.get(request_id) != "preempted":
            raise PlanError(f"swap {request_id}: only who is preempted is saved, it is not")
    for request_id, state in draft.skipped_decodes.items():
        if not state.decoding or state.request_id != request_id:
            raise PlanError(f"{request_id} is left out of decode, and {state.request_id} is not in it")


def _check_chunk(request_id: str, chunk: Chunk) -> None:
    state, hit, end = chunk.state, chunk.hit, chunk.start + chunk.num_tokens
    if state.request.request_id != request_id:
        raise PlanError(f"chunk of {state.request_id} stands under the name of {request_id}")
    if chunk.num_tokens < 1:
        raise PlanError(f"{request_id}: a chunk of {chunk.num_tokens} tokens")
    if end > len(state.tokens):
        raise PlanError(f"{request_id}: chunk ends at {end}, the request has {len(state.tokens)} tokens")
    if state.decoding:
        raise PlanError(f"{request_id} is in decode, which computes its token: it takes no chunk")
    expected = RequestStatus.RUNNING if hit is None else RequestStatus.WAITING
    if state.status is not expected:
        raise PlanError(
            f"{request_id}: chunk of a request that is {state.status.value}, expected {expected.value}"
        )
    start = state.num_computed if hit is None else hit.num_tokens
    if chunk.start != start:
        raise PlanError(f"{request_id}: chunk starts at {chunk.start}, computed or cached are {start} tokens")


def _check_bound(draft: Draft) -> None:
    """What was bound early is as it was."""
    for request_id, chunk in draft.bound.items():
        if draft.chunks.get(request_id) is not chunk:
            raise PlanError(f"{request_id} has the blocks of its chunk: no pass can take the chunk back")
    stretched = draft.appended
    for state, block in zip(stretched.states, stretched.block_ids, strict=True):
        if not draft.computes(state):
            raise PlanError(f"{state.request_id} has block {block} for its token: no pass can leave it out")


def _check_budgets(draft: Draft, view: SchedulingView) -> None:
    if draft.num_tokens > draft.token_budget:
        raise PlanError(f"{draft.num_tokens} tokens in the step, the budget is {draft.token_budget}")
    admitted = sum(1 for _ in draft.admitted())
    rows = view.num_free_rows + len(draft.preempted)
    if admitted > rows:
        raise PlanError(f"{admitted} requests admitted, {rows} rows are free")
    price = 0 if draft.decodes_bound else len(draft.needing_block())
    price += sum(_price(one, view) for name, one in draft.chunks.items() if name not in draft.bound)
    funds = view.kv.available_blocks() + sum(
        view.kv.blocks_freed_by_preempting(state) for state in draft.preempted
    )
    if price > funds:
        raise PlanError(f"the step needs {price} blocks, {funds} are available")


def _price(chunk: Chunk, view: SchedulingView) -> int:
    if chunk.hit is not None:
        return view.kv.blocks_to_admit(chunk.hit, chunk.num_tokens)
    return view.kv.blocks_to_append(chunk.state, chunk.num_tokens)


def verify_bound(draft: Draft) -> None:
    """Raise `PlanError` if a block is given to two requests of the step."""
    stretched = draft.appended
    blocks = stretched.block_ids.copy()
    for chunk in draft.chunks.values():
        blocks += chunk.block_ids
    if len(set(blocks)) == len(blocks):
        return
    names = [state.request_id for state in stretched.states]
    given = list(zip(stretched.block_ids, names, strict=True))
    given += [(block, name) for name, chunk in draft.chunks.items() for block in chunk.block_ids]
    owner: dict[int, str] = {}
    for block, request_id in given:
        if block in owner:
            raise PlanError(f"block {block} is given to {owner[block]} and to {request_id}")
        owner[block] = request_id
