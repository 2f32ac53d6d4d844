"""Predicts whether memory lasts until the running requests finish, before one more is admitted.

The peak of a batch's memory, from how far each request is and how many tokens it will still generate, is the
estimate of Gong et al. (2025), "Past-Future".
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from sagellm.core.plan import Draft, RequestState
from sagellm.core.protocols.scheduler_ir import SchedulingView
from sagellm.kvmgr.scheduler_ir._queue import prefix_hit

Floats = npt.NDArray[np.float64]
Remaining = Callable[[RequestState], float]
"""The number of tokens that a request is expected to generate from now on."""


def peak_growth(held: Floats, remaining: Floats) -> float:
    """By how many tokens all requests together will at most grow. Each request gets one token per step until
    it has its `remaining` ones, and then releases all it holds."""
    if not len(held):
        return 0.0
    order = np.argsort(-remaining)
    alive = np.cumsum(held[order]) + remaining[order] * np.arange(1, len(held) + 1)
    return float(alive.max()) - float(held.sum())


class Reservation:
    """Cuts the queue at the first request that the predicted memory does not hold.

    No request overtakes it. It is admitted all the same if no request runs, if one of lower priority runs
    (which is preempted should memory be short), or after `max_defer_s` seconds at the front. `headroom` is
    the share of the available memory that is not promised to any request. The prediction for a request that
    did not fit is repeated when the set of running requests changes.
    """

    def __init__(self, headroom: float, max_defer_s: float) -> None:
        if not 0 <= headroom < 1:
            raise ValueError(f"headroom must be in [0, 1), got {headroom}")
        self.headroom, self.max_defer_s = headroom, max_defer_s
        self._blocked: RequestState | None = None
        self._since_s = 0.0
        self._num_running = 0

    def cut(self, draft: Draft, view: SchedulingView, remaining: Remaining) -> RequestState | None:
        """Remove requests that have to wait from `draft.waiting`; returns the first of them."""
        waiting, running = draft.waiting, draft.running
        token_budget = draft.token_budget - draft.num_tokens
        if not waiting or not view.num_free_rows or token_budget <= 0:
            return None
        head = waiting[0]
        late = head is self._blocked and draft.step.now_s - self._since_s >= self.max_defer_s
        is_urgent = any(state.request.priority < head.request.priority for state in running)
        may_go = late or not running or is_urgent
        same_batch = bool(running) and len(running) == self._num_running and not draft.step.num_new_running
        if head is self._blocked and same_batch and not may_go:
            num_fitting = 0
        else:
            num_fitting = max(self._num_fitting(draft, view, remaining, token_budget), int(may_go))
        if num_fitting == len(waiting):
            return None
        first = waiting[num_fitting]
        if first is not self._blocked:
            self._blocked, self._since_s = first, draft.step.now_s
        self._num_running = len(running)
        del waiting[num_fitting:]
        return first

    def _num_fitting(
        self, draft: Draft, view: SchedulingView, remaining: Remaining, token_budget: int
    ) -> int:
        """How many requests from the front of the queue fit. All of them, if all that this step could admit
        fit."""
        prices = self._prices(draft, view, token_budget)
        running = draft.running
        batch = running + draft.waiting[: len(prices)]
        held = np.array([float(len(state.tokens)) for state in batch])
        future = np.array([remaining(state) for state in batch])
        owed = sum(chunk.state.num_uncomputed for chunk in draft.chunks.values() if not chunk.admits)
        available, size = view.kv.available_blocks() * (1 - self.headroom), view.kv.block_size

        def fits(count: int) -> bool:
            end = len(running) + count
            growth = (peak_growth(held[:end], future[:end]) + owed) / size
            half_blocks = end / 2  # on average, half of a request's last block is empty
            return growth + half_blocks <= available - sum(prices[:count])

        if fits(len(prices)):
            return len(draft.waiting)
        return bisect_left(range(len(prices)), True, key=lambda index: not fits(index + 1))

    def _prices(self, draft: Draft, view: SchedulingView, token_budget: int) -> list[int]:
        """Blocks of each prompt that this step could admit, in order of the queue."""
        prices: list[int] = []
        for state in draft.waiting[: view.num_free_rows]:
            if token_budget <= 0:
                break
            hit = prefix_hit(draft, view, state)
            num_tokens = len(state.tokens) - hit.num_tokens
            prices.append(view.kv.blocks_to_admit(hit, num_tokens))
            token_budget -= num_tokens
        return prices
