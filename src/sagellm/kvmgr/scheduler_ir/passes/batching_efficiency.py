"""Full steps of similar requests: prompts of like length together, and nobody who fits waits behind who does
not.

Letting those that fit go before one that does not is backfilling, of batch systems (Lifka, 1995).
"""

from __future__ import annotations

import math

from sagellm.core.blocks import cdiv
from sagellm.core.plan import Draft, RequestState
from sagellm.core.protocols.scheduler_ir import SchedulingView, Stability, stable_while_all_decode
from sagellm.kvmgr.scheduler_ir._queue import RankedQueue, Turns, hit_of, num_to_compute


class BatchingEfficiencyPass:
    """Sorts the waiting by octave of the tokens that they have to compute, the octave of the one that waits
    longest first; then moves back who does not fit into memory now, so that those behind it that do are not
    kept waiting (looking at the first `depth`).

    Only equals in priority change places, and who has waited `max_wait_s` seconds gets a turn, in which
    nobody goes before it (`share`: see `Turns`). `watermark` as in `memory_aware_preemption`.
    """

    name = "batching_efficiency"

    def __init__(
        self, max_wait_s: float = 5.0, *, share: float = 0.1, depth: int = 64, watermark: int = 1
    ) -> None:
        self.depth, self.watermark = depth, watermark
        self._queue = RankedQueue()
        self._turns = Turns(max_wait_s, share)
        self._octaves: dict[RequestState, int] = {}
        self._since: dict[int, float] = {}

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        waiting, queue = draft.waiting, self._queue
        if not waiting and not queue.ranks:
            return
        if queue.see(waiting):
            self._note(draft, view)
            self._rank(waiting)
        queue.sort(waiting)
        self._turns.note(queue.arrived, queue.left)
        turn = self._turns.give(waiting, draft.now_s)
        if len(waiting) > 1 and view.num_free_rows and turn is None:
            self._backfill(draft, view)

    def stable_until(self, draft: Draft, view: SchedulingView) -> Stability | None:
        return stable_while_all_decode(draft)

    def _note(self, draft: Draft, view: SchedulingView) -> None:
        for state in self._queue.arrived:
            num_tokens = num_to_compute(state, hit_of(draft, view, state).num_tokens)
            self._octaves[state] = num_tokens.bit_length()
        for state in self._queue.left:
            self._octaves.pop(state, None)

    def _rank(self, waiting: list[RequestState]) -> None:
        """An octave's rank is the arrival of its first; a request is ranked anew where that has changed."""
        since: dict[int, float] = {}
        for state in waiting:
            octave, arrival_s = self._octaves[state], state.request.arrival_s
            if arrival_s < since.get(octave, math.inf):
                since[octave] = arrival_s
        changed = {octave for octave, first_s in since.items() if self._since.get(octave) != first_s}
        self._since = since
        for state in waiting if changed else self._queue.arrived:
            octave = self._octaves[state]
            rank = (-state.request.priority, state.num_preemptions == 0, since[octave], octave)
            self._queue.rerank(state, rank)

    def _backfill(self, draft: Draft, view: SchedulingView) -> None:
        """Looks no further than to the first where all that are looked at fit."""
        left = view.kv.available_blocks() - len(draft.needing_block()) - self.watermark * len(draft.running)
        if left >= self._most_blocks(draft, view):
            return
        fits: list[RequestState] = []
        too_large: list[RequestState] = []
        first = draft.waiting[0]
        for state in draft.waiting[: self.depth]:
            if state.request.priority != first.request.priority:
                break
            hit = hit_of(draft, view, state)
            price = view.kv.blocks_to_admit(hit, len(state.tokens) - hit.num_tokens)
            if price > left:
                too_large.append(state)
                continue
            left -= price + self.watermark
            fits.append(state)
        if too_large and fits and first is too_large[0]:
            draft.record(self.name, first, "wait", f"{len(fits)} behind it fit into memory now, it does not")
            draft.waiting[: len(fits) + len(too_large)] = fits + too_large

    def _most_blocks(self, draft: Draft, view: SchedulingView) -> int:
        """Blocks with which the head is sure to fit."""
        head = draft.waiting[0]
        return cdiv(len(head.tokens), view.kv.block_size)


PLUGIN = BatchingEfficiencyPass
