"""What passes share that reorder the waiting: ranks that are made once, and turns for who waits too long."""

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

A_MOMENT_S = 1e-6
"""More than what rounding may make of a sum of times."""
ROOM_TO_FORGET = 1024
"""Requests that a queue may remember, beyond four times those that wait, before it looks again."""


def hit_of(draft: Draft, view: SchedulingView, state: RequestState) -> PrefixHit:
    """What the index holds of the request: looked up once in a step, whoever asks first."""
    hit = draft.hits.get(state.request_id)
    if hit is None:
        hit = draft.hits[state.request_id] = view.kv.match(state)
    return hit


def num_to_compute(state: RequestState, num_cached: int) -> int:
    return max(1, len(state.tokens) - num_cached)


def has_run(state: RequestState) -> bool:
    """Whether one that waits no longer was admitted: it runs, or ran and has ended."""
    return state.status is RequestStatus.RUNNING or state.scheduled_s is not None


def has_come_to_its_end(state: RequestState) -> bool:
    """Whether one that has ended is as long as it would have been. A stop string is an abort to the engine;
    of other aborts and of errors nobody knows."""
    reason = state.finish_reason
    if reason is FinishReason.ABORT:
        return bool(state.request.params.stop)
    return reason in (FinishReason.STOP, FinishReason.LENGTH)


class RankedQueue:
    """The waiting as one pass knows them: who came, who left, and the rank of each.

    `see` first; then every request of `arrived` must get its rank in `ranks`, and `sort` orders by it, equals
    staying as they are. A queue that is the same as in the step before costs one comparison of two lists.
    """

    def __init__(self) -> None:
        self.ranks: dict[RequestState, Any] = {}
        self.arrived: list[RequestState] = []
        self.left: list[RequestState] = []
        self._before: list[RequestState] = []
        self._after: list[RequestState] | None = None

    def see(self, waiting: list[RequestState]) -> bool:
        """Whether other requests wait than before, or in another order. `left` began to run, or ended."""
        if waiting == self._before:
            if self.arrived or self.left:
                self.arrived, self.left = [], []
            return False
        self._before, self._after = waiting.copy(), None
        ranks = self.ranks
        self.arrived = [state for state in waiting if state not in ranks]
        self.left = []
        if len(ranks) + len(self.arrived) > len(waiting):
            self.left = [state for state in ranks if state.status is not RequestStatus.WAITING]
            for state in self.left:
                del ranks[state]
        if len(ranks) > 4 * len(waiting) + ROOM_TO_FORGET:
            known = set(waiting)
            self.ranks = {state: rank for state, rank in ranks.items() if state in known}
        return True

    def knows(self, waiting: list[RequestState]) -> bool:
        """Whether nothing has changed since the last `see`."""
        return waiting == self._before

    def rerank(self, state: RequestState, rank: Any) -> None:
        """Another rank for one that waits already."""
        self.ranks[state] = rank
        self._after = None

    def sort(self, waiting: list[RequestState]) -> None:
        if self._after is None:
            self._after = sorted(waiting, key=self.ranks.__getitem__)
        waiting[:] = self._after


class Turns:
    """No starvation under any order: who has waited `max_wait_s` seconds, longest first, gets its turn.

    Its turn comes when others that were admitted meanwhile had `1 / share` times the tokens that it needs,
    and lasts until it runs. So a request waits for those that came before it and for a bounded number of
    tokens of others, however many arrive; and under lasting overload `share` of the work is in order of
    arrival, not all of it.
    """

    def __init__(self, max_wait_s: float, share: float = 0.1) -> None:
        if max_wait_s < 0:
            raise ValueError(f"max_wait_s must not be negative, got {max_wait_s}")
        if not 0 < share <= 1:
            raise ValueError(f"share must be in (0, 1], got {share}")
        self.max_wait_s, self.share = max_wait_s, share
        self._oldest: list[tuple[float, int, RequestState]] = []
        self._count = count()
        self._turn: RequestState | None = None
        self._credit = 0.0

    def note(self, arrived: Iterable[RequestState], left: Iterable[RequestState]) -> None:
        for state in arrived:
            heappush(self._oldest, (state.request.arrival_s, next(self._count), state))
        for state in left:
            if state is not self._turn and has_run(state):
                self._credit += self.share * num_to_compute(state, state.num_cached)

    def give(self, waiting: list[RequestState], now_s: float) -> RequestState | None:
        """Move whose turn it is to the front; returns it, None where it is nobody's."""
        turn = self._turn
        if turn is None or turn.status is not RequestStatus.WAITING:
            turn = self._turn = self._next(now_s)
        if turn is None or (waiting and waiting[0] is turn):
            return turn
        if turn not in waiting:  # a pass before this one lets it wait
            return None
        waiting.remove(turn)
        waiting.insert(0, turn)
        return turn

    def stay_until(self, waiting: list[RequestState], now_s: float) -> float | None:
        """As `give`, and how long it would go on to do the same while nobody comes or goes; None where
        somebody gets a turn now."""
        turn = self._turn
        if turn is not None and turn.status is RequestStatus.WAITING:
            self.give(waiting, now_s)
            return math.inf
        self._forget_gone()
        if not self._oldest:
            return math.inf
        arrival_s, _, state = self._oldest[0]
        if now_s - arrival_s < self.max_wait_s:
            return arrival_s + self.max_wait_s - A_MOMENT_S
        return math.inf if self._credit < len(state.tokens) and self.max_wait_s > 0 else None

    def _forget_gone(self) -> None:
        oldest = self._oldest
        while oldest and oldest[0][2].status is not RequestStatus.WAITING:
            heappop(oldest)

    def _next(self, now_s: float) -> RequestState | None:
        oldest = self._oldest
        self._forget_gone()
        if not oldest or now_s - oldest[0][0] < self.max_wait_s:
            self._credit = 0.0
            return None
        state = oldest[0][2]
        if self._credit < len(state.tokens) and self.max_wait_s > 0:
            return None
        self._credit = 0.0
        return state
