"""What the prefix index holds of those who wait: looked up once here, and who has more of it goes first."""

from __future__ import annotations

from sagellm.core.plan import Draft, RequestState
from sagellm.core.protocols.prefix_cache import PrefixHit, PrefixReuseIndex
from sagellm.core.protocols.scheduler_ir import SchedulingView


class PrefixCacheAwarePass:
    """Fills `draft.hits` for the first `window` waiting requests and moves those with more cached tokens
    forward.

    Only equals in priority change places, and nobody is overtaken for longer than `max_wait_s` seconds (0
    keeps the order as it is). `prefix_cache` is asked instead of the view where one is given.
    """

    name = "prefix_cache_aware"

    def __init__(
        self, prefix_cache: PrefixReuseIndex | None = None, window: int = 32, max_wait_s: float = 1.0
    ) -> None:
        self.prefix_cache = prefix_cache
        self.window = window
        self.max_wait_s = max_wait_s

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        head = draft.waiting[: self.window]
        for state in head:
            hit = draft.hits[state.request_id] = self._match(state, view)
            if hit.num_tokens:
                draft.say(
                    self.name, state, "reuse", f"{hit.num_tokens} of {len(state.tokens)} tokens are cached"
                )
        head.sort(key=lambda state: self._rank(state, draft))
        draft.waiting[: self.window] = head

    def _match(self, state: RequestState, view: SchedulingView) -> PrefixHit:
        if self.prefix_cache is None:
            return view.kv.match(state)
        return self.prefix_cache.lookup(state.tokens, state.request.namespace, len(state.tokens) - 1)

    def _rank(self, state: RequestState, draft: Draft) -> tuple[int, bool, int]:
        waited_s = draft.now_s - state.request.arrival_s
        overdue = waited_s >= self.max_wait_s
        cached = 0 if overdue else draft.hits[state.request_id].num_tokens
        return (-state.request.priority, not overdue, -cached)


PLUGIN = PrefixCacheAwarePass
