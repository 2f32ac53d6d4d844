"""Orders waiting requests by cached tokens, and computes a shared prefix once.

Longest cached prefix first is SGLang's order (Zheng et al., 2024).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np

from sagellm.core.plan import Draft, RequestState
from sagellm.core.protocols.prefix_cache import PrefixHit, PrefixReuseIndex
from sagellm.core.protocols.scheduler_ir import ALWAYS_STABLE, SchedulingView, Stability
from sagellm.core.types import TOKEN_BYTES, RequestStatus
from sagellm.kvmgr.scheduler_ir._queue import RankedQueue, StarvationGuard


@dataclass(slots=True)
class _Deferral:
    """A request waits until `leader` has computed the `num_shared` tokens that they share."""

    leader: RequestState
    num_shared: int
    num_preemptions: int

    def is_over(self) -> bool:
        """Whether the leader computed its prompt, finished, or was preempted."""
        leader = self.leader
        if leader.status is RequestStatus.FINISHED or leader.num_preemptions != self.num_preemptions:
            return True
        return leader.status is RequestStatus.RUNNING and leader.num_computed >= leader.num_prompt_tokens


class PrefixCacheAwarePass:
    """Looks up each request when it arrives. More cached tokens go first.

    Requests change places only with others of the same priority. An overdue request goes first (`max_wait_s`,
    `share`: see `StarvationGuard`).

    Of requests that lack the same `min_shared` tokens or more, the first (the leader) computes them. The
    others are taken out of `draft.waiting` meanwhile, if they share at least `worth` times what the leader
    has to compute, for at most `max_defer_s` seconds, and never for a leader of lower priority.

    When the index has changed, at most `refresh` requests per step are looked up again. `prefix_cache`
    replaces the index of the view.
    """

    name = "prefix_cache_aware"

    def __init__(
        self,
        prefix_cache: PrefixReuseIndex | None = None,
        max_wait_s: float = 1.0,
        *,
        share: float = 0.1,
        refresh: int = 8,
        min_shared: int = 64,
        worth: float = 0.5,
        max_defer_s: float = 2.0,
    ) -> None:
        self.prefix_cache = prefix_cache
        self.refresh, self.min_shared, self.worth, self.max_defer_s = refresh, min_shared, worth, max_defer_s
        self._queue = RankedQueue()
        self._guard = StarvationGuard(max_wait_s, share)
        # By the first tokens that are missing. Weak: a request that has ended frees its tokens.
        self._leaders: WeakValueDictionary[Hashable, RequestState] = WeakValueDictionary()
        self._deferred: dict[RequestState, _Deferral] = {}
        self._since_s: dict[RequestState, float] = {}  # when a request was held first
        self._hits: dict[str, PrefixHit] = {}  # current hits, of index version `_version`
        self._version = -1
        self._next_refresh = 0

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        waiting, queue = draft.waiting, self._queue
        if not waiting and not queue.ranks:
            return
        has_changed = view.kv.version != self._version
        if has_changed:  # hits of another version still serve to order requests
            self._version, self._hits = view.kv.version, {}
        if queue.update(waiting):
            self._forget(queue.left)
            for state in queue.arrived:
                self._find_leader(draft, state, self._look_up(draft, view, state))
        if has_changed:
            self._look_up_again(draft, view)
        else:
            draft.hits.update(self._hits)
        self._release(draft, view)
        queue.sort(waiting)
        self._guard.note(queue.arrived, queue.left)
        promoted = self._guard.promote(waiting, draft.step.now_s)
        if promoted is not None:
            self._deferred.pop(promoted, None)
        if self._deferred:
            self._remove_deferred(draft)

    def stable_until(self, draft: Draft, view: SchedulingView) -> Stability | None:
        """Stable while the index does not change, until a request is promoted. None while any is held."""
        waiting, queue = draft.waiting, self._queue
        if not waiting and not queue.ranks:
            return ALWAYS_STABLE
        if view.kv.version != self._version or self._deferred or not queue.is_current(waiting):
            return None
        queue.sort(waiting)
        until_s = self._guard.stable_until(waiting, draft.step.now_s)
        return None if until_s is None else Stability(until_s, same_cache=True)

    # -- look-ups

    def _look_up(self, draft: Draft, view: SchedulingView, state: RequestState) -> int:
        """Look the request up and rank it; returns its number of cached tokens."""
        request = state.request
        if self.prefix_cache is None:
            hit = view.kv.match(state)
        else:
            hit = self.prefix_cache.lookup(state.tokens, request.namespace, state.max_reusable)
        num_cached = hit.num_tokens
        draft.hits[request.request_id] = hit
        if request.group is None:
            self._hits[request.request_id] = hit
        rank = (-request.priority, not state.resumes, -num_cached)
        if self._queue.ranks.get(state) != rank:
            self._queue.rerank(state, rank)
            if num_cached:
                reason = f"{num_cached} of {len(state.tokens)} tokens are cached"
                draft.record(self.name, state, "reuse", reason)
        return num_cached

    def _look_up_again(self, draft: Draft, view: SchedulingView) -> None:
        """Look up some requests that waited before, after the index has changed."""
        waiting = draft.waiting
        for _ in range(min(self.refresh, len(waiting) - len(self._queue.arrived))):
            self._next_refresh = (self._next_refresh + 1) % len(waiting)
            state = waiting[self._next_refresh]
            if state.request_id not in draft.hits:
                self._look_up(draft, view, state)

    # -- one request computes a shared prefix, the others wait

    def _find_leader(self, draft: Draft, state: RequestState, num_cached: int) -> None:
        """Hold the request for a leader lacking the same tokens, or make it one."""
        start, end = num_cached * TOKEN_BYTES, (num_cached + self.min_shared) * TOKEN_BYTES
        data = state.tokens.tobytes()
        if end >= len(data) or self.max_defer_s <= 0 or state.max_reusable < len(state.tokens) - 1:
            return
        key = (state.request.namespace.tenant, num_cached, data[start:end])
        leader = self._leaders.setdefault(key, state)
        if leader is state:
            return
        if not self._is_computing(leader):
            self._leaders[key] = state
            return
        if leader.request.namespace != state.request.namespace:
            return
        rank = self._queue.ranks.get(leader)
        leader_work = leader.num_uncomputed + (rank[-1] if rank is not None else 0)
        num_shared = _num_common(leader, state)
        pays = num_shared - num_cached >= max(self.min_shared, self.worth * leader_work)
        late = draft.step.now_s - self._since_s.get(state, draft.step.now_s) >= self.max_defer_s
        may_lead = leader.request.priority >= state.request.priority and leader not in self._deferred
        if pays and may_lead and not late:
            self._deferred[state] = _Deferral(leader, num_shared, leader.num_preemptions)
            self._since_s.setdefault(state, draft.step.now_s)

    def _is_computing(self, leader: RequestState) -> bool:
        """Whether it is computing its prompt, or will, for the first time."""
        if leader.num_preemptions:
            return False
        if leader.status is RequestStatus.RUNNING:
            return leader.num_computed < leader.num_prompt_tokens
        return leader.status is RequestStatus.WAITING

    def _release(self, draft: Draft, view: SchedulingView) -> None:
        """Look up requests whose deferral is over; they may be deferred for another leader."""
        if not self._deferred:
            return
        for state, deferral in list(self._deferred.items()):
            late = draft.step.now_s - self._since_s[state] >= self.max_defer_s
            if not late and not deferral.is_over():
                continue
            del self._deferred[state]
            if state.status is RequestStatus.WAITING:
                self._find_leader(draft, state, self._look_up(draft, view, state))

    def _remove_deferred(self, draft: Draft) -> None:
        """Take deferred requests out of the queue. A leader moves to the place of its first follower."""
        order: dict[RequestState, None] = {}
        present = set(draft.waiting)
        for state in draft.waiting:
            deferral = self._deferred.get(state)
            if deferral is None:
                order[state] = None
                continue
            if deferral.leader in present:
                order[deferral.leader] = None
            reason = f"{deferral.leader.request_id} computes {deferral.num_shared} tokens that it shares"
            draft.record(self.name, state, "wait", reason)
        draft.waiting[:] = order

    def _forget(self, left: list[RequestState]) -> None:
        for state in left:
            self._deferred.pop(state, None)
            self._since_s.pop(state, None)
            self._hits.pop(state.request_id, None)


def _num_common(a: RequestState, b: RequestState) -> int:
    """The number of leading tokens that both have."""
    length = min(len(a.tokens), len(b.tokens))
    ids_a, ids_b = (np.frombuffer(s.tokens.tobytes(), dtype=np.int32, count=length) for s in (a, b))
    different = np.flatnonzero(ids_a != ids_b)
    return int(different[0]) if different.size else length


PLUGIN = PrefixCacheAwarePass
