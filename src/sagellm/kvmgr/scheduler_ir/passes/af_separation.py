"""Assigns each request to an attention instance, where feed-forward layers run on other instances.

The split, and micro batches that hide the network, are those of MegaScale-Infer (Zhu et al., 2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from sagellm.core.plan import Draft, PhasePlacement, RequestState
from sagellm.core.protocols.scheduler_ir import ALWAYS_STABLE, SchedulingView, Stability
from sagellm.core.types import RequestStatus
from sagellm.kvmgr.scheduler_ir._queue import RankedQueue


class AFSeparationPass:
    """Places each admitted request on the attention instance with the fewest tokens.

    The placement is in `placements`, by request id, and in the draft of the step after it was admitted. The
    whole batch shares the feed-forward instances. `num_micro_batches` is the least number of micro batches
    that keeps both sides busy: `attention_s` and `ffn_s` are seconds of one layer for one micro batch,
    `link_s` of one way between the sides. Without `attention` and `ffn` the pass does nothing; with them the
    backend must have the feature `af_separation`.
    """

    name = "af_separation"

    def __init__(
        self,
        attention: Sequence[str] = (),
        ffn: Sequence[str] = (),
        *,
        attention_s: float = 1e-4,
        ffn_s: float = 1e-4,
        link_s: float = 5e-5,
    ) -> None:
        if bool(attention) != bool(ffn):
            raise ValueError("name instances for attention and for ffn, or for neither")
        if min(attention_s, ffn_s) <= 0 or link_s < 0:
            raise ValueError("attention_s and ffn_s must be positive, link_s must not be negative")
        self.attention, self.ffn = tuple(attention), tuple(ffn)
        self.requires = frozenset({self.name} if attention else ())
        self.num_micro_batches = ceil((attention_s + ffn_s + 2 * link_s) / max(attention_s, ffn_s))
        self.placements: dict[str, str] = {}
        self.num_tokens = dict.fromkeys(self.attention, 0)
        self._queue = RankedQueue()
        self._placed: dict[RequestState, int] = {}
        self._num_running = 0

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        if not self.attention:
            return
        if draft.step.num_new_running or len(draft.running) != self._num_running:
            self._num_running = len(draft.running)
            for state in [s for s in self._placed if s.status is not RequestStatus.RUNNING]:
                self.num_tokens[self.placements.pop(state.request_id)] -= self._placed.pop(state)
        if (draft.waiting or self._queue.ranks) and self._queue.update(draft.waiting):
            self._queue.ranks.update(dict.fromkeys(self._queue.arrived))
            admitted = [s for s in self._queue.left if s.status is RequestStatus.RUNNING]
            for state in [s for s in admitted if s not in self._placed]:
                name = min(self.num_tokens, key=lambda name: (self.num_tokens[name], name))
                self.num_tokens[name] += len(state.tokens)
                self._placed[state] = len(state.tokens)
                self.placements[state.request_id] = name
                known = draft.placements.get(state.request_id, PhasePlacement())
                placed = replace(known, attention=name, ffn=",".join(self.ffn))
                draft.placements[state.request_id] = placed

    def stable_until(self, draft: Draft, view: SchedulingView) -> Stability | None:
        return None if self.attention else ALWAYS_STABLE


PLUGIN = AFSeparationPass
