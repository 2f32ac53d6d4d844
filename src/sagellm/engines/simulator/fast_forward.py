"""`SimulatedEngine` takes many equal steps at once, where simulations need the speed.

Between two events (a request arrives, is admitted, ends, or is preempted) steps differ only in time and in
positions. `fast_forward` takes those steps without planning each one. The result is the same as with single
steps: the same times, decisions, events and counts of blocks, bit for bit
(`tests/benchmarks/simulate/test_fast_forward.py`). Only the ids of the blocks that a request gets may differ.

Every pass must say for how long its decisions stay the same (`StablePass.stable_until`). A step that evicts
takes its blocks at its own time, so that eviction policies see the clock that single steps show them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from sagellm.core.binding import Binding
from sagellm.core.plan import Chunk, Draft, ExecutionPlan, Prefill, RequestState, StepStart
from sagellm.core.protocols.scheduler_ir import (
    ALWAYS_STABLE,
    SchedulerPass,
    SchedulingView,
    Stability,
    StepFacts,
)
from sagellm.engines.commit import Finish, stop_reason
from sagellm.engines.engine import Engine

if TYPE_CHECKING:
    from sagellm.engines.simulator.backend import SimulatedBackend

MAX_STEPS = 256
"""Decode steps that are taken at once, at most."""


class EqualSteps(NamedTuple):
    """Steps that were taken at once.

    In each of them `num_decodes` requests decoded a token and `num_waiting` requests waited. `num_ended`
    requests ended with the last one. `times_s`: when the first step began, then when each step ended.
    `prefills[i]`: the chunk of a prompt that step i computed; empty if the steps only decoded.
    """

    num_decodes: int
    num_waiting: int
    times_s: Sequence[float]
    num_ended: int = 0
    prefills: Sequence[Prefill] = ()

    @property
    def num_steps(self) -> int:
        return len(self.times_s) - 1

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of a prompt that each step computed."""
        return self.prefills[0].num_tokens if self.prefills else 0


def joint_stability(order: Sequence[SchedulerPass], draft: Draft, view: SchedulingView) -> Stability | None:
    """For how long no pass changes its decisions; None if one cannot tell. The passes edit the draft."""
    stability = ALWAYS_STABLE
    for scheduler_pass in order:
        stable_until = getattr(scheduler_pass, "stable_until", None)
        promised: Stability | None = None if stable_until is None else stable_until(draft, view)
        if promised is None:
            return None
        stability = stability.and_also(promised)
    return stability


class SimulatedEngine(Engine):
    """An engine whose backend knows beforehand what steps take and draw."""

    backend: SimulatedBackend

    def fast_forward(self, until_s: float) -> EqualSteps | None:
        """Take all equal steps that begin before `until_s`, or do nothing and return None.

        All running requests decode in these steps, or all but one, whose prompt is computed beside them.
        They end with the step in which the first request finishes, or before the first step that is not
        equal, such as the first one that finds KV moved to or from a lower tier. Intermediate tokens are not
        reported. Requests that finish in the last step end normally.
        """
        table = self._request_table
        possible = len(table.decodes) and len(table.prefilling) <= 1 and self.kv.is_regular
        possible = possible and not table.limited
        if not possible or self._worker or self._outputs or self.speculation is not None:
            return None
        if self._kv_waits is not None:
            if not self._kv_waits.is_settled:
                return None
            until_s = min(until_s, self.backend.next_kv_report_s)
        draft = self._planner.draft(self._num_steps)
        stability = joint_stability(self.scheduler.order, draft, self.view)
        if stability is None:
            return None
        until_s = min(until_s, stability.until_s)
        if table.prefilling:
            [chunk] = draft.chunks.values()
            taken = self._take_prefills(chunk, until_s, same_cache=stability.same_cache)
        else:
            taken = self._take_decodes(until_s, same_cache=stability.same_cache)
        if taken is not None:
            self._num_steps += taken.num_steps
            last_step_s = taken.times_s[-1] - taken.times_s[-2]
            self.last_step = StepFacts(last_step_s, taken.num_decodes, taken.num_prefill_tokens)
        return taken

    # -- steps that only decode

    def _take_decodes(self, until_s: float, *, same_cache: bool) -> EqualSteps | None:
        batch = self._request_table.decodes
        before_first_end = batch.steps_below_length
        prices_s = self.backend.price_decodes(batch.positions(), min(before_first_end + 1, MAX_STEPS))
        times_s = list(accumulate(prices_s, initial=self.clock.now()))
        num_steps = bisect_left(times_s, until_s, hi=len(prices_s))
        num_steps = self._compute_decodes(prices_s[:num_steps], same_cache=same_cache)
        if not num_steps:
            return None
        num_decodes, num_waiting = len(batch), len(self._request_table.waiting)
        tokens = self.backend.repeated_tokens(batch.rows)
        if before_first_end:
            batch.append_repeated(tokens, min(num_steps, before_first_end))
        num_ended = self._end_last(tokens) if num_steps > before_first_end else 0
        return EqualSteps(num_decodes, num_waiting, times_s[: num_steps + 1], num_ended)

    def _compute_decodes(self, prices_s: Sequence[float], *, same_cache: bool) -> int:
        """Take the blocks of these steps and let their time pass; returns their number.

        The steps end before one for which memory is short and, with `same_cache`, after one that evicts. Free
        blocks are taken for many steps together.
        """
        kv, batch, num_steps, num_done = self.kv, self._request_table.decodes, len(prices_s), 0
        unserved: list[RequestState] = []
        for step, indices in sorted(batch.block_boundaries(num_steps).items()):
            states = [batch.states[i] for i in indices]
            if len(unserved) + len(states) <= kv.pool.num_free and kv.quota is None:
                unserved += states
                continue
            kv.append_blocks(unserved)
            unserved = []
            if kv.quota is not None or len(states) > kv.quotes.available_blocks():
                num_steps = step
                break
            self.backend.pass_decodes(prices_s[num_done:step])
            num_done, version = step, kv.quotes.version
            kv.append_blocks(states)
            if same_cache and kv.quotes.version != version:
                num_steps = step + 1
                break
        kv.append_blocks(unserved)
        self.backend.pass_decodes(prices_s[num_done:num_steps])
        return num_steps

    def _end_last(self, tokens: Sequence[int]) -> int:
        """Append each request's token of the last step; returns how many requests end."""
        batch, ended = self._request_table.decodes, {}
        for index in batch.advance(tokens):
            state, token_id = batch.states[index], tokens[index]
            reason = stop_reason(state, token_id, self.max_model_len)
            if reason is not None:
                ended[state] = Finish(state, reason, (token_id,))
        for state in self._request_table.in_order(ended):
            self._finish(ended[state])
        self._take_outputs()
        return len(ended)

    # -- steps that also compute the middle of a prompt

    def _take_prefills(self, chunk: Chunk, until_s: float, *, same_cache: bool) -> EqualSteps | None:
        """Take steps with chunks as long as `chunk`, which fill the token budget.

        They end before the step that completes the prompt or ends a request.
        """
        kv, clock, batch = self.kv, self.clock, self._request_table.decodes
        state, size, version = chunk.state, chunk.num_tokens, self.kv.quotes.version
        num_steps = max(0, min(batch.steps_below_length, (state.num_uncomputed - 1) // size))
        boundaries, positions = batch.block_boundaries(num_steps), batch.positions()
        times_s, prefills = [clock.now()], []
        for number in range(num_steps):
            has_changed = not kv.is_regular or (same_cache and kv.quotes.version != version)
            needing_block = [batch.states[i] for i in boundaries.get(number, ())]
            price = len(needing_block) + kv.quotes.blocks_to_append(state, size)
            fits = kv.quota is None and price <= kv.quotes.available_blocks()
            if clock.now() >= until_s or has_changed or not fits:
                break
            chunk = Chunk(state, state.num_computed, size)
            draft = Draft(
                StepStart(self._num_steps + number, clock.now()), 0, [], [], {state.request_id: chunk}
            )
            binding = Binding(draft)
            kv.append_blocks(needing_block)
            kv.bind(binding)
            prefill = Prefill(state.row, state.request_id, state.num_computed, size, samples=False)
            self.backend.execute(
                ExecutionPlan(
                    draft.step.number,
                    decode_rows=batch.rows,
                    decode_positions=tuple([position + number for position in positions]),
                    prefills=(prefill,),
                )
            )
            kv.executed(binding)
            self._request_table.advance(state, size)
            kv.commit(state)
            times_s.append(clock.now())
            prefills.append(prefill)
        if not prefills:
            return None
        batch.append_repeated(self.backend.repeated_tokens(batch.rows), len(prefills))
        return EqualSteps(len(batch), len(self._request_table.waiting), times_s, 0, prefills)
