"""The step must fit into KV memory: who cannot grow pushes out who comes last; who does not fit keeps
waiting."""

from __future__ import annotations

from sagellm.core.plan import Chunk, Draft, RequestState
from sagellm.core.protocols.scheduler_ir import SchedulingView


class MemoryAwarePreemptionPass:
    """Preemption by recompute, last in `draft.running` first; admission in order, nobody overtakes.

    A waiting request is admitted when its whole prompt fits and, while others run, `watermark` blocks for
    each of them are left, so that it does not push out at once what it joined. A step that preempts admits
    nobody.
    """

    name = "memory_aware_preemption"

    def __init__(self, watermark: int = 1) -> None:
        self.watermark = watermark

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        available = self._fit_running(draft, view, view.kv.available_blocks())
        self._fit_admitted(draft, view, available)

    def _fit_running(self, draft: Draft, view: SchedulingView, available: int) -> int:
        """Walk from the first to the last, preempting from the end; returns the blocks that are left."""
        keepers = list(draft.running)
        for state in draft.running:
            chunk = draft.chunks.get(state.request_id)
            if chunk is None:  # out of token budget, or preempted for an earlier one
                continue
            price = view.kv.price_to_grow(state, chunk.num_tokens)
            while price > available and keepers[-1] is not state:
                available += self._preempt(draft, view, keepers.pop(), state)
            if price > available:
                self._hold(draft, chunk, price, available, alone=not draft.preempted and len(keepers) == 1)
            else:
                available -= price
        return available

    def _preempt(self, draft: Draft, view: SchedulingView, victim: RequestState, winner: RequestState) -> int:
        draft.preempt(victim)
        draft.say(self.name, victim, "preempt", f"{winner.request_id} comes first and needs its blocks")
        return view.kv.gain_of_preempting(victim)

    def _hold(self, draft: Draft, chunk: Chunk, price: int, available: int, *, alone: bool) -> None:
        """Who is alone and does not fit can never go on; anybody else goes on when blocks come back."""
        del draft.chunks[chunk.state.request_id]
        reason = f"it needs {price} blocks, {available} are available"
        if alone:
            draft.rejected[chunk.state.request_id] = f"out of KV memory: {reason}"
        draft.say(self.name, chunk.state, "reject" if alone else "hold", reason)

    def _fit_admitted(self, draft: Draft, view: SchedulingView, available: int) -> None:
        running = len(draft.running) - len(draft.preempted)
        closed = "the step preempts" if draft.preempted else ""
        for chunk in list(draft.admitted()):
            assert chunk.hit is not None
            price = view.kv.price_to_admit(chunk.hit, len(chunk.state.tokens) - chunk.start)
            if not closed and price + self.watermark * running > available:
                closed = f"its prompt needs {price} blocks, {available} are available"
            if closed:
                del draft.chunks[chunk.state.request_id]
                draft.say(self.name, chunk.state, "wait", closed)
                continue
            available -= price
            running += 1


PLUGIN = MemoryAwarePreemptionPass
