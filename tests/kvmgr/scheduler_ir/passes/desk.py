"""A desk for tests of single passes: requests, a draft, and a view with prices that need no engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from sagellm.core.blocks import cdiv
from sagellm.core.plan import Draft, RequestState, StepStart
from sagellm.core.protocols.prefix_cache import PrefixHit
from sagellm.core.protocols.scheduler_ir import NO_STEP, BlockBudget, SchedulerPass, StepFacts
from sagellm.core.types import SLO, Namespace, Request, RequestStatus, SamplingParams, Tokens


@dataclass
class DeskView:
    """Prices of requests that share nothing; `cached` are the cached tokens by request."""

    num_blocks: int = 1000
    block_size: int = 4
    max_num_seqs: int = 256
    max_batched_tokens: int = 2048
    num_free_rows: int = 256
    version: int = 0
    last_step: StepFacts = NO_STEP
    cached: dict[str, int] = field(default_factory=dict)
    available: int = 1000
    num_matches: int = 0
    token_s: float = 0.0
    load_s: float = float("inf")
    """Of a block, from a tier."""

    @property
    def kv(self) -> DeskView:
        return self

    @property
    def most_blocks(self) -> int:
        return self.num_blocks

    def match(self, state: RequestState) -> PrefixHit:
        self.num_matches += 1
        num_tokens = self.cached.get(state.request_id, 0)
        return PrefixHit(num_tokens, num_tokens // self.block_size, state.tokens, state.request.namespace)

    def available_blocks(self) -> int:
        return self.available

    def block_budget(self) -> BlockBudget:
        return BlockBudget(self.available)

    def bind_early(self, draft: Draft) -> bool:
        return False

    def blocks_to_append(self, state: RequestState, num_tokens: int) -> int:
        return self._blocks(state.num_computed + num_tokens) - self._blocks(state.num_computed)

    def blocks_to_admit(self, hit: PrefixHit, num_tokens: int) -> int:
        return self._blocks(hit.num_tokens + num_tokens) - hit.num_blocks

    def blocks_freed_by_preempting(self, state: RequestState) -> int:
        return self._blocks(state.num_computed)

    def resume_s(self, state: RequestState) -> float:
        load_s = self.blocks_freed_by_preempting(state) * self.load_s
        return min(state.num_computed * self.token_s, load_s)

    def _blocks(self, num_tokens: int) -> int:
        return cdiv(num_tokens, self.block_size)


def state(
    name: str,
    length: int = 8,
    *,
    arrival_s: float = 0.0,
    priority: int = 0,
    tenant: str = "",
    service_class: str = "",
    ttft_s: float | None = None,
    max_tokens: int | None = 16,
    tokens: Iterable[int] | None = None,
) -> RequestState:
    """A request that waits; its tokens are its own unless given."""
    own = [sum(name.encode()) * 31 + i for i in range(length)] if tokens is None else tokens
    return RequestState.of(
        Request(
            name,
            Tokens(own),
            SamplingParams(max_tokens=max_tokens),
            arrival_s=arrival_s,
            priority=priority,
            namespace=Namespace(tenant=tenant),
            slo=SLO(ttft_s),
            service_class=service_class,
        )
    )


def admit(one: RequestState, num_computed: int = 0) -> RequestState:
    """It runs from now on."""
    one.status, one.num_prefilled = RequestStatus.RUNNING, num_computed
    return one


class Desk:
    """One pass, step by step, on queues that the test fills."""

    def __init__(self, scheduler_pass: SchedulerPass, view: DeskView | None = None) -> None:
        self.scheduler_pass, self.view = scheduler_pass, view or DeskView()
        self.waiting: list[RequestState] = []
        self.running: list[RequestState] = []
        self.now_s = 0.0
        self.num_steps = 0
        self.draft = Draft(StepStart(0, 0.0), 0, [], [])

    def step(self, token_budget: int = 2048, num_new_running: int = 0) -> list[str]:
        """Names of the waiting, in the order that the pass leaves."""
        self.num_steps += 1
        start = StepStart(self.num_steps, self.now_s, num_new_running)
        waiting = [one for one in self.waiting if one.status is RequestStatus.WAITING]
        self.draft = Draft(start, token_budget, list(self.running), waiting)
        self.scheduler_pass(self.draft, self.view)
        return [one.request_id for one in self.draft.waiting]

    def run_first(self) -> RequestState:
        """The first of the order runs and is done within the step."""
        first = self.draft.waiting[0]
        self.waiting.remove(first)
        admit(first, len(first.tokens))
        return first
