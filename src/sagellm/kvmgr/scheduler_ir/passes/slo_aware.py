"""Goals of latency: earliest deadline first among those that can still make it, and steps short enough for
those that run.

Who can make it together is Moore's (1968) rule for the fewest late jobs on one machine, with Hodgson's proof.
"""

from __future__ import annotations

from heapq import heappop, heappush, heappushpop
from itertools import count

from sagellm.core.plan import Draft, RequestState
from sagellm.core.protocols.scheduler_ir import SchedulingView, Stability, stable_while_all_decode
from sagellm.core.types import RequestStatus
from sagellm.kvmgr.scheduler_ir._pace import StepPace
from sagellm.kvmgr.scheduler_ir._queue import ROOM_TO_FORGET, RankedQueue, Turns, hit_of, num_to_compute

BEGUN, IN_TIME, LATE = range(3)
"""Ranks: preempted with its first token out; can make its deadline; cannot, not beside the others, or has
none."""
DOUBT = 0.5
"""Who could not make it in this part of the time that it is thought to take is not thought of again."""
NEVER_S = float("inf")
GRACE_S = 8.0
"""Seconds that short steps may cost beyond their share before full steps make up for it."""
BACKLOG = 0.02
"""A queue of this share of the requests served since it was last empty is no loss of throughput."""


class SLOAwarePass:
    """Sorts the waiting by deadline of their first token; those that cannot make it stand behind those that
    can.

    `ttft_s` and `tpot_s` are the goals of requests that bring none (None: they have none). Without a deadline
    a request stands behind those that make theirs. How long prompts take is learned from the steps taken.
    Only equals in priority change places; who has waited `max_wait_s` seconds gets a turn (`share`: see
    `Turns`).

    The token budget of a step is lowered so that the step takes at most `margin` times the shortest goal of
    time per token among the running requests, but not below `min_prefill` tokens of prompts. A request whose
    first token was late does not count: its goal is missed already. Short steps cost throughput, since each
    step has a fixed cost (reading the weights, launching). While requests wait, that may be
    `1 - min_throughput` of the time, and 8 s; then full steps follow until it is made up for. It is at most
    the time that the waiting requests would take, since full steps would have served no others. The cost is
    an estimate: 0.92 kept 0.9 of the throughput of `vllm-like` in simulations. 0 puts the goals first.
    """

    name = "slo_aware"

    def __init__(
        self,
        ttft_s: float | None = None,
        tpot_s: float | None = None,
        max_wait_s: float = 30.0,
        *,
        share: float = 0.1,
        margin: float = 0.9,
        min_prefill: int = 128,
        min_throughput: float = 0.92,
    ) -> None:
        if not 0 <= min_throughput < 1:
            raise ValueError(f"min_throughput must be in [0, 1), got {min_throughput}")
        self.ttft_s, self.tpot_s, self.margin, self.min_prefill = ttft_s, tpot_s, margin, min_prefill
        self.min_throughput = min_throughput
        self.pace = StepPace()
        self._queue = RankedQueue()
        self._turns = Turns(max_wait_s, share)
        self._live: dict[RequestState, tuple[int, float, int, int]] = {}
        self._goals: list[tuple[float, int, RequestState]] = []
        self._count = count()
        self._due_s = NEVER_S
        self._num_goals = 0
        self._room: int | None = None
        self._lost_s = 0.0
        self._busy_s = 0.0  # since the queue was last empty, as `_num_served`
        self._num_served = 0
        self._catches_up = False

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        waiting, queue = draft.waiting, self._queue
        if (waiting or draft.chunks) and self.pace.observe(view.last_step):
            self._charge(draft, view)
        if not waiting:
            self._lost_s = self._busy_s = 0.0
            self._num_served = 0
        if waiting or queue.ranks:
            changed = queue.see(waiting)
            self._note(draft, view)
            if self._live and (changed or draft.now_s > self._due_s):  # somebody came, left, or is too late
                self._rank(draft)
            queue.sort(waiting)
            self._turns.give(waiting, draft.now_s)
        if (waiting or draft.chunks) and draft.num_decodes:
            self._keep_pace(draft)
        else:
            self._room = None

    def stable_until(self, draft: Draft, view: SchedulingView) -> Stability | None:
        return stable_while_all_decode(draft)

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
        self._num_served += len(queue.left)
        self._turns.note(queue.arrived, queue.left)

    def _rank(self, draft: Draft) -> None:
        """Walk by deadline; where one would be late, the longest of those before it gives way."""
        now_s, live = draft.now_s, self._live
        room = draft.token_budget - draft.num_decodes if self._room is None else self._room
        second = self.pace.prefill_s(1, room, draft.num_decodes)
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
        goals, self._room = self._goals, None
        while goals and not self._counts(goals[0][2], draft.now_s):
            heappop(goals)
        if not goals or not self.pace.is_known:
            return
        room = max(self.min_prefill, self.pace.tokens_in(self.margin * goals[0][0], draft.num_decodes))
        self._catches_up = self._lost_s > (0.0 if self._catches_up else GRACE_S)
        if self._catches_up or draft.num_decodes + room >= draft.token_budget:
            return
        self._room = room
        draft.token_budget = draft.num_decodes + room
        for chunk in sorted(draft.chunks.values(), key=lambda chunk: -chunk.state.request.priority):
            chunk.num_tokens = min(chunk.num_tokens, room)
            room -= chunk.num_tokens
            if not chunk.num_tokens:
                draft.hold(chunk.state)
                draft.record(self.name, chunk.state, "hold", f"a step may take {goals[0][0]} s")

    def _counts(self, state: RequestState, now_s: float) -> bool:
        """Whether it runs and can still meet its goals."""
        first_s = now_s if state.first_token_s is None else state.first_token_s
        return state.status is RequestStatus.RUNNING and first_s <= self.deadline_s(state)

    # -- what short steps cost

    def _charge(self, draft: Draft, view: SchedulingView) -> None:
        """Add to `_lost_s` what the last step cost beyond `1 - min_throughput` of its time: of the time that
        any step takes, the part for which full steps would not have been needed. At most the time that the
        requests waiting now would take."""
        facts, lost_s = view.last_step, 0.0
        if self._room is not None and facts.num_prefill_tokens:
            of_prompts = facts.num_prefill_tokens / view.max_batched_tokens
            of_decodes = facts.num_decodes / self._full_batch(draft, view)
            lost_s = self.pace.fixed_s * max(0.0, 1 - max(of_prompts, of_decodes))
        self._busy_s += facts.duration_s
        lost_s += self._lost_s - (1 - self.min_throughput) * facts.duration_s
        if self._num_served:
            lost_s = min(lost_s, self._busy_s * (len(draft.waiting) / self._num_served - BACKLOG))
        self._lost_s = max(0.0, lost_s)

    def _full_batch(self, draft: Draft, view: SchedulingView) -> float:
        """Requests that would run together if prompts were computed without delay: all, as far as rows and
        memory go, by what those that run hold."""
        running = max(1, len(draft.running))
        used = max(1, view.kv.num_blocks - view.kv.available_blocks())
        by_memory = running * view.kv.num_blocks / used
        return max(1.0, min(view.max_num_seqs, by_memory, running + len(draft.waiting)))


PLUGIN = SLOAwarePass
