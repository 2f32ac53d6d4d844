"""The verifier: rules of a draft before the passes, after them, and once bound."""

from __future__ import annotations

from collections.abc import Callable

from sagellm.core.binding import Binding
from sagellm.core.errors import PlanError
from sagellm.core.plan import Chunk, Draft
from sagellm.core.protocols.scheduler_ir import SchedulingView
from sagellm.core.token_trees import check_tree
from sagellm.core.types import RequestStatus


def verify_operations(draft: Draft) -> None:
    """Raise `PlanError` naming the first operation of the draft that is wrong."""
    _check_one_outcome_each(draft)
    for request_id, chunk in draft.chunks.items():
        _check_chunk(request_id, chunk)


def verify(draft: Draft, view: SchedulingView, binding: Binding | None = None) -> None:
    """Raise `PlanError` unless the draft that the passes leave keeps all rules. `binding`: the draft's, where
    passes may have had blocks bound early."""
    verify_operations(draft)
    if binding is not None:
        _check_bound(draft, binding)
    _check_budgets(draft, view, binding)


def verify_bound(binding: Binding) -> None:
    """Raise `PlanError` if a block is given to two requests of the step."""
    blocks = binding.appended_ids.copy()
    for bound in binding.chunks.values():
        blocks += bound.block_ids
    if len(set(blocks)) == len(blocks):
        return
    each = len(binding.appended_ids) // max(1, len(binding.appended_to))
    names = [state.request_id for state in binding.appended_to for _ in range(each)]
    given = list(zip(binding.appended_ids, names, strict=True))
    given += [(block, name) for name, bound in binding.chunks.items() for block in bound.block_ids]
    owner: dict[int, str] = {}
    for block, request_id in given:
        if block in owner:
            raise PlanError(f"block {block} is given to {owner[block]} and to {request_id}")
        owner[block] = request_id


def verify_proposals(draft: Draft, vocab_size: int, num_slots: Callable[[str], int]) -> None:
    """Raise `PlanError` for proposed tokens that no row can compute.

    `num_slots`: tokens that the blocks of a request hold.
    """
    for state, token_ids in draft.proposals.items():
        name, end = state.request_id, state.num_computed + 1 + len(token_ids)
        if not state.decoding or not draft.computes(state):
            raise PlanError(f"{name} has proposed tokens and does not decode in this step")
        if not token_ids or min(token_ids) < 0 or max(token_ids) >= vocab_size:
            raise PlanError(f"{name} has proposed tokens {token_ids}; tokens are 0 to {vocab_size - 1}")
        try:
            check_tree(token_ids, draft.parents.get(state, ()))
        except ValueError as error:
            raise PlanError(f"{name} has proposed tokens that are no tree: {error}") from error
        if end > num_slots(name):
            raise PlanError(f"{name} computes up to token {end}, its blocks hold {num_slots(name)}")
    if draft.num_tokens > draft.token_budget:
        raise PlanError(f"{draft.num_tokens} tokens in the step, the budget is {draft.token_budget}")


def _check_one_outcome_each(draft: Draft) -> None:
    outcomes: dict[str, str] = {}
    scheduled = [(request_id, "scheduled") for request_id in draft.chunks]
    preempted = [(state.request_id, "preempted") for state in draft.preempted]
    rejected = [(request_id, "rejected") for request_id in draft.rejected]
    for request_id, outcome in scheduled + preempted + rejected:
        if request_id in outcomes:
            raise PlanError(f"{request_id} is both {outcomes[request_id]} and {outcome}")
        outcomes[request_id] = outcome
    for state in draft.preempted:
        if state.status is not RequestStatus.RUNNING:
            raise PlanError(f"preempt {state.request_id}: it is {state.status.value}, not running")
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


def _check_bound(draft: Draft, binding: Binding) -> None:
    """What was bound early must still be in the draft."""
    for request_id, bound in binding.chunks.items():
        if draft.chunks.get(request_id) is not bound.chunk:
            raise PlanError(f"{request_id} has the blocks of its chunk: no pass can take the chunk back")
    for state in binding.appended_to:
        if not draft.computes(state):
            raise PlanError(f"{state.request_id} has a block for its token: no pass can leave it out")


def _check_budgets(draft: Draft, view: SchedulingView, binding: Binding | None) -> None:
    if draft.num_tokens > draft.token_budget:
        raise PlanError(f"{draft.num_tokens} tokens in the step, the budget is {draft.token_budget}")
    admitted = sum(1 for _ in draft.admitted())
    rows = view.num_free_rows + len(draft.preempted)
    if admitted > rows:
        raise PlanError(f"{admitted} requests admitted, {rows} rows are free")
    kv, price = view.kv, 0
    if binding is None or not binding.decodes_bound:
        price = len(draft.needing_block())
    for request_id, chunk in draft.chunks.items():
        if binding is not None and request_id in binding.chunks:
            continue
        if chunk.hit is None:
            price += kv.blocks_to_append(chunk.state, chunk.num_tokens)
        else:
            price += kv.blocks_to_admit(chunk.hit, chunk.num_tokens)
    funds = kv.available_blocks() + sum(map(kv.blocks_freed_by_preempting, draft.preempted))
    if price > funds:
        raise PlanError(f"the step needs {price} blocks, {funds} are available")
