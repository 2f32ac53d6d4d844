"""The step must fit into KV memory: who cannot grow pushes out who comes last; who does not fit keeps
waiting."""

from __future__ import annotations

from sagellm.core.plan import Chunk, Draft, RequestState
from sagellm.core.protocols.scheduler_ir import BlockBudget, SchedulingView


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
        budget = view.kv.budget()
        self._fit_running(draft, view, budget)
        self._fit_admitted(draft, view, budget)

    def _fit_running(self, draft: Draft, view: SchedulingView, budget: BlockBudget) -> None:
        """Walk from the first to the last, preempting from the end."""
        keepers = list(draft.running)
        for state in draft.running:
            chunk = draft.chunks.get(state.request_id)
            if chunk is None:  # out of token budget, or preempted for an earlier one
                continue
            price = view.kv.price_to_grow(state, chunk.num_tokens)
            while not budget.spend(state, price):
                over_quota = budget.over_quota(state, price)
                rivals = [s for s in keepers if not over_quota or s.request.account == state.request.account]
                victim = rivals[-1]
                if victim is state:
                    alone = not draft.preempted and len(rivals) == 1
                    self._hold(draft, chunk, price, budget.left(state), alone=alone)
                    break
                keepers.remove(victim)
                draft.preempt(victim)
                draft.say(
                    self.name, victim, "preempt", f"{state.request_id} comes first and needs its blocks"
                )
                budget.gain(victim, view.kv.gain_of_preempting(victim))

    def _hold(self, draft: Draft, chunk: Chunk, price: int, left: int, *, alone: bool) -> None:
        """Who is alone (in its account, where a quota is in the way) and does not fit can never go on;
        anybody else goes on when blocks come back."""
        del draft.chunks[chunk.state.request_id]
        reason = f"it needs {price} blocks, {left} are available"
        if alone:
            draft.rejected[chunk.state.request_id] = f"out of KV memory: {reason}"
        draft.say(self.name, chunk.state, "reject" if alone else "hold", reason)

    def _fit_admitted(self, draft: Draft, view: SchedulingView, budget: BlockBudget) -> None:
        running = len(draft.running) - len(draft.preempted)
        closed = "the step preempts" if draft.preempted else ""
        for chunk in list(draft.admitted()):
            assert chunk.hit is not None
            state = chunk.state
            price = view.kv.price_to_admit(chunk.hit, len(state.tokens) - chunk.start)
            if not closed and price + self.watermark * running > budget.available:
                closed = f"its prompt needs {price} blocks, {budget.available} are available"
            reason = closed or ("" if budget.spend(state, price) else self._over_quota(state, price, budget))
            if reason:
                del draft.chunks[state.request_id]
                draft.say(self.name, state, "wait", reason)
                continue
            running += 1

    def _over_quota(self, state: RequestState, price: int, budget: BlockBudget) -> str:
        return f"its prompt needs {price} blocks, the quota of its account leaves {budget.left(state)}"


PLUGIN = MemoryAwarePreemptionPass
