"""Groups prompts of similar length, and lets requests that fit overtake.

Overtaking a request that does not fit is backfilling, from batch systems (Lifka, 1995).
"""

from __future__ import annotations

import math

from sagellm.core.blocks import cdiv
from sagellm.core.plan import Draft, RequestState
from sagellm.core.protocols.scheduler_ir import SchedulingView, Stability, stable_while_all_decode
from sagellm.kvmgr.scheduler_ir._queue import RankedQueue, StarvationGuard, num_to_compute, prefix_hit


class BatchingEfficiencyPass:
    """Sorts the waiting requests by octave of their tokens to compute, then backfills.

    An octave is a power of two; the octave of the longest waiting request comes first. Backfilling moves
    requests that do not fit into memory now behind those of the first `depth` that do. Requests change places
    only with others of the same priority. An overdue request goes first (`max_wait_s`, `share`: see
    `StarvationGuard`), and is not passed. `watermark` is that of `memory_aware_preemption`.
    """

    name = "batching_efficiency"

    def __init__(
        self, max_wait_s: float = 5.0, *, share: float = 0.1, depth: int = 64, watermark: int = 1
    ) -> None:
        self.depth, self.watermark = depth, watermark
        self._queue = RankedQueue()
        self._guard = StarvationGuard(max_wait_s, share)
        self._octaves: dict[RequestState, int] = {}
        self._since: dict[int, float] = {}

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        waiting, queue = draft.waiting, self._queue
        if not waiting and not queue.ranks:
            return
        if queue.update(waiting):
            for state in queue.arrived:
                num_tokens = num_to_compute(state, prefix_hit(draft, view, state).num_tokens)
                self._octaves[state] = num_tokens.bit_length()
            for state in queue.left:
                self._octaves.pop(state, None)
            self._rank(waiting)
        queue.sort(waiting)
        self._guard.note(queue.arrived, queue.left)
        promoted = self._guard.promote(waiting, draft.step.now_s)
        if len(waiting) > 1 and view.num_free_rows and promoted is None:
            self._backfill(draft, view)

    def stable_until(self, draft: Draft, view: SchedulingView) -> Stability | None:
        return stable_while_all_decode(draft)

    def _rank(self, waiting: list[RequestState]) -> None:
        """Rank octaves by the arrival of their first request, and requests by their octave."""
        since: dict[int, float] = {}
        for state in waiting:
            octave, arrival_s = self._octaves[state], state.request.arrival_s
            if arrival_s < since.get(octave, math.inf):
                since[octave] = arrival_s
        changed = {octave for octave, first_s in since.items() if self._since.get(octave) != first_s}
        self._since = since
        for state in waiting if changed else self._queue.arrived:
            octave = self._octaves[state]
            rank = (-state.request.priority, not state.resumes, since[octave], octave)
            self._queue.rerank(state, rank)

    def _backfill(self, draft: Draft, view: SchedulingView) -> None:
        """Move requests that fit in front of a first request that does not."""
        left = view.kv.available_blocks() - len(draft.needing_block()) - self.watermark * len(draft.running)
        first = draft.waiting[0]
        if left >= cdiv(len(first.tokens), view.kv.block_size):  # it fits even without a prefix hit
            return
        fits: list[RequestState] = []
        too_large: list[RequestState] = []
        for state in draft.waiting[: self.depth]:
            if state.request.priority != first.request.priority:
                break
            hit = prefix_hit(draft, view, state)
            price = view.kv.blocks_to_admit(hit, len(state.tokens) - hit.num_tokens)
            if price > left:
                too_large.append(state)
                continue
            left -= price + self.watermark
            fits.append(state)
        if too_large and fits and first is too_large[0]:
            draft.record(self.name, first, "wait", f"{len(fits)} behind it fit into memory now, it does not")
            draft.waiting[: len(fits) + len(too_large)] = fits + too_large


PLUGIN = BatchingEfficiencyPass
