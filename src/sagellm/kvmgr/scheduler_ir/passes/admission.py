"""Who is let in: only whom memory will hold until those that run have ended, by the lengths seen lately."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque

from sagellm.core.blocks import cdiv
from sagellm.core.errors import ConfigError
from sagellm.core.plan import Draft, RequestState
from sagellm.core.protocols.scheduler_ir import SchedulingView, Stability, stable_while_all_decode
from sagellm.core.types import RequestStatus
from sagellm.kvmgr.scheduler_ir._queue import RankedQueue, has_come_to_its_end, has_run
from sagellm.kvmgr.scheduler_ir._reservation import Reservation


class AdmissionPass:
    """Lets the first of the queue in while the predicted peak of memory of all that run fits; behind the
    first that does not fit all wait, `max_hold_s` seconds at most for the first of them.

    How much a request will get is taken from the last `window` outputs that came to their end: the `quantile`
    of those that are longer than what it has, within its own limit; its limit, or `default_output` without
    one, while fewer than `min_samples` are known. Only a prompt that is larger than all of the memory is
    rejected.
    """

    name = "admission"

    def __init__(
        self,
        quantile: float = 0.75,
        headroom: float = 0.02,
        max_hold_s: float = 10.0,
        *,
        window: int = 512,
        min_samples: int = 16,
        default_output: int = 512,
    ) -> None:
        if not 0 < quantile < 1:
            raise ConfigError(f"quantile of admission must be in (0, 1), got {quantile}")
        self.quantile, self.window = quantile, window
        self.min_samples, self.default_output = min_samples, default_output
        self._reservation = Reservation(headroom, max_hold_s)
        self._queue = RankedQueue()
        self._active: dict[RequestState, None] = {}
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        waiting = draft.waiting
        if not waiting and not self._queue.ranks:
            return
        if self._queue.see(waiting):
            self._queue.ranks.update(dict.fromkeys(self._queue.arrived))
            self._learn()
            self._reject(draft, view)
        first = self._reservation.cut(draft, view, self.remaining)
        if first is not None:
            draft.record(self.name, first, "wait", "the predicted memory of all that run would not hold it")

    def stable_until(self, draft: Draft, view: SchedulingView) -> Stability | None:
        return stable_while_all_decode(draft)

    def remaining(self, state: RequestState) -> float:
        """Tokens that it is thought to get from now on."""
        generated, limit = state.num_output_tokens, state.request.params.max_tokens
        outputs = self._sorted
        if len(outputs) < self.min_samples:
            expected = limit if limit is not None else max(self.default_output, 2 * generated)
        else:
            first = bisect_right(outputs, generated)
            longer = len(outputs) - first
            expected = outputs[first + int(self.quantile * longer)] if longer else 2 * generated
        return max(1.0, (expected if limit is None else min(expected, limit)) - generated)

    def _learn(self) -> None:
        """From those that ended since the last look; how long one would have been that was aborted or failed
        nobody knows."""
        self._active.update(dict.fromkeys(state for state in self._queue.left if has_run(state)))
        ended = [state for state in self._active if state.status is RequestStatus.FINISHED]
        for state in ended:
            del self._active[state]
            if not has_come_to_its_end(state):
                continue
            self._recent.append(state.num_output_tokens)
            insort(self._sorted, state.num_output_tokens)
            if len(self._recent) > self.window:
                del self._sorted[bisect_left(self._sorted, self._recent.popleft())]

    def _reject(self, draft: Draft, view: SchedulingView) -> None:
        for state in self._queue.arrived:
            price = cdiv(len(state.tokens), view.kv.block_size)
            if price > view.kv.num_blocks:
                reason = f"out of KV memory: it needs {price} blocks, there are {view.kv.num_blocks}"
                draft.reject(state, reason)
                draft.record(self.name, state, "reject", reason)
                draft.waiting.remove(state)


PLUGIN = AdmissionPass
