"""`ReasoningKV`: drops old KV of reasoning, for requests with `max_reasoning_kv_tokens`.

While such a request reasons, its tokens see the prompt, the answer so far and the newest tokens of the
reasoning: StreamingLLM (Xiao et al. 2023, arXiv:2309.17453) in whole blocks, with the prompt for sinks.
Where the newest blocks are as many as the request asks for, an eighth of them is dropped between two steps,
the oldest first. Answers may differ; `docs/log/2026-11-27-reasoning-kv.md` has figures, and what choosing
blocks by their keys gives instead.

A request that is preempted computes all its tokens anew, and some are dropped once it decodes again. What it
had computed before its first drop may be in the prefix index by then: that stays as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from sagellm.accel.cot.reasoning import ReasoningTracker
from sagellm.core.plan import RequestState
from sagellm.core.types import RequestStatus
from sagellm.kvmgr.manager import KVCacheManager

PART_DROPPED = 8
"""One of so many blocks goes at once: each time the step in flight is waited for and a table is sent."""


@dataclass(slots=True)
class _Reasoning:
    """Of one request. `start`: its first token of the reasoning that was opened last.

    `num_seen`: tokens that `tracker` has taken in. `due_at`: computed tokens from which on blocks may have to
    be dropped; all of its blocks may be there again after a preemption, which `num_preemptions` shows.
    """

    tracker: ReasoningTracker
    num_seen: int
    start: int
    due_at: int = 0
    num_preemptions: int = 0


class ReasoningKV:
    """Owns what is known of the reasoning of requests that let KV be dropped.

    `is_on`: while it is False, new requests keep all. `num_tokens`: those whose KV was dropped so far.
    """

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._followed: dict[RequestState, _Reasoning] = {}
        self.is_on = True

    @property
    def num_tokens(self) -> int:
        return self._kv.dropped.num_blocks * self._kv.block_size

    def add(self, state: RequestState) -> None:
        """A new request."""
        params, num_prompt = state.request.params, state.num_prompt_tokens
        if params.max_reasoning_kv_tokens is not None and self.is_on:
            prompt, eos = state.tokens.slice(0, num_prompt), state.request.eos_token_ids
            tracker = ReasoningTracker.behind(prompt, params.reasoning_token_ids, eos)
            self._followed[state] = _Reasoning(tracker, num_prompt, num_prompt)

    @property
    def is_ready(self) -> bool:
        """Whether blocks of some request may have to be dropped."""
        for state in [s for s in self._followed if s.status is RequestStatus.FINISHED]:
            del self._followed[state]
        return any(self._is_due(state, own) for state, own in self._followed.items())

    def _is_due(self, state: RequestState, own: _Reasoning) -> bool:
        for at, token_id in enumerate(state.tokens.slice(own.num_seen), own.num_seen):
            was_inside = own.tracker.is_inside
            own.tracker.push(token_id)
            if own.tracker.is_inside and not was_inside:
                own.start, own.due_at = at, 0
        own.num_seen = len(state.tokens)
        if own.num_preemptions != state.num_preemptions:
            own.num_preemptions, own.due_at = state.num_preemptions, 0
        return state.decoding and own.tracker.is_inside and state.num_computed >= own.due_at

    def advance(self) -> None:
        """Drop what is too much. No step is in flight."""
        kv, size = self._kv, self._kv.block_size
        for state, own in self._followed.items():
            if not self._is_due(state, own):
                continue
            limit = (state.request.params.max_reasoning_kv_tokens or 0) // size
            places = kv.dropped.droppable(state, own.start)
            if len(places) >= limit:
                kept = limit - max(1, limit // PART_DROPPED)
                kv.dropped.drop(state, places[: len(places) - kept])
                places = places[len(places) - kept :]
            own.due_at = state.num_computed - state.num_computed % size + (limit - len(places)) * size
