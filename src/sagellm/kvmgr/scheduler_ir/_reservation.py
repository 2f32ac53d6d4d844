"""Will the memory do until those that run have ended? What is asked before one more is admitted.

The peak of what a batch will hold, from how far each request is and how much it will still get, is the
estimate of Gong et al. (2025), "Past-Future".
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from sagellm.core.plan import Draft, RequestState
from sagellm.core.protocols.scheduler_ir import SchedulingView
from sagellm.kvmgr.scheduler_ir._queue import hit_of

Floats = npt.NDArray[np.float64]
Remaining = Callable[[RequestState], float]
"""Tokens that a request is thought to get from now on."""


def peak_growth(held: Floats, remaining: Floats) -> float:
    """By how many tokens at most the sum of all requests will exceed what they hold now.

    Each gets one token a step until its `remaining` are there, and gives back all that it holds then.
    """
    if not len(held):
        return 0.0
    order = np.argsort(-remaining)
    alive = np.cumsum(held[order]) + remaining[order] * np.arange(1, len(held) + 1)
    return float(alive.max()) - float(held.sum())


class Reservation:
    """Cuts the queue where the first stands that the predicted memory does not hold, so that nobody overtakes
    it.

    The first of the queue is let through where nobody runs, where somebody of lower priority does (who will
    be pushed out should memory be short), and after `max_hold_s` seconds at the front.
    `headroom` is the share of the free memory that is left unpromised. A first one that did not fit is asked
    about again when somebody has left or joined the batch.
    """

    def __init__(self, headroom: float, max_hold_s: float) -> None:
        if not 0 <= headroom < 1:
            raise ValueError(f"headroom must be in [0, 1), got {headroom}")
        self.headroom, self.max_hold_s = headroom, max_hold_s
        self._blocked: RequestState | None = None
        self._since_s = 0.0
        self._num_running = 0

    def cut(self, draft: Draft, view: SchedulingView, remaining: Remaining) -> RequestState | None:
        """Take from the queue who has to wait; returns the first of them."""
        waiting, running = draft.waiting, draft.running
        budget = draft.token_budget - draft.num_tokens
        if not waiting or not view.num_free_rows or budget <= 0:
            return None
        head = waiting[0]
        late = head is self._blocked and draft.now_s - self._since_s >= self.max_hold_s
        free_to_go = late or not running or _is_urgent(head, running)
        if head is self._blocked and self._is_same(draft) and not free_to_go:
            num_fitting = 0
        else:
            num_fitting = max(self._count(draft, view, remaining, budget), int(free_to_go))
        if num_fitting == len(waiting):
            return None
        first = waiting[num_fitting]
        if first is not self._blocked:
            self._blocked, self._since_s = first, draft.now_s
        self._num_running = len(running)
        del waiting[num_fitting:]
        return first

    def _is_same(self, draft: Draft) -> bool:
        """Whether those run who ran when the first of the queue was asked about."""
        running = draft.running
        return bool(running) and len(running) == self._num_running and not draft.num_new_running

    def _count(self, draft: Draft, view: SchedulingView, remaining: Remaining, budget: int) -> int:
        """How many of the first in the queue fit, of those that this step could admit."""
        prices = self._prices(draft, view, budget)
        running = draft.running
        batch = running + draft.waiting[: len(prices)]
        held = np.array([float(len(state.tokens)) for state in batch])
        future = np.array([remaining(state) for state in batch])
        owed = sum(chunk.state.num_uncomputed for chunk in draft.chunks.values() if not chunk.admits)
        free, size = view.kv.available_blocks() * (1 - self.headroom), view.kv.block_size

        def fits(count: int) -> bool:
            end = len(running) + count
            growth = (peak_growth(held[:end], future[:end]) + owed) / size
            return growth + end / 2 <= free - sum(prices[:count])  # half a block each: the last is not full

        if fits(len(prices)):
            return len(draft.waiting)
        return bisect_left(range(len(prices)), True, key=lambda place: not fits(place + 1))

    def _prices(self, draft: Draft, view: SchedulingView, budget: int) -> list[int]:
        """In blocks, of the prompts that this step could admit, the first in the queue first."""
        prices: list[int] = []
        for state in draft.waiting[: view.num_free_rows]:
            if budget <= 0:
                break
            hit = hit_of(draft, view, state)
            num_tokens = len(state.tokens) - hit.num_tokens
            prices.append(view.kv.blocks_to_admit(hit, num_tokens))
            budget -= num_tokens
        return prices


def _is_urgent(head: RequestState, running: list[RequestState]) -> bool:
    return any(one.request.priority < head.request.priority for one in running)
