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
        for state in draft.preempted:  # by a pass before this one
            budget.gain(state, view.kv.gain_of_preempting(state))
        self._fit_running(draft, view, budget)
        self._fit_admitted(draft, view, budget)

    def _fit_running(self, draft: Draft, view: SchedulingView, budget: BlockBudget) -> None:
        """Walk from the first to the last, preempting from the end."""
        keepers = [state for state in draft.running if state not in draft.preempted]
        for state in list(keepers):
            chunk = draft.chunks.get(state.request_id)
            if chunk is None:  # out of token budget, or preempted for an earlier one
                continue
            price = view.kv.price_to_grow(state, chunk.num_tokens)
            while not budget.spend(state, price):
                capped = budget.is_capped(state, price)
                account = state.request.account
                rivals = [one for one in keepers if not capped or one.request.account == account]
                if rivals[-1] is state:
                    alone = not draft.preempted and len(rivals) == 1
                    self._hold(draft, chunk, price, budget.left(state), alone=alone)
                    break
                keepers.remove(rivals[-1])
                self._preempt(draft, rivals[-1], state)
                budget.gain(rivals[-1], view.kv.gain_of_preempting(rivals[-1]))

    def _preempt(self, draft: Draft, victim: RequestState, winner: RequestState) -> None:
        draft.preempt(victim)
        draft.say(self.name, victim, "preempt", f"{winner.request_id} comes first and needs its blocks")

    def _hold(self, draft: Draft, chunk: Chunk, price: int, left: int, *, alone: bool) -> None:
        """Who is alone (in its account, where its ceiling is in the way) and does not fit can never go on;
        anybody else goes on when blocks come back."""
        reason = f"it needs {price} blocks, {left} are available"
        if alone:
            self._reject(draft, chunk, reason)
            return
        del draft.chunks[chunk.state.request_id]
        draft.say(self.name, chunk.state, "hold", reason)

    def _reject(self, draft: Draft, chunk: Chunk, reason: str) -> None:
        del draft.chunks[chunk.state.request_id]
        draft.rejected[chunk.state.request_id] = f"out of KV memory: {reason}"
        draft.say(self.name, chunk.state, "reject", reason)

    def _fit_admitted(self, draft: Draft, view: SchedulingView, budget: BlockBudget) -> None:
        """Admit in order. Whoever would not fit even alone is refused: nothing that it waits for can come."""
        accounts = [s.request.account for s in draft.running if s not in draft.preempted]
        closed = "the step preempts" if draft.preempted else ""
        for chunk in list(draft.admitted()):
            assert chunk.hit is not None
            state = chunk.state
            price = view.kv.price_to_admit(chunk.hit, len(state.tokens) - chunk.start)
            reason = f"its prompt needs {price} blocks, {budget.left(state)} are available"
            capped = budget.is_capped(state, price)
            if closed:
                reason = closed
            elif not capped and price + self.watermark * len(accounts) > budget.available:
                closed = reason
            elif not capped:
                budget.spend(state, price)
                accounts.append(state.request.account)
                continue
            if not draft.preempted and not (accounts if not capped else state.request.account in accounts):
                self._reject(draft, chunk, reason)
                closed = ""
                continue
            del draft.chunks[state.request_id]
            draft.say(self.name, state, "wait", reason)


PLUGIN = MemoryAwarePreemptionPass
