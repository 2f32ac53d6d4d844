"""What the prefix index holds of those who wait: who has more of it goes first, and a prefix that several
lack is computed once."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from sagellm.core.plan import Draft, RequestState
from sagellm.core.protocols.prefix_cache import PrefixHit, PrefixReuseIndex
from sagellm.core.protocols.scheduler_ir import ALWAYS_STABLE, SchedulingView, Stability
from sagellm.core.types import TOKEN_BYTES, RequestStatus
from sagellm.kvmgr.scheduler_ir._queue import RankedQueue, Turns


@dataclass(slots=True)
class _Hold:
    """A request waits until `leader` has computed what they share."""

    leader: RequestState
    num_shared: int
    num_preemptions: int

    def is_over(self) -> bool:
        """Computed, ended, or preempted: it is not waited for twice."""
        leader = self.leader
        if leader.status is RequestStatus.FINISHED or leader.num_preemptions != self.num_preemptions:
            return True
        return leader.status is RequestStatus.RUNNING and leader.num_computed >= leader.num_prompt_tokens


class PrefixCacheAwarePass:
    """Looks each waiting request up when it comes, and moves those with more cached tokens forward.

    Only equals in priority change places, and who has waited `max_wait_s` seconds gets a turn (`share`: see
    `Turns`). Of requests that lack the same `min_shared` tokens or more, the first computes them and the
    others wait, where they share at least `worth` times what the first has to compute, for `max_hold_s`
    seconds at most; nobody waits for one of lower priority. When the index has changed, at most `refresh`
    requests in a step are looked up again. `prefix_cache` is asked instead of the view where one is given.
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
        max_hold_s: float = 2.0,
    ) -> None:
        self.prefix_cache = prefix_cache
        self.refresh, self.min_shared, self.worth, self.max_hold_s = refresh, min_shared, worth, max_hold_s
        self._queue = RankedQueue()
        self._turns = Turns(max_wait_s, share)
        self._leaders: dict[Hashable, RequestState] = {}
        self._held: dict[RequestState, _Hold] = {}
        self._since_s: dict[RequestState, float] = {}
        self._hits: dict[str, PrefixHit] = {}
        self._version = -1
        self._place = 0

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        waiting, queue = draft.waiting, self._queue
        if not waiting and not queue.ranks:
            return
        has_changed = view.kv.version != self._version
        if has_changed:  # hits of another version are good for the order, and for nothing else
            self._version, self._hits = view.kv.version, {}
        if queue.see(waiting):
            self._forget(queue.left)
            for state in queue.arrived:
                self._join(draft, state, self._look_up(draft, view, state))
        if has_changed:
            self._look_up_again(draft, view)
        else:
            draft.hits.update(self._hits)
        self._release(draft, view)
        queue.sort(waiting)
        self._turns.note(queue.arrived, queue.left)
        turn = self._turns.give(waiting, draft.now_s)
        if turn is not None:
            self._held.pop(turn, None)
        if self._held:
            self._let_wait(draft)

    def stable_until(self, draft: Draft, view: SchedulingView) -> Stability | None:
        """While the cache is the same, until somebody gets a turn; where nobody waits for another."""
        waiting, queue = draft.waiting, self._queue
        if not waiting and not queue.ranks:
            return ALWAYS_STABLE
        if view.kv.version != self._version or self._held or not queue.knows(waiting):
            return None
        queue.sort(waiting)
        until_s = self._turns.stay_until(waiting, draft.now_s)
        return None if until_s is None else Stability(until_s, same_cache=True)

    # -- look-ups

    def _look_up(self, draft: Draft, view: SchedulingView, state: RequestState) -> int:
        """How many tokens are cached."""
        request = state.request
        hit = view.kv.match(state) if self.prefix_cache is None else self._lookup(self.prefix_cache, state)
        num_cached = hit.num_tokens
        draft.hits[request.request_id] = hit
        if request.group is None:
            self._hits[request.request_id] = hit
        rank = (-request.priority, state.num_preemptions == 0, -num_cached)
        if self._queue.ranks.get(state) != rank:
            self._queue.rerank(state, rank)
            if num_cached:
                reason = f"{num_cached} of {len(state.tokens)} tokens are cached"
                draft.record(self.name, state, "reuse", reason)
        return num_cached

    def _lookup(self, index: PrefixReuseIndex, state: RequestState) -> PrefixHit:
        return index.lookup(state.tokens, state.request.namespace, state.max_reusable)

    def _look_up_again(self, draft: Draft, view: SchedulingView) -> None:
        """Of those who were there before, when the index has changed."""
        waiting = draft.waiting
        for _ in range(min(self.refresh, len(waiting) - len(self._queue.arrived))):
            self._place = (self._place + 1) % len(waiting)
            state = waiting[self._place]
            if state.request_id not in draft.hits:
                self._look_up(draft, view, state)

    # -- one computes, the others wait

    def _join(self, draft: Draft, state: RequestState, num_cached: int) -> None:
        """Find whom to wait for, or be the one: those who lack the same tokens next have something in
        common."""
        start, end = num_cached * TOKEN_BYTES, (num_cached + self.min_shared) * TOKEN_BYTES
        data = state.tokens.tobytes()
        if end >= len(data) or self.max_hold_s <= 0 or state.max_reusable < len(state.tokens) - 1:
            return
        key = (state.request.namespace.tenant, num_cached, data[start:end])
        leader = self._leaders.setdefault(key, state)
        if leader is state:
            return
        if self._is_computing(leader):
            if leader.request.namespace != state.request.namespace:
                return
            shared = _num_common(leader, state)
            gain = shared - num_cached
            late = draft.now_s - self._since_s.get(state, draft.now_s) >= self.max_hold_s > 0
            wait = gain >= max(self.min_shared, self.worth * self._to_compute(leader)) and not late
            if wait and leader.request.priority >= state.request.priority and leader not in self._held:
                self._held[state] = _Hold(leader, shared, leader.num_preemptions)
                self._since_s.setdefault(state, draft.now_s)
        else:
            self._leaders[key] = state

    def _is_computing(self, leader: RequestState) -> bool:
        """Whether it is about to compute its prompt, or at it, for the first time."""
        if leader.num_preemptions:
            return False
        if leader.status is RequestStatus.RUNNING:
            return leader.num_computed < leader.num_prompt_tokens
        return leader.status is RequestStatus.WAITING

    def _to_compute(self, leader: RequestState) -> int:
        rank = self._queue.ranks.get(leader)
        return leader.num_uncomputed + (rank[-1] if rank is not None else 0)

    def _release(self, draft: Draft, view: SchedulingView) -> None:
        """Who need not wait any longer is looked up anew, and may find another to wait for."""
        if not self._held:
            return
        for state, hold in list(self._held.items()):
            late = draft.now_s - self._since_s[state] >= self.max_hold_s
            if not late and not hold.is_over():
                continue
            del self._held[state]
            if state.status is RequestStatus.WAITING:
                self._join(draft, state, self._look_up(draft, view, state))

    def _let_wait(self, draft: Draft) -> None:
        """Take those out who wait for another; it takes the place of the first of them."""
        order: dict[RequestState, None] = {}
        present = set(draft.waiting)
        for state in draft.waiting:
            hold = self._held.get(state)
            if hold is None:
                order[state] = None
                continue
            if hold.leader in present:
                order[hold.leader] = None
            reason = f"{hold.leader.request_id} computes {hold.num_shared} tokens that it shares"
            draft.record(self.name, state, "wait", reason)
        draft.waiting[:] = order

    def _forget(self, left: list[RequestState]) -> None:
        for state in left:
            self._held.pop(state, None)
            self._since_s.pop(state, None)
            self._hits.pop(state.request_id, None)
        if len(self._leaders) > 2 * len(self._queue.ranks) + 256:
            self._leaders = {key: one for key, one in self._leaders.items() if self._is_computing(one)}


def _num_common(a: RequestState, b: RequestState) -> int:
    """Tokens at the beginning of both."""
    mine, theirs = a.tokens.tobytes(), b.tokens.tobytes()
    low, high = 0, min(len(a.tokens), len(b.tokens))
    while low < high:
        middle = (low + high + 1) // 2
        if mine.startswith(theirs[low * TOKEN_BYTES : middle * TOKEN_BYTES], low * TOKEN_BYTES):
            low = middle
        else:
            high = middle - 1
    return low


PLUGIN = PrefixCacheAwarePass
