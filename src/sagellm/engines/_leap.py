"""Many decode steps at once, for simulations: the steps that an engine would take one by one while nothing
but decoding happens, without planning each. Requests may wait meanwhile, if every pass says for how long it
would let nobody in.

Missing blocks are evicted at the moment of the step that needs them and in its order, so that the books, the
clock and the policies see what single steps would show them; which of the free blocks a request gets is all
that may differ.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol, runtime_checkable

from sagellm.core.clock import Clock
from sagellm.core.plan import ExecutionPlan, Prefill, RequestState, StepResult
from sagellm.core.types import FinishReason
from sagellm.engines._outcome import stop_reason
from sagellm.engines._request_table import RequestTable
from sagellm.kvmgr.manager import KVCacheManager
from sagellm.kvmgr.scheduler_ir import DecodeBatch, PassPipeline
from sagellm.kvmgr.scheduler_ir.quiet import Stability, knows_queues

MOST_STEPS = 256


@runtime_checkable
class LeapingBackend(Protocol):
    """A backend that knows what decode steps will take before they are done, and whose tokens do not depend
    on KV. It keeps no block tables."""

    def execute(self, plan: ExecutionPlan) -> StepResult: ...

    def price_decodes(self, positions: Sequence[int], num_steps: int) -> Sequence[float]:
        """Seconds of each of so many steps in a row, the rows being at those positions in the first; or of
        fewer."""
        ...

    def pass_decodes(self, step: int, rows: Sequence[int], seconds: Sequence[float]) -> None:
        """Some such steps, from number `step` on: the clock moves by so many seconds, one after the other."""
        ...

    def repeated(self, rows: Sequence[int]) -> Sequence[int]:
        """The token that each row draws in every one of these steps."""
        ...


class Leap(NamedTuple):
    """`num_steps` steps, in each of which `num_decodes` requests decoded one token while `num_waiting`
    waited; in the last of them those of `ended` drew their last. `moments_s`: when the first began, and when
    each ended. `prefills`: what each step computed of a prompt, where they did."""

    first_step: int
    num_decodes: int
    num_waiting: int
    moments_s: Sequence[float]
    ended: Sequence[tuple[RequestState, int, FinishReason]] = ()
    prefills: Sequence[Prefill] = ()

    @property
    def num_steps(self) -> int:
        return len(self.moments_s) - 1

    @property
    def num_prefill_tokens(self) -> int:
        """Of each step."""
        return self.prefills[0].num_tokens if self.prefills else 0

    @property
    def last_s(self) -> float:
        """Seconds of the last step."""
        return self.moments_s[-1] - self.moments_s[-2]


def can_leap(scheduler: PassPipeline, kv: KVCacheManager, roster: RequestTable) -> bool:
    """Whether all who run decode, all but one at most, and it is worth to ask the passes for how long nothing
    else will happen."""
    if not len(roster.decodes) or len(roster.prefilling) > 1 or not kv.is_regular:
        return False
    return not (roster.waiting or roster.prefilling) or knows_queues(scheduler.order)


def leap(
    backend: LeapingBackend,
    kv: KVCacheManager,
    roster: RequestTable,
    clock: Clock,
    first_step: int,
    until_s: float,
    quiet: Stability,
    max_model_len: int,
) -> Leap | None:
    """Decode steps that begin before `until_s`, and while the passes are `quiet`: up to the one in which the
    first request ends, or before memory is short."""
    batch, began_s = roster.decodes, clock.now()
    num_regular = batch.num_regular
    prices_s = backend.price_decodes(batch.positions(), min(num_regular + 1, MOST_STEPS))
    moments_s = list(accumulate(prices_s, initial=began_s))
    planned = bisect_left(moments_s, min(until_s, quiet.until_s), hi=len(prices_s))
    passed = _Steps(backend, kv, batch, first_step, prices_s)
    num_steps = passed.take(planned, same_cache=quiet.same_cache)
    if not num_steps:
        return None
    num_decodes, tokens = len(batch), backend.repeated(batch.rows)
    ended = _draw(roster, tokens, num_steps, num_regular, max_model_len)
    return Leap(first_step, num_decodes, len(roster.waiting), moments_s[: num_steps + 1], ended)


class _Steps:
    """Blocks and time of steps that follow each other. Blocks that are free are given out together, for many
    steps; a step that evicts is met at its moment."""

    def __init__(
        self,
        backend: LeapingBackend,
        kv: KVCacheManager,
        batch: DecodeBatch,
        first_step: int,
        prices_s: Sequence[float],
    ) -> None:
        self._backend, self._kv, self._batch = backend, kv, batch
        self._first_step, self._prices_s = first_step, prices_s
        self._num_passed = 0

    def take(self, num_steps: int, *, same_cache: bool) -> int:
        """So many steps, or as many as there are blocks for and, with `same_cache`, up to one that evicts;
        returns how many they were."""
        kv, states = self._kv, self._batch.states
        borders = self._batch.borders(num_steps)
        growing: list[RequestState] = []
        for number in sorted(borders):
            more = [states[place] for place in borders[number]]
            if len(growing) + len(more) <= kv.pool.num_free and kv.quota is None:
                growing += more
                continue
            kv.extend(growing)
            growing = []
            if kv.quota is not None or len(more) > kv.available_blocks():
                num_steps = number
                break
            self._pass(number)
            version = kv.version
            kv.extend(more)
            if same_cache and kv.version != version:
                num_steps = number + 1
                break
        kv.extend(growing)
        self._pass(num_steps)
        return num_steps

    def _pass(self, number: int) -> None:
        """All steps before this one."""
        begin, rows = self._num_passed, self._batch.rows
        if begin < number:
            self._backend.pass_decodes(self._first_step + begin, rows, self._prices_s[begin:number])
            self._num_passed = number


def _draw(
    roster: RequestTable, tokens: Sequence[int], num_steps: int, num_regular: int, max_model_len: int
) -> Sequence[tuple[RequestState, int, FinishReason]]:
    """The tokens of all steps; who ends with the last of them, in the order of the batch."""
    batch = roster.decodes
    regular = min(num_steps, num_regular)
    if regular:
        batch.repeat(tokens, regular)
    if regular == num_steps:
        return ()
    ended = {}
    for place in batch.advance(tokens):
        state, token_id = batch.states[place], tokens[place]
        reason = stop_reason(state, token_id, max_model_len)
        if reason is not None:
            ended[state] = (state, token_id, reason)
    return [ended[state] for state in roster.in_order(ended)]
