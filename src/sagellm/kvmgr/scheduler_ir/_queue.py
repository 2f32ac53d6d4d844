"""What passes that reorder the waiting requests share: ranks, and a guard against starvation."""

from __future__ import annotations

import math
from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import count
from typing import Any

from sagellm.core.plan import Draft, RequestState
from sagellm.core.protocols.prefix_cache import PrefixHit
from sagellm.core.protocols.scheduler_ir import SchedulingView
from sagellm.core.types import FinishReason, RequestStatus

ROUNDING_S = 1e-6
"""More than the rounding error of a sum of times."""
MAX_STALE = 16
"""How many requests that have ended a pass may keep before it removes them. Each holds its tokens."""
MAX_HIDDEN = 1024
"""Waiting requests that earlier passes hide and whose ranks are kept."""


def prefix_hit(draft: Draft, view: SchedulingView, state: RequestState) -> PrefixHit:
    """The prefix hit of a waiting request, looked up at most once per step."""
    hit = draft.hits.get(state.request_id)
    if hit is None:
        hit = draft.hits[state.request_id] = view.kv.match(state)
    return hit


def num_to_compute(state: RequestState, num_cached: int) -> int:
    return max(1, len(state.tokens) - num_cached)


def was_admitted(state: RequestState) -> bool:
    """Whether a request left the queue by admission, not by abort or rejection."""
    return state.status is RequestStatus.RUNNING or state.scheduled_s is not None


def ended_naturally(state: RequestState) -> bool:
    """Whether a finished request generated all of its output. Only then can its length be learned from. The
    engine sees a stop string as an abort. After any other abort or error the full length is unknown."""
    reason = state.finish_reason
    if reason is FinishReason.ABORT:
        return bool(state.request.params.stop)
    return reason in (FinishReason.STOP, FinishReason.LENGTH)


class RankedQueue:
    """The waiting requests with their ranks, and what changed since the last step.

    Call `update` first. Then every request of `arrived` must get its rank in `ranks`. `sort` orders by rank;
    equals keep their order. If the queue is the same as in the step before, all of this costs one comparison
    of two lists.
    """

    def __init__(self) -> None:
        self.ranks: dict[RequestState, Any] = {}
        self.arrived: list[RequestState] = []
        self.left: list[RequestState] = []
        self._seen: list[RequestState] = []
        self._sorted: list[RequestState] | None = None

    def update(self, waiting: list[RequestState]) -> bool:
        """Whether the queue or its order changed. Sets `arrived`, and `left`: those that no longer wait. A
        request that an earlier pass took out of the draft still waits and keeps its rank."""
        if waiting == self._seen:
            if self.arrived or self.left:
                self.arrived, self.left = [], []
            return False
        self._seen, self._sorted = waiting.copy(), None
        ranks = self.ranks
        self.arrived = [state for state in waiting if state not in ranks]
        self.left = []
        if len(ranks) + len(self.arrived) > len(waiting):
            self.left = [state for state in ranks if state.status is not RequestStatus.WAITING]
            for state in self.left:
                del ranks[state]
        if len(ranks) > 4 * len(waiting) + MAX_HIDDEN:
            present = set(waiting)
            self.ranks = {state: rank for state, rank in ranks.items() if state in present}
        return True

    def is_current(self, waiting: list[RequestState]) -> bool:
        """Whether the queue is the one of the last `update`."""
        return waiting == self._seen

    def rerank(self, state: RequestState, rank: Any) -> None:
        """Set the rank of a waiting request."""
        self.ranks[state] = rank
        self._sorted = None

    def sort(self, waiting: list[RequestState]) -> None:
        """Order the queue of the last `update` by rank, in place."""
        if self._sorted is None:
            self._sorted = sorted(waiting, key=self.ranks.__getitem__)
        waiting[:] = self._sorted


class StarvationGuard:
    """Bounds the wait of every request, whatever order a pass prefers.

    A request that has waited `max_wait_s` seconds is overdue. The longest waiting overdue request is promoted
    to the front once requests admitted meanwhile had `1 / share` times the tokens that it needs, and stays
    there until it runs. So a request waits for those that arrived before it and for a bounded number of
    tokens of others, however many arrive; and under lasting overload only `share` of the work is done in
    order of arrival, where a plain time limit would turn every strategy into order of arrival.
    """

    def __init__(self, max_wait_s: float, share: float = 0.1) -> None:
        if max_wait_s < 0:
            raise ValueError(f"max_wait_s must not be negative, got {max_wait_s}")
        if not 0 < share <= 1:
            raise ValueError(f"share must be in (0, 1], got {share}")
        self.max_wait_s, self.share = max_wait_s, share
        self._by_arrival: list[tuple[float, int, RequestState]] = []
        self._count = count()
        self._promoted: RequestState | None = None
        self._credit = 0.0  # tokens that the next promoted request may use

    def note(self, arrived: Iterable[RequestState], left: Iterable[RequestState]) -> None:
        """Note the requests that arrived and left since the last step."""
        for state in arrived:
            heappush(self._by_arrival, (state.request.arrival_s, next(self._count), state))
        for state in left:
            if state is not self._promoted and was_admitted(state):
                self._credit += self.share * num_to_compute(state, state.num_cached)

    def promote(self, waiting: list[RequestState], now_s: float) -> RequestState | None:
        """Move the promoted request to the front and return it, if there is one."""
        promoted = self._promoted
        if promoted is None or promoted.status is not RequestStatus.WAITING:
            promoted = self._promoted = self._next(now_s)
        if promoted is None or (waiting and waiting[0] is promoted):
            return promoted
        if promoted not in waiting:  # an earlier pass keeps it waiting
            return None
        waiting.remove(promoted)
        waiting.insert(0, promoted)
        return promoted

    def stable_until(self, waiting: list[RequestState], now_s: float) -> float | None:
        """Do as `promote`; returns the time until which it would change nothing. That holds as long as no
        request arrives or leaves. None if a request is about to be promoted."""
        promoted = self._promoted
        if promoted is not None and promoted.status is RequestStatus.WAITING:
            self.promote(waiting, now_s)
            return math.inf
        self._forget_left()
        if not self._by_arrival:
            return math.inf
        arrival_s, _, state = self._by_arrival[0]
        if now_s - arrival_s < self.max_wait_s:
            return arrival_s + self.max_wait_s - ROUNDING_S
        return math.inf if self._credit < len(state.tokens) and self.max_wait_s > 0 else None

    def _forget_left(self) -> None:
        by_arrival = self._by_arrival
        while by_arrival and by_arrival[0][2].status is not RequestStatus.WAITING:
            heappop(by_arrival)

    def _next(self, now_s: float) -> RequestState | None:
        """The request to promote now. It spends the credit, which is lost while none is overdue."""
        self._forget_left()
        by_arrival = self._by_arrival
        if not by_arrival or now_s - by_arrival[0][0] < self.max_wait_s:
            self._credit = 0.0
            return None
        state = by_arrival[0][2]
        if self._credit < len(state.tokens) and self.max_wait_s > 0:
            return None
        self._credit = 0.0
        return state
