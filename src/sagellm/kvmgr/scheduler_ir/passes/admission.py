"""Admits a request only if its KV fits until the running requests finish.

Output lengths are predicted from recent ones; the peak of memory is the estimate of `_reservation.py`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque

from sagellm.core.blocks import cdiv
from sagellm.core.errors import ConfigError
from sagellm.core.plan import Draft, RequestState
from sagellm.core.protocols.scheduler_ir import SchedulingView, Stability, stable_while_all_decode
from sagellm.core.types import RequestStatus
from sagellm.kvmgr.scheduler_ir._queue import RankedQueue, ended_naturally, was_admitted
from sagellm.kvmgr.scheduler_ir._reservation import Reservation


class AdmissionPass:
    """Admits from the front of the queue while the predicted peak of memory fits.

    From the first request that does not fit on, all wait (this pass takes them out of `draft.waiting`); the
    first of them at most `max_defer_s` seconds. The output length of a request is predicted from the last
    `window` complete outputs: the `quantile` of those longer than what it has generated, within its own
    limit. While fewer than `min_samples` are known, it is the request's limit, or `default_output` without
    one. A prompt that is larger than all of the memory is rejected.
    """

    name = "admission"

    def __init__(
        self,
        quantile: float = 0.75,
        headroom: float = 0.02,
        max_defer_s: float = 10.0,
        *,
        window: int = 512,
        min_samples: int = 16,
        default_output: int = 512,
    ) -> None:
        if not 0 < quantile < 1:
            raise ConfigError(f"quantile of admission must be in (0, 1), got {quantile}")
        self.quantile, self.window = quantile, window
        self.min_samples, self.default_output = min_samples, default_output
        self._reservation = Reservation(headroom, max_defer_s)
        self._queue = RankedQueue()
        self._active: dict[RequestState, None] = {}
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        waiting = draft.waiting
        if not waiting and not self._queue.ranks:
            return
        if self._queue.update(waiting):
            self._queue.ranks.update(dict.fromkeys(self._queue.arrived))
            self._learn()
            self._reject(draft, view)
        first = self._reservation.cut(draft, view, self.remaining)
        if first is not None:
            draft.record(self.name, first, "wait", "the predicted memory of all that run would not hold it")

    def stable_until(self, draft: Draft, view: SchedulingView) -> Stability | None:
        return stable_while_all_decode(draft)

    def remaining(self, state: RequestState) -> float:
        """The number of tokens that the request is expected to generate from now on."""
        generated, limit = state.num_output_tokens, state.max_output_tokens
        outputs = self._sorted
        if len(outputs) < self.min_samples:
            expected = limit if limit is not None else max(self.default_output, 2 * generated)
        else:
            first = bisect_right(outputs, generated)
            longer = len(outputs) - first
            expected = outputs[first + int(self.quantile * longer)] if longer else 2 * generated
        return max(1.0, (expected if limit is None else min(expected, limit)) - generated)

    def _learn(self) -> None:
        """Learn the lengths of requests that finished; aborted and failed ones are incomplete."""
        self._active.update(dict.fromkeys(state for state in self._queue.left if was_admitted(state)))
        for state in [s for s in self._active if s.status is RequestStatus.FINISHED]:
            del self._active[state]
            if not ended_naturally(state):
                continue
            self._recent.append(state.num_output_tokens)
            insort(self._sorted, state.num_output_tokens)
            if len(self._recent) > self.window:
                del self._sorted[bisect_left(self._sorted, self._recent.popleft())]

    def _reject(self, draft: Draft, view: SchedulingView) -> None:
        for state in self._queue.arrived:
            price = cdiv(len(state.tokens), view.kv.block_size)
            if price > view.kv.most_blocks:
                reason = f"out of KV memory: it needs {price} blocks, there are {view.kv.most_blocks}"
                draft.reject(state, reason)
                draft.record(self.name, state, "reject", reason)
                draft.waiting.remove(state)


PLUGIN = AdmissionPass
