"""Makes the step fit into KV memory: preempts running requests, declines waiting ones.

Preempting the last of the batch (`victims="last"`) is vLLM's rule (Kwon et al., 2023). The other rules trade
its fairness for something: `newest` loses the least time waited, `most_blocks` preempts the fewest requests,
`cheapest` costs the least to resume.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sagellm.core.plan import Draft, RequestState
from sagellm.core.protocols.scheduler_ir import (
    ALWAYS_STABLE,
    BlockBudget,
    KVQuotes,
    SchedulingView,
    Stability,
)
from sagellm.kvmgr.scheduler_ir._queue import prefix_hit


class MemoryAwarePreemptionPass:
    """Preempts later requests of `draft.running` for earlier ones; admits in order, without overtaking.

    `victims` names the rule that chooses which of the later requests is preempted, among those of the lowest
    priority: `last`, `newest`, `most_blocks` or `cheapest`.

    A waiting request is admitted if its whole prompt fits and, while others run, leaves `watermark` blocks
    for each of them, so that it does not cause a preemption at once. A step that preempts admits none.
    """

    name = "memory_aware_preemption"

    def __init__(self, watermark: int = 1, victims: str = "last") -> None:
        if type(watermark) is not int or watermark < 0:
            raise ValueError(f"watermark is a number of blocks, 0 or more, got {watermark!r}")
        if victims not in tuple(VICTIMS):
            raise ValueError(f"victims is one of {', '.join(VICTIMS)}, got {victims!r}")
        self.watermark, self.victims = watermark, victims

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        block_budget = view.kv.block_budget()
        for state in draft.preempted:  # by an earlier pass
            block_budget.gain(state, view.kv.blocks_freed_by_preempting(state))
        admits = any(chunk.admits for chunk in draft.chunks.values())
        decodes = draft.needing_block()
        chunks = [chunk for chunk in draft.chunks.values() if not chunk.admits]
        prices = {
            chunk.state.request_id: view.kv.blocks_to_append(chunk.state, chunk.num_tokens)
            for chunk in chunks
        }
        if not block_budget.spend_together(len(decodes) + sum(prices.values())):
            prices |= dict.fromkeys((state.request_id for state in decodes), 1)
            self._fit_running(draft, view, block_budget, prices)
        if admits:
            self._fit_admitted(draft, view, block_budget)

    def stable_until(self, draft: Draft, view: SchedulingView) -> Stability | None:
        """Stable while the first request that could be admitted does not fit. While all running requests
        decode, its price cannot fall and the available blocks cannot rise. No other request overtakes it,
        unless quotas give accounts ceilings of their own."""
        if not draft.waiting:
            return ALWAYS_STABLE
        head, block_budget = draft.waiting[0], view.kv.block_budget()
        hit = prefix_hit(draft, view, head)
        price = view.kv.blocks_to_admit(hit, len(head.tokens) - hit.num_tokens)
        has_ceilings = block_budget.is_capped(head, view.kv.num_blocks + 1)
        fits = price + self.watermark * len(draft.running) <= block_budget.available
        return None if fits or has_ceilings else ALWAYS_STABLE

    # -- running requests

    def _fit_running(
        self, draft: Draft, view: SchedulingView, block_budget: BlockBudget, prices: dict[str, int]
    ) -> None:
        """Pay for each request in order, preempting later ones where blocks are short."""
        kept = [state for state in draft.running if state not in draft.preempted]
        for state in list(kept):
            if state.request_id not in prices or not draft.computes(state):
                continue
            price = prices[state.request_id]
            while not block_budget.spend(state, price):
                rivals = block_budget.competitors(state, price, kept)
                victim = choose_victim(self.victims, rivals, state, view.kv)
                if victim is None:
                    self._hold(draft, state, price, block_budget.left(state), kept)
                    break
                kept.remove(victim)
                self._preempt(draft, victim, state)
                block_budget.gain(victim, view.kv.blocks_freed_by_preempting(victim))

    def _preempt(self, draft: Draft, victim: RequestState, winner: RequestState) -> None:
        draft.preempt(victim)
        draft.record(self.name, victim, "preempt", f"{winner.request_id} comes first and needs its blocks")

    def _hold(
        self, draft: Draft, state: RequestState, price: int, left: int, kept: list[RequestState]
    ) -> None:
        """Hold a request that found no victim. Reject it if it runs alone. Requests below other quota
        ceilings may use blocks that count on its own, by a shared prefix. They finish first; but if it is the
        first of the batch, the last one is preempted so that it can go on."""
        reason = f"it needs {price} blocks, {left} are available"
        if not draft.preempted:
            if len(kept) == 1:
                self._reject(draft, state, reason)
                return
            if kept[0] is state:
                self._preempt(draft, kept.pop(), state)
        draft.hold(state)
        draft.record(self.name, state, "hold", reason)

    def _reject(self, draft: Draft, state: RequestState, reason: str) -> None:
        draft.reject(state, f"out of KV memory: {reason}")
        draft.record(self.name, state, "reject", reason)

    # -- admitted requests

    def _fit_admitted(self, draft: Draft, view: SchedulingView, block_budget: BlockBudget) -> None:
        """Admit in order until one does not fit. A request that would not fit even alone is rejected."""
        running = [state for state in draft.running if state not in draft.preempted]
        closed = "the step preempts" if draft.preempted else ""
        for chunk in list(draft.admitted()):
            assert chunk.hit is not None
            state = chunk.state
            price = view.kv.blocks_to_admit(chunk.hit, len(state.tokens) - chunk.start)
            capped, reserved = block_budget.is_capped(state, price), self.watermark * len(running)
            fits = not capped and price + reserved <= block_budget.available
            if fits and not closed:
                block_budget.spend(state, price)
                running.append(state)
                continue
            left = block_budget.left(state)
            reason = f"its prompt needs {price} blocks, {left} are available"
            if price <= left:  # the watermark alone is in the way
                reason += f", and {reserved} must be left for those that run"
            if not fits and not draft.preempted and not running:
                self._reject(draft, state, reason)
                continue
            del draft.chunks[state.request_id]  # declined: it waits for a later step
            draft.record(self.name, state, "wait", closed or reason)
            if not capped and not closed:
                closed = f"{state.request_id} comes first and waits for memory"


# -- victims

VictimRule = Callable[[Sequence[RequestState], KVQuotes], RequestState]
"""Chooses one of at least one candidate. Candidates are in batch order."""


def _cheapest(candidates: Sequence[RequestState], kv: KVQuotes) -> RequestState:
    """Least time to resume per released block; fewest computed tokens where times are unknown."""

    def price(state: RequestState) -> tuple[float, int]:
        num_blocks = kv.blocks_freed_by_preempting(state)
        return (kv.resume_s(state) / num_blocks if num_blocks else float("inf"), state.num_computed)

    return min(reversed(candidates), key=price)


VICTIMS: Mapping[str, VictimRule] = {
    "last": lambda candidates, kv: candidates[-1],
    "newest": lambda candidates, kv: max(reversed(candidates), key=lambda state: state.request.arrival_s),
    "most_blocks": lambda candidates, kv: max(reversed(candidates), key=kv.blocks_freed_by_preempting),
    "cheapest": _cheapest,
}


def choose_victim(
    rule: str, rivals: Sequence[RequestState], winner: RequestState, kv: KVQuotes
) -> RequestState | None:
    """One of the rivals behind the winner and of their lowest priority, or None."""
    behind = rivals[rivals.index(winner) + 1 :] if rule != "last" else rivals[-1:]
    if not behind or behind[-1] is winner:
        return None
    if rule != "last":
        lowest = min(state.request.priority for state in behind)
        behind = [state for state in behind if state.request.priority == lowest]
    return VICTIMS[rule](behind, kv)


PLUGIN = MemoryAwarePreemptionPass
