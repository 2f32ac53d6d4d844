"""Classes of service with ageing: higher priority first, long waiting raises it; equals share by client.

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
from sagellm.kvmgr.scheduler_ir._clients import ClientShares
from sagellm.kvmgr.scheduler_ir._queue import ROOM_TO_FORGET, RankedQueue, hit_of

SHORTEST_AGE_S = 1e-3


class PriorityBasedPass:
    """Sorts the waiting requests by level, equals staying in their order. A level is the request's priority,
    plus that of its class of service (`classes`), plus one for each `age_s` seconds that it has waited (None:
    no ageing).

    So no request is overtaken by one that comes more than `age_s * (1 + difference of priority)` seconds
    later. The running requests are sorted by arrival, `age_s` seconds earlier for each level of priority: the
    last one is preempted first. With `preempt`, the first waiting request preempts running ones of lower
    priority and level, the last first, where rows or memory are short, and takes their share of the token
    budget.

    With `fair`, clients take turns among requests of the same priority, by the rows that each has (see
    `ClientShares`), and `preempt` gives a client a row of one that has at least two more. Then only requests
    of a client's first turn rise by ageing: or a flood would rise above all that comes later.
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
        self.age_s, self.classes, self.preempt, self.watermark = (
            age_s,
            dict(classes or {}),
            preempt,
            watermark,
        )
        self._queue = RankedQueue()
        self._birthdays: list[tuple[float, int, RequestState]] = []
        self._count = count()
        self._has_sorted = False
        self._lowest = sys.maxsize
        self._shares = ClientShares(self.priority) if fair else None
        self._is_sharing = False
        self._in_order: list[RequestState] | None = None
        self._nobody_for: RequestState | None = None

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        waiting = draft.waiting
        has_changed = False
        if waiting or self._queue.ranks:
            has_changed = self._queue.see(waiting)
            for state in self._queue.arrived:
                self._age(state, self.level(state, draft.now_s), draft.now_s)
            self._forget_gone()
            has_changed |= self._grow_older(draft.now_s)
        if self._shares is not None:
            arrived = self._queue.arrived if has_changed else ()
            has_changed |= self._shares.see(draft.running, arrived, view.max_num_seqs)
            if has_changed:
                self._in_order, self._nobody_for = None, None
                self._has_sorted &= not self._is_sharing
            self._is_sharing = self._shares.is_contested
        self._sort(draft)
        if self.preempt and waiting and draft.running:
            self._make_way(draft, view)

    def stable_until(self, draft: Draft, view: SchedulingView) -> Stability | None:
        """Until somebody rises; where nobody of lower priority runs who would have to make way."""
        waiting = draft.waiting
        if draft.num_new_running or not self._queue.knows(waiting):
            return None
        if self._shares is not None and waiting and not self._shares.knows(draft.running):
            return None
        self._sort(draft)
        if self.preempt and waiting and self._may_push_out(waiting[0]):
            return None
        return Stability(self._birthdays[0][0]) if waiting and self._birthdays else ALWAYS_STABLE

    def priority(self, state: RequestState) -> int:
        """Of the request and its class, without ageing."""
        return state.request.priority + self.classes.get(state.request.service_class, 0)

    def standing(self, state: RequestState) -> tuple[float, float]:
        """The order of the running: smaller stands further ahead."""
        arrival_s, priority = state.request.arrival_s, self.priority(state)
        if self.age_s is None:
            return (-priority, arrival_s)
        return (arrival_s - priority * self.age_s, arrival_s)

    def level(self, state: RequestState, now_s: float) -> int:
        """Of the request and its class, and what ageing adds."""
        if self.age_s is None:
            return self.priority(state)
        return self.priority(state) + max(0, int((now_s - state.request.arrival_s) / self.age_s))

    def _age(self, state: RequestState, level: int, now_s: float) -> None:
        """It has this level from now on, until it rises next."""
        if self.age_s is not None:
            years = level - self.priority(state) + 1
            birthday_s = state.request.arrival_s + years * self.age_s
            if birthday_s > now_s:  # else the clock is too far for floats to tell ages apart
                heappush(self._birthdays, (birthday_s, next(self._count), state))
        self._queue.rerank(state, -level)

    def _grow_older(self, now_s: float) -> bool:
        """Whether a request has risen."""
        birthdays, ranks, has_risen = self._birthdays, self._queue.ranks, False
        while birthdays and birthdays[0][0] <= now_s:
            state = heappop(birthdays)[2]
            if state.status is RequestStatus.WAITING and state in ranks:
                self._age(state, max(1 - ranks[state], self.level(state, now_s)), now_s)
                has_risen = True
        return has_risen

    def _forget_gone(self) -> None:
        """Those who wait no more are not kept until their next birthday."""
        if len(self._birthdays) > 2 * len(self._queue.ranks) + ROOM_TO_FORGET:
            self._birthdays = [one for one in self._birthdays if one[2] in self._queue.ranks]
            heapify(self._birthdays)

    # -- order

    def _sort(self, draft: Draft) -> None:
        """The waiting and the running; clients in turns, where several share."""
        if self._in_order is None or not self._is_sharing:
            self._sort_running(draft)
        if not self._is_sharing:
            self._queue.sort(draft.waiting)
            return
        assert self._shares is not None
        if self._in_order is None:
            level = partial(self._level_in_turn, now_s=draft.now_s)
            self._in_order = self._shares.arrange(draft.running, draft.waiting, level)
        draft.waiting[:] = self._in_order

    def _level_in_turn(self, state: RequestState, now_s: float) -> int:
        """The level by which it competes: in a later turn of its client it does not rise."""
        if self._is_sharing and self._shares is not None and self._shares.is_late(state):
            return self.priority(state)
        rank = self._queue.ranks.get(state)
        return self.level(state, now_s) if rank is None else -rank

    def _sort_running(self, draft: Draft) -> None:
        """Only those that have just entered, at the end, can be out of order."""
        running = draft.running
        num_new = draft.num_new_running if self._has_sorted else len(running)
        if not num_new:
            return
        self._has_sorted = True
        tail = running[-num_new - 1 :]
        self._lowest = min(self._lowest, *(self.priority(state) for state in tail))
        if any(self.standing(a) > self.standing(b) for a, b in pairwise(tail)):
            running.sort(key=self.standing)

    # -- making way

    def _make_way(self, draft: Draft, view: SchedulingView) -> None:
        head = draft.waiting[0]
        if not self._may_push_out(head):
            return
        if draft.preempted or draft.rejected or any(chunk.admits for chunk in draft.chunks.values()):
            return  # the step is decided already
        if head.request.group is not None and head.request.group in _groups_in_prefill(draft):
            return  # it waits for the prompt that they share
        lower = [state for state in reversed(draft.running) if self._gives_way(state, head, draft.now_s)]
        if not lower:
            self._lowest = min(map(self.priority, draft.running))
            self._nobody_for = head
            return
        hit = hit_of(draft, view, head)
        num_tokens = len(head.tokens) - hit.num_tokens
        missing = (
            view.kv.blocks_to_admit(hit, num_tokens) - view.kv.available_blocks() + len(draft.needing_block())
        )
        missing += self.watermark * len(draft.running)
        if missing > 0 or not view.num_free_rows:
            self._push_out(draft, view, head, lower, missing)
        else:
            self._make_budget(draft, head, num_tokens)

    def _may_push_out(self, head: RequestState) -> bool:
        """False where it is known that no running request gives way to it."""
        return self.priority(head) > self._lowest or (self._is_sharing and head is not self._nobody_for)

    def _gives_way(self, state: RequestState, head: RequestState, now_s: float) -> bool:
        """By level too, as the waiting are sorted: or it would come back before the head."""
        higher = self.priority(head) - self.priority(state)
        if higher == 0 and self._is_sharing:
            assert self._shares is not None
            return self._shares.gives_way(state, head)
        return higher > 0 and self._level_in_turn(state, now_s) < self._level_in_turn(head, now_s)

    def _push_out(
        self, draft: Draft, view: SchedulingView, head: RequestState, lower: list[RequestState], missing: int
    ) -> None:
        """Preempt from the end until the head fits; nobody where that is not enough."""
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
        return f"{head.request_id} waits, whose client has fewer rows"

    def _make_budget(self, draft: Draft, head: RequestState, num_tokens: int) -> None:
        """Shorten the chunks of lower priority, the last first, so that the head's prompt is computed now. A
        token is left to each, so that nobody stands still should the head not be admitted after all."""
        lack = min(num_tokens, draft.token_budget - draft.num_decodes)
        lack -= draft.token_budget - draft.num_tokens
        lower = [one for one in draft.chunks.values() if self._gives_way(one.state, head, draft.now_s)]
        for chunk in sorted(lower, key=lambda chunk: self.standing(chunk.state), reverse=True):
            cut = min(lack, chunk.num_tokens - 1)
            if cut > 0:
                lack -= cut
                chunk.num_tokens -= cut
                draft.record(self.name, chunk.state, "shorten", self._why(chunk.state, head))


def _groups_in_prefill(draft: Draft) -> set[str | None]:
    return {one.request.group for one in draft.running if one.num_computed < one.num_prompt_tokens}


PLUGIN = PriorityBasedPass
