"""Steps that compute the middle of one long prompt beside those that decode, for simulations: each fills the
token budget, so nobody can be admitted, and is taken without the passes."""

from __future__ import annotations

from collections.abc import Sequence

from sagellm.core.clock import Clock
from sagellm.core.plan import Chunk, Draft, ExecutionPlan, Prefill, RequestState
from sagellm.engines._leap import Leap, LeapingBackend
from sagellm.engines._request_table import RequestTable
from sagellm.kvmgr.manager import KVCacheManager
from sagellm.kvmgr.scheduler_ir.quiet import Stability


class _Growing:
    """Implements `Decodes` for a bind: who decodes, and who needs a block in that step."""

    def __init__(self, states: Sequence[RequestState], growing: Sequence[RequestState]) -> None:
        self.states = states
        self._growing = growing

    def __len__(self) -> int:
        return len(self.states)

    @property
    def num_needing_block(self) -> int:
        return len(self._growing)

    def needing_block(self) -> Sequence[RequestState]:
        return self._growing


def leap_prompt(
    backend: LeapingBackend,
    kv: KVCacheManager,
    roster: RequestTable,
    clock: Clock,
    first_step: int,
    until_s: float,
    quiet: Stability,
    chunk: Chunk,
) -> Leap | None:
    """Steps that begin before `until_s` and while the passes are `quiet`, each with a chunk as long as the
    first: up to the one that ends the prompt or any other request, or before memory is short."""
    batch, state, size = roster.decodes, chunk.state, chunk.num_tokens
    until_s, version = min(until_s, quiet.until_s), kv.version
    most = min(batch.num_regular, (state.num_uncomputed - 1) // size)
    borders, positions = batch.borders(max(0, most)), batch.positions()
    moments_s, prefills = [clock.now()], []
    for number in range(most):
        has_changed = not kv.is_regular or (quiet.same_cache and kv.version != version)
        growing = [batch.states[place] for place in borders.get(number, ())]
        price = len(growing) + kv.blocks_to_append(state, size)
        if clock.now() >= until_s or has_changed or price > kv.available_blocks() or kv.quota is not None:
            break
        prefill = Prefill(state.row, state.request_id, state.num_computed, size, samples=False)
        draft = Draft(first_step + number, clock.now(), 0, [], [], decodes=_Growing(batch.states, growing))
        draft.chunks[state.request_id] = Chunk(state, state.num_computed, size)
        kv.bind(draft)
        now = tuple([position + number for position in positions])
        backend.execute(
            ExecutionPlan(draft.step, decode_rows=batch.rows, decode_positions=now, prefills=(prefill,))
        )
        kv.executed(draft)
        state.num_computed += size
        kv.commit(state)
        moments_s.append(clock.now())
        prefills.append(prefill)
    if not prefills:
        return None
    batch.repeat(backend.repeated(batch.rows), len(prefills))
    return Leap(first_step, len(batch), len(roster.waiting), moments_s, (), prefills)
