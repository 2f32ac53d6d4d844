"""`HostedPasses`: our scheduling passes over the requests of another engine.

The host keeps its requests, its KV and its rules of admission. Each of its requests has a `RequestState`
here, which the passes read as in our own engine. They say in which order waiting requests are admitted, which
of them still wait in this step, and in which order running requests stand: the host preempts the last. What a
pass decides beyond that (chunks, preemptions ahead of need) is not carried out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from sagellm.core.blocks import cdiv
from sagellm.core.errors import ConfigError
from sagellm.core.plan import Draft, RequestState, StepStart
from sagellm.core.protocols.prefix_cache import PrefixHit
from sagellm.core.protocols.scheduler_ir import (
    NO_STEP,
    BlockBudget,
    SchedulerPass,
    StepFacts,
)
from sagellm.core.types import FinishReason, Request, RequestStatus
from sagellm.kvmgr.scheduler_ir.passes.memory_aware_preemption import VICTIMS, MemoryAwarePreemptionPass
from sagellm.kvmgr.scheduler_ir.strategies import CLOSING, STRATEGIES, make


class HostKV(Protocol):
    """What a host tells of its KV cache."""

    @property
    def block_size(self) -> int:
        """Tokens of a block."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""

    def num_free(self) -> int:
        """Free blocks, cached ones that no request uses included."""

    def num_cached(self, request_id: str) -> int:
        """Leading tokens of a waiting request that are cached; at least one is not."""

    def num_held(self, request_id: str) -> int:
        """Blocks of a running request."""


class HostQuotes:
    """`KVQuotes` from what a host tells."""

    def __init__(self, host: HostKV) -> None:
        self._host = host
        self.block_size, self.num_blocks, self.version = host.block_size, host.num_blocks, 0

    @property
    def most_blocks(self) -> int:
        """One request may have the whole pool."""
        return self.num_blocks

    def match(self, state: RequestState) -> PrefixHit:
        """How much of a request is cached in the host."""
        num_tokens = self._host.num_cached(state.request_id)
        return PrefixHit(
            num_tokens,
            num_tokens // self.block_size,
            state.tokens,
            state.request.namespace,
            None,
            self.version,
        )

    def available_blocks(self) -> int:
        """Free blocks, and cached ones that no request uses."""
        return self._host.num_free()

    def block_budget(self) -> BlockBudget:
        """A new budget."""
        return BlockBudget(self.available_blocks())

    def blocks_to_append(self, state: RequestState, num_tokens: int) -> int:
        """Blocks that a running request lacks."""
        needed = cdiv(state.num_computed + num_tokens, self.block_size)
        return max(0, needed - self._host.num_held(state.request_id))

    def blocks_to_admit(self, hit: PrefixHit, num_tokens: int) -> int:
        """Blocks of a request behind its hit."""
        return cdiv(hit.num_tokens + num_tokens, self.block_size) - hit.num_blocks

    def blocks_freed_by_preempting(self, state: RequestState) -> int:
        """All that it has; shared ones are counted too."""
        return self._host.num_held(state.request_id)

    def resume_s(self, state: RequestState) -> float:
        """Unknown."""
        return 0.0


@dataclass
class HostView:
    """`SchedulingView` of a host."""

    kv: HostQuotes
    max_num_seqs: int
    max_batched_tokens: int
    num_free_rows: int = 0
    last_step: StepFacts = NO_STEP

    def bind_early(self, draft: Draft) -> bool:
        """The host binds."""
        return False


class HostOrder(NamedTuple):
    """Ids of requests: in order of admission, those that wait on, running ones.

    Of the running ones the last is preempted first.
    """

    waiting: list[str]
    deferred: list[str]
    running: list[str]


class HostedPasses:
    """The passes of a strategy that order requests.

    Raises `SageError` for a strategy that a host cannot carry out.
    """

    def __init__(
        self,
        strategy: str,
        options: Mapping[str, Mapping[str, Any]],
        host: HostKV,
        *,
        max_num_seqs: int,
        max_batched_tokens: int,
    ) -> None:
        self.passes, self.victims = open_passes(strategy, options)
        self.view = HostView(HostQuotes(host), max_num_seqs, max_batched_tokens)
        self.states: dict[str, RequestState] = {}
        self._running: set[str] = set()
        self._step = 0

    def enter(self, request: Request) -> None:
        """The host has a new request."""
        self.states[request.request_id] = RequestState.of(request)

    def progressed(self, request_id: str, num_computed: int, num_tokens: int) -> None:
        """The host has computed tokens of a request, and it has so many now."""
        state = self.states[request_id]
        state.num_prefilled = num_computed
        missing = num_tokens - len(state.tokens)
        if missing > 0:
            state.tokens.extend([0] * missing)
            if state.first_token_s is None:
                state.first_token_s = self._now_s

    def ended(self, request_id: str, *, whole: bool) -> None:
        """A request has left the host. `whole`: it generated all of its output."""
        state = self.states.pop(request_id, None)
        if state is not None:
            state.status = RequestStatus.FINISHED
            state.finish_reason = FinishReason.STOP if whole else FinishReason.ABORT

    _now_s = 0.0

    def order(self, now_s: float, waiting: Sequence[str], running: Sequence[str]) -> HostOrder:
        """What the passes say of a step that begins now. Ids that are not known keep their places."""
        self._step += 1
        self._now_s = now_s
        view, states = self.view, self.states
        view.kv.version = self._step
        view.num_free_rows = max(0, view.max_num_seqs - len(running))
        now_running = [states[name] for name in running if name in states]
        now_waiting = [states[name] for name in waiting if name in states]
        self._note(now_running, now_waiting, now_s)
        num_new = sum(state.request_id not in self._running for state in now_running)
        self._running = {state.request_id for state in now_running}
        draft = Draft(
            StepStart(self._step, now_s, num_new), view.max_batched_tokens, now_running, now_waiting
        )
        for scheduler_pass in self.passes:
            scheduler_pass(draft, view)
        self._move_victim(draft.running)
        chosen = {state.request_id for state in draft.waiting}
        return HostOrder(
            waiting=self._in_places(waiting, draft.waiting),
            deferred=[name for name in waiting if name in states and name not in chosen],
            running=self._in_places(running, draft.running),
        )

    def _in_places(self, names: Sequence[str], ordered: Sequence[RequestState]) -> list[str]:
        """Ordered requests in the places of those that are known.

        The others keep theirs: at the end of each step's order they would starve.
        """
        known = (state.request_id for state in ordered)
        placed = [next(known, None) if name in self.states else name for name in names]
        return [name for name in placed if name is not None]

    def stepped(self, facts: StepFacts) -> None:
        """The host has computed a step."""
        self.view.last_step = facts

    def _note(self, running: list[RequestState], waiting: list[RequestState], now_s: float) -> None:
        """Set what the host has decided since the last step."""
        for state in running:
            if state.status is not RequestStatus.RUNNING:
                state.status = RequestStatus.RUNNING
                state.scheduled_s = now_s if state.scheduled_s is None else state.scheduled_s
        for state in waiting:
            if state.status is RequestStatus.RUNNING:
                state.status, state.num_prefilled = RequestStatus.WAITING, 0
                state.num_preemptions += 1

    def _move_victim(self, running: list[RequestState]) -> None:
        """Where memory may run out, put the victim of the rule last."""
        if self.victims == "last" or len(running) < 2 or self.view.kv.available_blocks() >= len(running):
            return
        lowest = min(state.request.priority for state in running[1:])
        rivals = [state for state in running[1:] if state.request.priority == lowest]
        victim = VICTIMS[self.victims](rivals, self.view.kv)
        running.remove(victim)
        running.append(victim)


def open_passes(strategy: str, options: Mapping[str, Mapping[str, Any]]) -> tuple[list[SchedulerPass], str]:
    """The ordering passes of a strategy, and its rule for victims of preemption.

    Raises `UnknownNameError` or `ConfigError` for a strategy, pass or option that is not known, and for a
    strategy whose passes admit by themselves.
    """
    if any(each.get("preempt") for each in options.values()):
        raise ConfigError("preempt: another engine preempts where memory is short only; leave it out")
    given = {name: dict(values) for name, values in options.items()}
    named = [name for name, _ in STRATEGIES.get(strategy, ())]
    if "priority_based" in named:
        given.setdefault("priority_based", {})["preempt"] = False
    if (
        "prefix_cache_aware" in named
    ):  # hosts let a request share blocks that another computes in the same step
        given.setdefault("prefix_cache_aware", {}).setdefault("max_defer_s", 0.0)
    closing = {name for name, _ in CLOSING}
    made = make(strategy, given)
    for each in made:
        if each.name not in closing and (getattr(each, "closes", False) or getattr(each, "requires", ())):
            raise ConfigError(f"strategy {strategy!r} admits by itself, which another engine does not let it")
    victims = next((each.victims for each in made if isinstance(each, MemoryAwarePreemptionPass)), "last")
    return [each for each in made if each.name not in closing], victims
