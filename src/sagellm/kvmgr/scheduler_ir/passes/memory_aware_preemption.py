"""The step must fit into KV memory: who cannot grow pushes out who comes last; who does not fit keeps
waiting."""

from __future__ import annotations

from sagellm.core.plan import Draft, RequestState
from sagellm.core.protocols.scheduler_ir import ALWAYS_STABLE, BlockBudget, SchedulingView, Stability
from sagellm.kvmgr.scheduler_ir._queue import hit_of
from sagellm.kvmgr.scheduler_ir._victims import VICTIMS, choose_victim

SWAPS = ("cost", "always", "never")


class MemoryAwarePreemptionPass:
    """Preemption of who comes later in `draft.running`; admission in order, nobody overtakes.

    `victims` says who of those behind leaves, of the lowest priority among them (see `_victims.py`): `last`,
    `newest`, `most_blocks`, `cheapest`. `swap` says whose KV is saved in host memory, where the backend has
    room for it: by `cost`, where copying it there and back takes less time than computing it again; `always`;
    `never`. That holds for those too whom a pass before this one preempts.

    A waiting request is admitted when its whole prompt fits and, while others run, `watermark` blocks for
    each of them are left, so that it does not push out at once what it joined. A step that preempts admits
    nobody.
    """

    name = "memory_aware_preemption"

    def __init__(self, watermark: int = 1, victims: str = "last", swap: str = "cost") -> None:
        if type(watermark) is not int or watermark < 0:
            raise ValueError(f"watermark is a number of blocks, 0 or more, got {watermark!r}")
        for name, value, known in (("victims", victims, tuple(VICTIMS)), ("swap", swap, SWAPS)):
            if value not in known:
                raise ValueError(f"{name} is one of {', '.join(known)}, got {value!r}")
        self.watermark, self.victims, self.swap = watermark, victims, swap

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        budget = view.kv.budget()
        for state in draft.preempted:  # by a pass before this one
            budget.gain(state, view.kv.blocks_freed_by_preempting(state))
        admits = any(chunk.admits for chunk in draft.chunks.values())
        growing = draft.needing_block()
        chunks = [chunk for chunk in draft.chunks.values() if not chunk.admits]
        price = len(growing) + sum(
            view.kv.blocks_to_append(chunk.state, chunk.num_tokens) for chunk in chunks
        )
        if not budget.spend_together(price):
            needs = {state.request_id: 1 for state in growing}
            needs |= {
                one.state.request_id: view.kv.blocks_to_append(one.state, one.num_tokens) for one in chunks
            }
            self._fit_running(draft, view, budget, needs)
        if draft.preempted and self.swap != "never":
            self._save(draft, view)
        if admits:
            self._fit_admitted(draft, view, budget)

    def stable_until(self, draft: Draft, view: SchedulingView) -> Stability | None:
        """While the first that could be admitted does not fit: what it needs beyond blocks that others hold
        cannot fall while all decode, and what is available cannot rise. Nobody overtakes it where no ceilings
        tell accounts apart."""
        if not draft.waiting:
            return ALWAYS_STABLE
        head, budget = draft.waiting[0], view.kv.budget()
        hit = hit_of(draft, view, head)
        price = view.kv.blocks_to_admit(hit, len(head.tokens) - hit.num_tokens)
        has_ceilings = budget.is_capped(head, view.kv.num_blocks + 1)
        fits = price + self.watermark * len(draft.running) <= budget.available
        return None if fits or has_ceilings else ALWAYS_STABLE

    def _fit_running(
        self, draft: Draft, view: SchedulingView, budget: BlockBudget, needs: dict[str, int]
    ) -> None:
        """Walk from the first to the last, preempting those behind."""
        keepers = [state for state in draft.running if state not in draft.preempted]
        for state in list(keepers):
            if state.request_id not in needs or not draft.computes(state):
                continue
            price = needs[state.request_id]
            while not budget.spend(state, price):
                rivals = budget.competitors(state, price, keepers)
                victim = choose_victim(self.victims, rivals, state, view.kv)
                if victim is None:
                    self._give_up(draft, state, price, budget.left(state), keepers)
                    break
                keepers.remove(victim)
                self._preempt(draft, victim, state)
                budget.gain(victim, view.kv.blocks_freed_by_preempting(victim))

    def _preempt(self, draft: Draft, victim: RequestState, winner: RequestState) -> None:
        draft.preempt(victim)
        draft.record(self.name, victim, "preempt", f"{winner.request_id} comes first and needs its blocks")

    def _save(self, draft: Draft, view: SchedulingView) -> None:
        """Have what the preempted have computed saved, where there is room for it and it pays."""
        num_taken = 0
        for state in draft.preempted:
            price = view.kv.resume_cost(state)
            price = price._replace(num_free=price.num_free - num_taken)
            if state.request_id in draft.swapped or not price.fits:
                continue
            if self.swap == "cost" and 0 < price.recompute_s < price.swap_s:
                continue
            num_taken += price.num_host_blocks
            draft.swapped.append(state.request_id)
            cost = f"{price.swap_s * 1e3:.3g} ms to copy, {price.recompute_s * 1e3:.3g} ms to compute again"
            draft.record(self.name, state, "swap", f"{price.num_host_blocks} blocks to host memory: {cost}")

    def _give_up(
        self, draft: Draft, state: RequestState, price: int, left: int, keepers: list[RequestState]
    ) -> None:
        """A request that is alone and does not fit can never go on; any other goes on when blocks come back.

        Those below other ceilings may use blocks that count on its own, by a prefix that they share: they end
        before it, or leave, the last first, where it is the first."""
        reason = f"it needs {price} blocks, {left} are available"
        if not draft.preempted:
            if len(keepers) == 1:
                self._reject(draft, state, reason)
                return
            if keepers[0] is state:
                self._preempt(draft, keepers.pop(), state)
        draft.hold(state)
        draft.record(self.name, state, "hold", reason)

    def _reject(self, draft: Draft, state: RequestState, reason: str) -> None:
        draft.reject(state, f"out of KV memory: {reason}")
        draft.record(self.name, state, "reject", reason)

    def _fit_admitted(self, draft: Draft, view: SchedulingView, budget: BlockBudget) -> None:
        """Admit in order. A request that would not fit even alone is refused: nothing that it waits for can
        come."""
        holders = [state for state in draft.running if state not in draft.preempted]
        closed = "the step preempts" if draft.preempted else ""
        for chunk in list(draft.admitted()):
            assert chunk.hit is not None
            state = chunk.state
            price = view.kv.blocks_to_admit(chunk.hit, len(state.tokens) - chunk.start)
            capped, kept = budget.is_capped(state, price), self.watermark * len(holders)
            fits = not capped and price + kept <= budget.available
            if fits and not closed:
                budget.spend(state, price)
                holders.append(state)
                continue
            reason = self._why(price, budget.left(state), kept)
            if not fits and not draft.preempted and not holders:
                self._reject(draft, state, reason)
                continue
            del draft.chunks[state.request_id]
            draft.record(self.name, state, "wait", closed or reason)
            if not capped and not closed:
                closed = f"{state.request_id} comes first and waits for memory"

    def _why(self, price: int, left: int, kept: int) -> str:
        """The watermark is named where it alone is in the way."""
        needs = f"its prompt needs {price} blocks, {left} are available"
        return f"{needs}, and {kept} must be left for those that run" if price <= left else needs


PLUGIN = MemoryAwarePreemptionPass
