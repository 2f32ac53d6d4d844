"""Fair shares of the engine for tenants: who had least, by weight, goes first; among those who are about
equal, who has most of its prompt in the cache.

Virtual token counters are Sheng et al.'s (2024). That a tenant may be ahead by a quantum, so that requests
that share prefixes come together, is after the deficit longest-prefix-match of Cao et al. (2025).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from heapq import heapify, heappop, heappush

from sagellm.core.plan import Draft, RequestState
from sagellm.core.protocols.scheduler_ir import ALWAYS_STABLE, SchedulingView, Stability
from sagellm.core.types import RequestStatus
from sagellm.kvmgr.scheduler_ir._queue import ROOM_TO_FORGET, RankedQueue, has_run, hit_of, num_to_compute

RIVALS = 8
"""Tenants within a quantum of the least, at most, whose cached tokens are compared."""
MAX_IDLE = 4096
"""Counters of tenants that do nothing which are kept."""


class FairnessPass:
    """Orders the waiting so that each tenant gets tokens in proportion to its weight (1 where `weights` names
    none); a tenant's own requests keep their order.

    A token of a prompt that has to be computed costs 1, one that is generated `output_cost`. A tenant that
    comes back begins at the least counter of those that wait: idle time saves nothing up. With `quantum` (in
    tokens), tenants whose counters are that close are told apart by cached tokens; 0: by counter alone. The
    front of the queue is ordered, as far as a step can admit; what is behind it comes in steps after it.
    """

    name = "fairness"

    def __init__(
        self, weights: Mapping[str, float] | None = None, quantum: float = 4096.0, output_cost: float = 2.0
    ) -> None:
        self.weights = dict(weights or {})
        wrong = [name for name, weight in self.weights.items() if weight <= 0]
        if wrong:
            raise ValueError(f"the weight of tenant {wrong[0]!r} must be positive")
        self.quantum, self.output_cost = quantum, output_cost
        self.counters: dict[str, float] = {}
        self._queue = RankedQueue()
        self._waiting: Counter[str] = Counter()
        self._charged: dict[RequestState, int] = {}
        self._last = ""
        self._num_kept = 0

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        waiting, queue = draft.waiting, self._queue
        if not waiting and not queue.ranks:
            return
        if queue.see(waiting):
            self._note(draft, view)
            self._forget_ended()
        if len(self._waiting) < 2 or not view.num_free_rows or len(waiting) < 2:
            return
        self._settle()
        self._order(draft, view)

    def stable_until(self, draft: Draft, view: SchedulingView) -> Stability | None:
        """Where one tenant alone waits; else counters grow with every token, and the order with them."""
        if not self._queue.knows(draft.waiting):
            return None
        alone = len(self._waiting) < 2 or len(draft.waiting) < 2 or not view.num_free_rows
        return ALWAYS_STABLE if alone else None

    # -- counters

    def _note(self, draft: Draft, view: SchedulingView) -> None:
        for state in self._queue.left:
            self._left(state)
        for state in self._queue.arrived:
            self._queue.rerank(state, hit_of(draft, view, state).num_tokens)
            tenant = state.request.namespace.tenant
            if not self._waiting[tenant]:
                self._lift(tenant)
            self._waiting[tenant] += 1

    def _forget_ended(self) -> None:
        """Where nobody competes for long, what ended is charged now and then all the same."""
        if len(self._charged) > 2 * self._num_kept + ROOM_TO_FORGET:
            self._settle()
            self._num_kept = len(self._charged)

    def _left(self, state: RequestState) -> None:
        tenant = state.request.namespace.tenant
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]
            self._last = tenant
        if has_run(state) and state not in self._charged:
            if not state.num_preemptions:
                self._charge(tenant, max(1, state.num_prompt_tokens - state.num_cached))
            self._charged[state] = state.num_output_tokens if state.num_preemptions else 0

    def _lift(self, tenant: str) -> None:
        """It begins to wait: not before those that wait already."""
        others = [self.counters.get(one, 0.0) for one in self._waiting if self._waiting[one]]
        least = min(others) if others else self.counters.get(self._last, 0.0)
        self.counters[tenant] = max(self.counters.get(tenant, 0.0), least)
        if len(self.counters) > MAX_IDLE + len(self._waiting):
            kept = self.counters.items()
            self.counters = {name: value for name, value in kept if value > least or self._waiting[name]}

    def _charge(self, tenant: str, tokens: float) -> None:
        self.counters[tenant] = self.counters.get(tenant, 0.0) + tokens / self.weights.get(tenant, 1.0)

    def _settle(self) -> None:
        """Charge what was generated since the last time."""
        charged = self._charged
        ended = []
        for state, num_charged in charged.items():
            num_tokens = state.num_output_tokens
            if num_tokens != num_charged:
                self._charge(state.request.namespace.tenant, self.output_cost * (num_tokens - num_charged))
                charged[state] = num_tokens
            if state.status is RequestStatus.FINISHED:
                ended.append(state)
        for state in ended:
            del charged[state]

    # -- order

    def _order(self, draft: Draft, view: SchedulingView) -> None:
        queues: dict[str, list[RequestState]] = {}
        for state in reversed(draft.waiting):
            queues.setdefault(state.request.namespace.tenant, []).append(state)
        heap = [(self.counters.get(tenant, 0.0), tenant) for tenant in queues]
        heapify(heap)
        front: list[RequestState] = []
        budget = 2 * draft.token_budget
        while heap and budget > 0 and len(front) < view.num_free_rows + len(draft.preempted):
            counter, tenant = self._pick(heap, queues)
            state = queues[tenant].pop()
            front.append(state)
            num_tokens = num_to_compute(state, self._cached(state))
            budget -= num_tokens
            if queues[tenant]:
                heappush(heap, (counter + num_tokens / self.weights.get(tenant, 1.0), tenant))
        chosen = set(front)
        draft.waiting[:] = front + [state for state in draft.waiting if state not in chosen]

    def _pick(
        self, heap: list[tuple[float, str]], queues: Mapping[str, list[RequestState]]
    ) -> tuple[float, str]:
        """Of the tenants within a quantum of the least, the one whose next request has most in the cache."""
        first = heappop(heap)
        rivals = [first]
        while heap and len(rivals) < RIVALS and heap[0][0] < first[0] + self.quantum:
            rivals.append(heappop(heap))
        best = max(rivals, key=lambda rival: self._cached(queues[rival[1]][-1]))
        for rival in rivals:
            if rival is not best:
                heappush(heap, rival)
        return best

    def _cached(self, state: RequestState) -> int:
        cached: int = self._queue.ranks[state]
        return cached


PLUGIN = FairnessPass
