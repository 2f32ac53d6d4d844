"""Goals of latency: earliest deadline first among those that can still make it, and steps short enough for
those that run.

Who can make it together is Moore's (1968) rule for the fewest late jobs on one machine, with Hodgson's proof.
"""

from __future__ import annotations

from heapq import heappop, heappush, heappushpop
from itertools import count

from sagellm.core.plan import Draft, RequestState
from sagellm.core.protocols.scheduler_ir import SchedulingView
from sagellm.core.types import RequestStatus
from sagellm.kvmgr.scheduler_ir._pace import StepPace
from sagellm.kvmgr.scheduler_ir._queue import ROOM_TO_FORGET, RankedQueue, Turns, hit_of, num_to_compute

BEGUN, IN_TIME, LATE = range(3)
"""Ranks: preempted with its first token out; can make its deadline; cannot, not beside the others, or has
none."""
DOUBT = 0.5
"""Who could not make it in this part of the time that it is thought to take is not thought of again."""
NEVER_S = float("inf")


class SLOAwarePass:
    """Sorts the waiting by deadline of their first token; those that cannot make it stand behind those that
    can.

    `ttft_s` and `tpot_s` are the goals of requests that bring none (None: they have none). Without a deadline
    a request stands behind those that make theirs. How long prompts take is learned from the steps taken.
    Only equals in priority change places; who has waited `max_wait_s` seconds gets a turn (`share`: see
    `Turns`). The token budget of a step is lowered so that the step takes at most `margin` times the shortest
    goal of time per token among the requests that run, but not below `min_prefill` tokens of prompts.
    """

    name = "slo_aware"
    quiet = True

    def __init__(
        self,
        ttft_s: float | None = None,
        tpot_s: float | None = None,
        max_wait_s: float = 30.0,
        *,
        share: float = 0.1,
        margin: float = 0.9,
        min_prefill: int = 128,
    ) -> None:
        self.ttft_s, self.tpot_s, self.margin, self.min_prefill = ttft_s, tpot_s, margin, min_prefill
        self.pace = StepPace()
        self._queue = RankedQueue()
        self._turns = Turns(max_wait_s, share)
        self._live: dict[RequestState, tuple[int, float, int, int]] = {}
        self._goals: list[tuple[float, int, RequestState]] = []
        self._count = count()
        self._due_s = NEVER_S
        self._num_goals = 0

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        waiting, queue = draft.waiting, self._queue
        if waiting or draft.chunks:
            self.pace.observe(view.last_step)
        if waiting or queue.ranks:
            changed = queue.see(waiting)
            self._note(draft, view)
            if self._live and (changed or draft.now_s > self._due_s):  # somebody came, left, or is too late
                self._rank(draft)
            queue.sort(waiting)
            self._turns.give(waiting, draft.now_s)
        if (waiting or draft.chunks) and draft.num_decodes:
            self._keep_pace(draft)

    def deadline_s(self, state: RequestState) -> float:
        """When its first token should be there; never without a goal."""
        ttft_s = state.request.slo.ttft_s
        if ttft_s is None:
            ttft_s = self.ttft_s
        return NEVER_S if ttft_s is None else state.request.arrival_s + ttft_s

    # -- who waits

    def _note(self, draft: Draft, view: SchedulingView) -> None:
        queue = self._queue
        for state in queue.arrived:
            priority, begun = state.request.priority, state.first_token_s is not None
            queue.ranks[state] = (-priority, BEGUN if begun else LATE, 0.0)
            deadline_s = self.deadline_s(state)
            if not begun and deadline_s < NEVER_S:
                cost = num_to_compute(state, hit_of(draft, view, state).num_tokens)
                self._live[state] = (-priority, deadline_s, next(self._count), cost)
        for state in queue.left:
            self._live.pop(state, None)
            self._note_goal(state)
        self._turns.note(queue.arrived, queue.left)

    def _rank(self, draft: Draft) -> None:
        """Walk by deadline; where one would be late, the longest of those before it gives way."""
        now_s, live = draft.now_s, self._live
        second = self.pace.prefill_s(1, draft.token_budget - draft.num_decodes)
        work_s = sum(chunk.num_tokens for chunk in draft.chunks.values()) * second
        chosen: list[tuple[float, int, RequestState]] = []
        self._due_s = NEVER_S
        for place, state in enumerate(sorted(live, key=live.__getitem__)):
            priority, deadline_s, _, cost = live[state]
            spend_s = cost * second
            self._queue.rerank(state, (priority, LATE, 0.0))
            if now_s + spend_s <= deadline_s:
                self._due_s = min(self._due_s, deadline_s - spend_s)
                work_s += spend_s
                if now_s + work_s <= deadline_s:
                    heappush(chosen, (-spend_s, place, state))
                else:
                    work_s += heappushpop(chosen, (-spend_s, place, state))[0]
            elif now_s + DOUBT * spend_s > deadline_s and self.pace.is_known:
                del live[state]
        for _, _, state in chosen:
            priority, deadline_s, _, _ = live[state]
            self._queue.rerank(state, (priority, IN_TIME, deadline_s))

    # -- who runs

    def _note_goal(self, state: RequestState) -> None:
        goal_s = state.request.slo.tpot_s if state.request.slo.tpot_s is not None else self.tpot_s
        if goal_s is not None and state.status is RequestStatus.RUNNING:
            heappush(self._goals, (goal_s, next(self._count), state))
            if len(self._goals) > 2 * self._num_goals + ROOM_TO_FORGET:
                # what ended may lie behind the smallest goal
                alive = {one[2]: one for one in self._goals if one[2].status is RequestStatus.RUNNING}
                self._goals = sorted(alive.values())
                self._num_goals = len(self._goals)

    def _keep_pace(self, draft: Draft) -> None:
        goals = self._goals
        while goals and goals[0][2].status is not RequestStatus.RUNNING:
            heappop(goals)
        if not goals or not self.pace.is_known:
            return
        room = max(self.min_prefill, self.pace.tokens_in(self.margin * goals[0][0]))
        if draft.num_decodes + room >= draft.token_budget:
            return
        draft.token_budget = draft.num_decodes + room
        for chunk in sorted(draft.chunks.values(), key=lambda chunk: -chunk.state.request.priority):
            chunk.num_tokens = min(chunk.num_tokens, room)
            room -= chunk.num_tokens
            if not chunk.num_tokens:
                draft.hold(chunk.state)
                draft.say(self.name, chunk.state, "hold", f"a step may take {goals[0][0]} s")


PLUGIN = SLOAwarePass
