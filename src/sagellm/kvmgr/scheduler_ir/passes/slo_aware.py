"""Latency goals: earliest deadline first, and steps short enough for the running requests.

Which of the waiting requests can meet their deadlines together is decided by Moore and Hodgson's (1968) rule
for the fewest late jobs on one machine.
"""

from __future__ import annotations

from heapq import heappop, heappush, heappushpop
from itertools import count

from sagellm.core.plan import Draft, RequestState
from sagellm.core.protocols.scheduler_ir import SchedulingView, Stability, stable_while_all_decode
from sagellm.core.types import RequestStatus
from sagellm.kvmgr.scheduler_ir._queue import (
    MAX_STALE,
    RankedQueue,
    StarvationGuard,
    num_to_compute,
    prefix_hit,
)
from sagellm.kvmgr.scheduler_ir._step_time import StepTimeModel

BEGUN, IN_TIME, LATE = range(3)
"""Ranks: preempted after its first token; can meet its deadline beside the others; cannot, or has none."""
DOUBT = 0.5
"""A request that would be late even in this part of its expected time is never ranked in time again."""
NEVER_S = float("inf")
GRACE_S = 8.0
"""Seconds that short steps may cost beyond their share before full steps must make up for it."""
BACKLOG = 0.02
"""A queue shorter than this share of the requests served since it was last empty counts as no backlog."""


class SLOAwarePass:
    """Sorts waiting requests by deadline, and shortens steps for time per token.

    Requests that can meet the deadline of their first token come first; the others, and those without a
    deadline, follow. `ttft_s` and `tpot_s` are the goals, in seconds, of requests that have none of their own
    (None: they stay without). The time of prompts is learned from past steps. Requests change places only
    with others of the same priority. An overdue request goes first (`max_wait_s`, `share`: see
    `StarvationGuard`).

    The token budget is lowered so that the step takes at most `margin` times the shortest goal of time per
    token among the running requests, but leaves at least `min_prefill` prompt tokens. A request whose first
    token was late has missed its goals and does not count.

    Short steps cost throughput, because every step has a fixed cost (reading the weights, launching). While
    requests wait, this cost may be `1 - min_throughput` of the time plus 8 s; then full steps follow until it
    is made up for. It counts at most the time that the waiting requests would take, since full steps would
    have served no others. The cost is an estimate: 0.92 kept 0.9 of the throughput of strategy `vllm-like`
    in simulations. With 0, the goals always come first.
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
        self.step_time = StepTimeModel()
        self._queue = RankedQueue()
        self._guard = StarvationGuard(max_wait_s, share)
        # waiting requests that may meet a deadline: -priority, deadline, order, tokens to compute
        self._with_deadline: dict[RequestState, tuple[int, float, int, int]] = {}
        self._due_s = NEVER_S  # when the first of them becomes late
        self._goals: list[tuple[float, int, RequestState]] = []  # heap: goals of running requests
        self._num_goals = 0  # after the last removal of finished requests
        self._count = count()
        self._num_prefill: int | None = None  # prompt tokens of the last step, if it was shortened
        self._lost_s = 0.0
        self._busy_s = 0.0  # since the queue was last empty, as `_num_served`
        self._num_served = 0
        self._is_catching_up = False

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        waiting, queue = draft.waiting, self._queue
        if (waiting or draft.chunks) and self.step_time.observe(view.last_step):
            self._charge(draft, view)
        if not waiting:
            self._lost_s = self._busy_s = 0.0
            self._num_served = 0
        if waiting or queue.ranks:
            changed = queue.update(waiting)
            self._note(draft, view)
            became_late = draft.step.now_s > self._due_s
            if self._with_deadline and (changed or became_late):
                self._rank(draft)
            queue.sort(waiting)
            self._guard.promote(waiting, draft.step.now_s)
        if (waiting or draft.chunks) and draft.num_decodes:
            self._shorten_step(draft)
        else:
            self._num_prefill = None

    def stable_until(self, draft: Draft, view: SchedulingView) -> Stability | None:
        return stable_while_all_decode(draft)

    def deadline_s(self, state: RequestState) -> float:
        """The time by which its first token is due; infinite without a goal."""
        ttft_s = state.request.slo.ttft_s
        if ttft_s is None:
            ttft_s = self.ttft_s
        return NEVER_S if ttft_s is None else state.request.arrival_s + ttft_s

    # -- the queue

    def _note(self, draft: Draft, view: SchedulingView) -> None:
        queue = self._queue
        for state in queue.arrived:
            request = state.request
            priority, begun = request.priority, state.first_token_s is not None or bool(request.generated)
            queue.ranks[state] = (-priority, BEGUN if begun else LATE, 0.0)
            deadline_s = self.deadline_s(state)
            if not begun and deadline_s < NEVER_S:
                cost = num_to_compute(state, prefix_hit(draft, view, state).num_tokens)
                self._with_deadline[state] = (-priority, deadline_s, next(self._count), cost)
        for state in queue.left:
            self._with_deadline.pop(state, None)
            self._note_goal(state)
        self._num_served += len(queue.left)
        self._guard.note(queue.arrived, queue.left)

    def _rank(self, draft: Draft) -> None:
        """Choose requests by deadline. Where one would be late, drop the longest chosen so far."""
        now_s, candidates = draft.step.now_s, self._with_deadline
        token_budget = (
            draft.token_budget - draft.num_decodes if self._num_prefill is None else self._num_prefill
        )
        token_s = self.step_time.prefill_s(1, token_budget, draft.num_decodes)
        work_s = sum(chunk.num_tokens for chunk in draft.chunks.values()) * token_s
        chosen: list[tuple[float, int, RequestState]] = []
        self._due_s = NEVER_S
        for position, state in enumerate(sorted(candidates, key=candidates.__getitem__)):
            priority, deadline_s, _, cost = candidates[state]
            spend_s = cost * token_s
            self._queue.rerank(state, (priority, LATE, 0.0))
            if now_s + spend_s <= deadline_s:
                self._due_s = min(self._due_s, deadline_s - spend_s)
                work_s += spend_s
                if now_s + work_s <= deadline_s:
                    heappush(chosen, (-spend_s, position, state))
                else:  # the heap holds negative times: adding that of the longest removes it
                    work_s += heappushpop(chosen, (-spend_s, position, state))[0]
            elif now_s + DOUBT * spend_s > deadline_s and self.step_time.is_known:
                del candidates[state]
        for _, _, state in chosen:
            priority, deadline_s, _, _ = candidates[state]
            self._queue.rerank(state, (priority, IN_TIME, deadline_s))

    # -- running requests

    def _note_goal(self, state: RequestState) -> None:
        goal_s = state.request.slo.tpot_s if state.request.slo.tpot_s is not None else self.tpot_s
        if goal_s is not None and state.status is RequestStatus.RUNNING:
            heappush(self._goals, (goal_s, next(self._count), state))
            if len(self._goals) > 2 * self._num_goals + MAX_STALE:
                # finished requests may lie behind the smallest goal
                alive = {goal[2]: goal for goal in self._goals if goal[2].status is RequestStatus.RUNNING}
                self._goals = sorted(alive.values())
                self._num_goals = len(self._goals)

    def _shorten_step(self, draft: Draft) -> None:
        goals, self._num_prefill = self._goals, None
        while goals and not self._counts(goals[0][2], draft.step.now_s):
            heappop(goals)
        if not goals or not self.step_time.is_known:
            return
        goal_s = self.margin * goals[0][0]
        num_prefill = max(self.min_prefill, self.step_time.tokens_in(goal_s, draft.num_decodes))
        self._is_catching_up = self._lost_s > (0.0 if self._is_catching_up else GRACE_S)
        if self._is_catching_up or draft.num_decodes + num_prefill >= draft.token_budget:
            return
        self._num_prefill = num_prefill
        draft.token_budget = draft.num_decodes + num_prefill
        for chunk in sorted(draft.chunks.values(), key=lambda chunk: -chunk.state.request.priority):
            chunk.num_tokens = min(chunk.num_tokens, num_prefill)
            num_prefill -= chunk.num_tokens
            if not chunk.num_tokens:
                draft.hold(chunk.state)
                draft.record(self.name, chunk.state, "hold", f"a step may take {goals[0][0]} s")

    def _counts(self, state: RequestState, now_s: float) -> bool:
        """Whether the request runs and can still meet its goals."""
        first_s = now_s if state.first_token_s is None else state.first_token_s
        in_time = bool(state.request.generated) or first_s <= self.deadline_s(state)
        return state.status is RequestStatus.RUNNING and in_time

    # -- the cost of short steps

    def _charge(self, draft: Draft, view: SchedulingView) -> None:
        """Add to `_lost_s` what the last step cost beyond its allowance. The cost is the part of a step's
        fixed time that full steps would have saved, and the allowance is `1 - min_throughput` of its time.
        `_lost_s` is at most the time that the waiting requests would take."""
        facts, lost_s = view.last_step, 0.0
        if self._num_prefill is not None and facts.num_prefill_tokens:
            of_prompts = facts.num_prefill_tokens / view.max_batched_tokens
            of_decodes = facts.num_decodes / self._full_batch(draft, view)
            lost_s = self.step_time.fixed_s * max(0.0, 1 - max(of_prompts, of_decodes))
        self._busy_s += facts.duration_s
        lost_s += self._lost_s - (1 - self.min_throughput) * facts.duration_s
        if self._num_served:
            lost_s = min(lost_s, self._busy_s * (len(draft.waiting) / self._num_served - BACKLOG))
        self._lost_s = max(0.0, lost_s)

    def _full_batch(self, draft: Draft, view: SchedulingView) -> float:
        """How many requests would run together if prompts were computed without delay. All of them, as far as
        rows last, and memory by the blocks that the running ones hold."""
        running = max(1, len(draft.running))
        used = max(1, view.kv.num_blocks - view.kv.available_blocks())
        by_memory = running * view.kv.num_blocks / used
        return max(1.0, min(view.max_num_seqs, by_memory, running + len(draft.waiting)))


PLUGIN = SLOAwarePass
