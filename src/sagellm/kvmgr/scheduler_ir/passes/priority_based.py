"""Higher priority first; waiting raises priority; requests of equal priority are shared by client.

Priority that grows with the time waited is Kleinrock's (1964) time-dependent priority.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count, pairwise

from sagellm.core.plan import Draft, RequestState
from sagellm.core.protocols.scheduler_ir import ALWAYS_STABLE, SchedulingView, Stability
from sagellm.core.types import RequestStatus
from sagellm.kvmgr.scheduler_ir._queue import MAX_STALE, RankedQueue, prefix_hit
from sagellm.kvmgr.scheduler_ir.client_shares import ClientShares

SHORTEST_AGE_S = 1e-3


class PriorityBasedPass:
    """Sorts the waiting requests by level; equals keep their order.

    A request's level is its priority, plus that of its service class (`classes`), plus one for each `age_s`
    seconds that it has waited (None: no ageing). So no request is overtaken by one that arrives more than
    `age_s * (1 + difference of priority)` seconds later. The running requests are sorted by arrival, counted
    `age_s` seconds earlier for each level of priority; the last one is preempted first.

    With `preempt`, the first waiting request preempts running ones of lower priority and level, the last
    first, where rows or memory are short. Where only the token budget is short, it shortens their chunks.

    With `fair`, requests of the same priority are shared by client, by the rows that each has (see
    `ClientShares`), and `preempt` gives a client a row of one that has at least two more. Then only requests
    in their client's first round rise by ageing; otherwise a flood of requests would rise above all later
    ones.
    """

    name = "priority_based"

    def __init__(
        self,
        age_s: float | None = 300.0,
        classes: Mapping[str, int] | None = None,
        *,
        preempt: bool = False,
        watermark: int = 1,
        fair: bool = False,
    ) -> None:
        if age_s is not None and not SHORTEST_AGE_S <= age_s < math.inf:
            raise ValueError(f"age_s must be at least {SHORTEST_AGE_S}, or None for no ageing, got {age_s}")
        self.age_s, self.classes = age_s, dict(classes or {})
        self.preempt, self.watermark = preempt, watermark
        self._queue = RankedQueue()
        self._rises: list[tuple[float, int, RequestState, int]] = []  # heap: when a request rises, to what
        self._count = count()
        self._has_sorted_running = False
        self._lowest_running = sys.maxsize  # at most the lowest priority of a running request
        self._shares = ClientShares(self.priority) if fair else None
        self._is_sharing = False  # whether clients compete, so that rounds decide
        self._shared_order: list[RequestState] | None = None  # the waiting requests, as last arranged
        self._no_victim_for: RequestState | None = None  # a head that may not preempt any running request

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        waiting = draft.waiting
        has_changed = False
        if waiting or self._queue.ranks:
            has_changed = self._queue.update(waiting)
            for state in self._queue.arrived:
                self._set_level(state, self.level(state, draft.step.now_s), draft.step.now_s)
            if len(self._rises) > 2 * len(self._queue.ranks) + MAX_STALE:  # many no longer wait
                self._rises = [rise for rise in self._rises if rise[2] in self._queue.ranks]
                heapify(self._rises)
            has_changed |= self._raise_levels(draft.step.now_s)
        if self._shares is not None:
            arrived = self._queue.arrived if has_changed else ()
            has_changed |= self._shares.update(draft.running, arrived, view.max_num_seqs)
            if has_changed:
                self._shared_order, self._no_victim_for = None, None
                self._has_sorted_running &= not self._is_sharing
            self._is_sharing = self._shares.is_contested
        self._sort(draft)
        if self.preempt and waiting and draft.running:
            self._make_room(draft, view)

    def stable_until(self, draft: Draft, view: SchedulingView) -> Stability | None:
        """Stable until a request rises. None if the first waiting request may preempt."""
        waiting = draft.waiting
        if draft.step.num_new_running or not self._queue.is_current(waiting):
            return None
        if self._shares is not None and waiting and not self._shares.is_current(draft.running):
            return None
        self._sort(draft)
        if self.preempt and waiting and self._may_preempt_for(waiting[0]):
            return None
        return Stability(self._rises[0][0]) if waiting and self._rises else ALWAYS_STABLE

    def priority(self, state: RequestState) -> int:
        """The priority of the request and its service class, without ageing."""
        return state.request.priority + self.classes.get(state.request.service_class, 0)

    def batch_key(self, state: RequestState) -> tuple[float, float]:
        """Sort key of running requests; the smallest comes first."""
        arrival_s, priority = state.request.arrival_s, self.priority(state)
        if self.age_s is None:
            return (-priority, arrival_s)
        return (arrival_s - priority * self.age_s, arrival_s)

    def level(self, state: RequestState, now_s: float) -> int:
        """The priority of the request and its service class, plus ageing."""
        if self.age_s is None:
            return self.priority(state)
        return self.priority(state) + max(0, int((now_s - state.request.arrival_s) / self.age_s))

    def _set_level(self, state: RequestState, level: int, now_s: float) -> None:
        """Rank the request by this level, and note when it rises next."""
        if self.age_s is not None:
            num_rises = level - self.priority(state) + 1
            rises_s = state.request.arrival_s + num_rises * self.age_s
            if rises_s > now_s:  # else the clock is too far for floats to tell ages apart
                heappush(self._rises, (rises_s, next(self._count), state, level + 1))
        self._queue.rerank(state, -level)

    def _raise_levels(self, now_s: float) -> bool:
        """Raise the level of requests that waited long enough. Returns whether any did."""
        rises, ranks, has_risen = self._rises, self._queue.ranks, False
        while rises and rises[0][0] <= now_s:
            *_, state, level = heappop(rises)
            rank = ranks.get(state)
            has_level = rank is None or -rank >= level  # a request that waits again may have two entries
            if state.status is RequestStatus.WAITING and not has_level:
                self._set_level(state, max(level, self.level(state, now_s)), now_s)
                has_risen = True
        return has_risen

    # -- order

    def _sort(self, draft: Draft) -> None:
        """Sort waiting and running requests; by client where several share the batch."""
        if self._shared_order is None or not self._is_sharing:
            self._sort_running(draft)
        if not self._is_sharing:
            self._queue.sort(draft.waiting)
            return
        assert self._shares is not None
        if self._shared_order is None:
            level = partial(self._shared_level, now_s=draft.step.now_s)
            self._shared_order = self._shares.arrange(draft.running, draft.waiting, level)
        draft.waiting[:] = self._shared_order

    def _shared_level(self, state: RequestState, now_s: float) -> int:
        """The level, without ageing for a request in a later round of its client."""
        if self._is_sharing and self._shares is not None and self._shares.is_in_later_round(state):
            return self.priority(state)
        rank = self._queue.ranks.get(state)
        return self.level(state, now_s) if rank is None else -rank

    def _sort_running(self, draft: Draft) -> None:
        """Sort the running requests. Only new ones, at the end, can be out of order."""
        running = draft.running
        num_new = draft.step.num_new_running if self._has_sorted_running else len(running)
        if not num_new:
            return
        self._has_sorted_running = True
        tail = running[-num_new - 1 :]
        self._lowest_running = min(self._lowest_running, *(self.priority(state) for state in tail))
        if any(self.batch_key(a) > self.batch_key(b) for a, b in pairwise(tail)):
            running.sort(key=self.batch_key)

    # -- making room for the first waiting request

    def _make_room(self, draft: Draft, view: SchedulingView) -> None:
        head = draft.waiting[0]
        if not self._may_preempt_for(head):
            return
        if draft.preempted or draft.rejected or any(chunk.admits for chunk in draft.chunks.values()):
            return  # an earlier pass has decided this step
        computing = {s.request.group for s in draft.running if s.num_computed < s.num_prompt_tokens}
        if head.request.group is not None and head.request.group in computing:
            return  # it waits until its group has computed the shared prompt
        lower = [
            state for state in reversed(draft.running) if self._ranks_below(state, head, draft.step.now_s)
        ]
        if not lower:
            self._lowest_running = min(map(self.priority, draft.running))
            self._no_victim_for = head
            return
        hit = prefix_hit(draft, view, head)
        num_tokens = len(head.tokens) - hit.num_tokens
        reserved = len(draft.needing_block()) + self.watermark * len(draft.running)
        missing = view.kv.blocks_to_admit(hit, num_tokens) + reserved - view.kv.available_blocks()
        if missing > 0 or not view.num_free_rows:
            self._preempt_for(draft, view, head, lower, missing)
        else:
            self._shorten_chunks(draft, head, num_tokens)

    def _may_preempt_for(self, head: RequestState) -> bool:
        """False if it is known that no running request ranks below it."""
        return self.priority(head) > self._lowest_running or (
            self._is_sharing and head is not self._no_victim_for
        )

    def _ranks_below(self, state: RequestState, head: RequestState, now_s: float) -> bool:
        """Whether a running request may be preempted for the head. It must be of lower priority. It must also
        be of lower level, or it would be sorted before the head once it waits."""
        higher = self.priority(head) - self.priority(state)
        if higher == 0 and self._is_sharing:
            assert self._shares is not None
            return self._shares.is_in_later_round_than(state, head)
        return higher > 0 and self._shared_level(state, now_s) < self._shared_level(head, now_s)

    def _preempt_for(
        self, draft: Draft, view: SchedulingView, head: RequestState, lower: list[RequestState], missing: int
    ) -> None:
        """Preempt from the end until the head fits; none if that is not enough."""
        victims = []
        for state in lower:
            victims.append(state)
            missing -= view.kv.blocks_freed_by_preempting(state) + self.watermark
            if missing <= 0:
                break
        else:
            return
        for state in victims:
            draft.preempt(state)
            draft.record(self.name, state, "preempt", self._why(state, head))

    def _why(self, state: RequestState, head: RequestState) -> str:
        if self.priority(state) < self.priority(head):
            return f"{head.request_id} is of higher priority and waits"
        return f"{head.request_id} waits, and its client has fewer rows"

    def _shorten_chunks(self, draft: Draft, head: RequestState, num_tokens: int) -> None:
        """Shorten chunks of lower requests, to make room for the head's prompt. The last comes first. Each
        keeps one token, so that it makes progress even if the head is not admitted after all."""
        lack = min(num_tokens, draft.token_budget - draft.num_decodes)
        lack -= draft.token_budget - draft.num_tokens
        lower = [c for c in draft.chunks.values() if self._ranks_below(c.state, head, draft.step.now_s)]
        for chunk in sorted(lower, key=lambda chunk: self.batch_key(chunk.state), reverse=True):
            cut = min(lack, chunk.num_tokens - 1)
            if cut > 0:
                lack -= cut
                chunk.num_tokens -= cut
                draft.record(self.name, chunk.state, "shorten", self._why(chunk.state, head))


PLUGIN = PriorityBasedPass
