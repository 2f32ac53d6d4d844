"""Shares the engine between tenants: the fewest tokens by weight go first.

Virtual token counters are Sheng et al.'s (2024). That a tenant may be ahead by a quantum, so that requests
with a shared prefix run together, follows the deficit longest-prefix-match of Cao et al. (2025).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from heapq import heapify, heappop, heappush

from sagellm.core.plan import Draft, RequestState
from sagellm.core.protocols.scheduler_ir import ALWAYS_STABLE, SchedulingView, Stability
from sagellm.core.types import RequestStatus
from sagellm.kvmgr.scheduler_ir._queue import MAX_STALE, RankedQueue, num_to_compute, prefix_hit, was_admitted

RIVALS = 8
"""Most tenants within a quantum of the lowest counter whose cached tokens are compared."""
MAX_IDLE = 4096
"""Most counters of idle tenants that are kept."""


class FairnessPass:
    """Orders the waiting requests for fair shares of tenants.

    Each tenant gets tokens in proportion to its weight (1 by default). A tenant's own requests keep their
    order. A computed prompt token costs 1, a generated token `output_cost`. A tenant that returns starts at
    the lowest counter of the waiting tenants, so idle time earns nothing. Of tenants whose counters differ by
    less than `quantum` tokens, the one whose next request has most cached tokens goes first (0: the counter
    alone decides). Only as much of the queue is ordered as a step can admit.
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
        self._num_waiting: Counter[str] = Counter()
        self._charged: dict[RequestState, int] = {}
        self._last_to_wait = ""
        self._num_charged = 0

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        waiting, queue = draft.waiting, self._queue
        if not waiting and not queue.ranks:
            return
        if queue.update(waiting):
            self._note(draft, view)
            if len(self._charged) > 2 * self._num_charged + MAX_STALE:  # no tenants competed for long
                self._charge_outputs()
                self._num_charged = len(self._charged)
        if len(self._num_waiting) < 2 or not view.num_free_rows or len(waiting) < 2:
            return
        self._charge_outputs()
        self._order(draft, view)

    def stable_until(self, draft: Draft, view: SchedulingView) -> Stability | None:
        """Stable while one tenant waits alone; otherwise counters and order change in every step."""
        if not self._queue.is_current(draft.waiting):
            return None
        alone = len(self._num_waiting) < 2 or len(draft.waiting) < 2 or not view.num_free_rows
        return ALWAYS_STABLE if alone else None

    # -- counters

    def _note(self, draft: Draft, view: SchedulingView) -> None:
        for state in self._queue.left:
            tenant = state.request.namespace.tenant
            self._num_waiting[tenant] -= 1
            if not self._num_waiting[tenant]:
                del self._num_waiting[tenant]
                self._last_to_wait = tenant
            if was_admitted(state) and state not in self._charged:
                if not state.num_preemptions:
                    given = state.num_prompt_tokens + len(state.request.generated)
                    self._charge(tenant, max(1, given - state.num_cached))
                known = state.num_output_tokens if state.num_preemptions else len(state.request.generated)
                self._charged[state] = known
        if any(not self._num_waiting[state.request.namespace.tenant] for state in self._queue.arrived):
            self._charge_outputs()  # first: else a new tenant would be ahead by what others have generated
        for state in self._queue.arrived:
            self._queue.rerank(state, prefix_hit(draft, view, state).num_tokens)
            tenant = state.request.namespace.tenant
            if not self._num_waiting[tenant]:
                self._raise_counter(tenant)
            self._num_waiting[tenant] += 1

    def _raise_counter(self, tenant: str) -> None:
        """Raise the counter of a new waiting tenant to the lowest of the others."""
        others = [self.counters.get(name, 0.0) for name in self._num_waiting if self._num_waiting[name]]
        least = min(others) if others else self.counters.get(self._last_to_wait, 0.0)
        self.counters[tenant] = max(self.counters.get(tenant, 0.0), least)
        if len(self.counters) > MAX_IDLE + len(self._num_waiting):
            kept = self.counters.items()
            self.counters = {name: value for name, value in kept if value > least or self._num_waiting[name]}

    def _charge(self, tenant: str, tokens: float) -> None:
        self.counters[tenant] = self.counters.get(tenant, 0.0) + tokens / self.weights.get(tenant, 1.0)

    def _charge_outputs(self) -> None:
        """Charge the tokens generated since the last call, and remove finished requests."""
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
        token_budget = 2 * draft.token_budget
        while heap and token_budget > 0 and len(front) < view.num_free_rows + len(draft.preempted):
            counter, tenant = self._pick(heap, queues)
            state = queues[tenant].pop()
            front.append(state)
            num_tokens = num_to_compute(state, self._cached(state))
            token_budget -= num_tokens
            if queues[tenant]:
                heappush(heap, (counter + num_tokens / self.weights.get(tenant, 1.0), tenant))
        chosen = set(front)
        draft.waiting[:] = front + [state for state in draft.waiting if state not in chosen]

    def _pick(
        self, heap: list[tuple[float, str]], queues: Mapping[str, list[RequestState]]
    ) -> tuple[float, str]:
        """The tenant with the best cached next request, within a quantum of the lowest."""
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
