"""Contract of the scheduler: passes, and the view and prices that they use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import NamedTuple, Protocol

from sagellm.core.plan import Draft, RequestState
from sagellm.core.protocols.prefix_cache import PrefixHit
from sagellm.core.types import Account


class BlockBudget:
    """Blocks that the decisions of one step may still spend.

    `available` blocks are left in all. With quotas, `ceilings_of(account)` gives the ceilings of an account
    (its tenant's, its class's) by name, each with the blocks left below it. Accounts that share a ceiling
    share these blocks. Guarantees of other accounts are not counted: if a decision uses too many blocks, bind
    postpones the request.
    """

    def __init__(
        self, available: int, ceilings_of: Callable[[Account], Mapping[str, int]] | None = None
    ) -> None:
        self.available = available
        self._ceilings_of = ceilings_of
        self._left: dict[str, int] = {}
        self._names: dict[Account, tuple[str, ...]] = {}

    def left(self, state: RequestState) -> int:
        """The blocks that this request could get."""
        return min([self.available, *(self._left[name] for name in self._ceilings(state))])

    def spend(self, state: RequestState, num_blocks: int) -> bool:
        """Take the blocks, or change nothing and return False."""
        if num_blocks > self.left(state):
            return False
        self.gain(state, -num_blocks)
        return True

    def spend_together(self, num_blocks: int) -> bool:
        """Take blocks for many requests at once, or change nothing and return False. With quotas it returns
        False for any positive number, since each request has its own ceilings."""
        if self._ceilings_of is not None and num_blocks:
            return False
        if num_blocks > self.available:
            return False
        self.available -= num_blocks
        return True

    def gain(self, state: RequestState, num_blocks: int) -> None:
        """Add the blocks that a request releases."""
        self.available += num_blocks
        for name in self._ceilings(state):
            self._left[name] += num_blocks

    def is_capped(self, state: RequestState, num_blocks: int) -> bool:
        """Whether a ceiling keeps the request from having so many blocks."""
        return bool(self._short(state, num_blocks))

    def competitors(
        self, state: RequestState, num_blocks: int, others: Sequence[RequestState]
    ) -> list[RequestState]:
        """Those of `others` whose blocks would help the request to have `num_blocks`. All of them, or, if a
        ceiling is in the way, those below the same ceiling."""
        short = self._short(state, num_blocks)
        if not short:
            return list(others)
        return [each for each in others if not short.isdisjoint(self._ceilings(each))]

    def _short(self, state: RequestState, num_blocks: int) -> set[str]:
        return {name for name in self._ceilings(state) if num_blocks > self._left[name]}

    def _ceilings(self, state: RequestState) -> tuple[str, ...]:
        if self._ceilings_of is None:
            return ()
        account = state.request.account
        if account not in self._names:
            left = self._ceilings_of(account)
            self._names[account] = tuple(left)
            self._left = {**left, **self._left}
        return self._names[account]


class KVQuotes(Protocol):
    """Prices in blocks, for passes to use before anything is bound. No method changes state.

    A block is one of each KV group, whichever groups the model has: prices are rounded up to whole ones.

    Without quotas, decisions that a fresh `block_budget()` can pay are sure to bind. With quotas, bind
    postpones a request that would use blocks guaranteed to others.
    """

    @property
    def block_size(self) -> int: ...

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""

    @property
    def most_blocks(self) -> int:
        """Blocks that one request can have. More than the pool's where windows let go of some."""

    @property
    def version(self) -> int:
        """Changes whenever `match` may return something else than before."""

    def match(self, state: RequestState) -> PrefixHit:
        """The prefix hit of a request. At least one token is left to compute."""

    def available_blocks(self) -> int:
        """Free blocks, and cached blocks that no request uses."""

    def block_budget(self) -> BlockBudget:
        """A new budget for the decisions of one step; the pass counts it down."""

    def blocks_to_append(self, state: RequestState, num_tokens: int) -> int:
        """Blocks that a running request lacks to hold `num_tokens` more computed tokens."""

    def blocks_to_admit(self, hit: PrefixHit, num_tokens: int) -> int:
        """Blocks for `num_tokens` beyond the hit, plus hit blocks that stop being evictable."""

    def blocks_freed_by_preempting(self, state: RequestState) -> int:
        """The least number of blocks that preempting a running request makes available."""

    def resume_s(self, state: RequestState) -> float:
        """Seconds until a request, preempted now, has its KV again.

        0 where unknown.

        It is computed again, or loaded from a tier below the device if that takes less time.
        """


class StepFacts(NamedTuple):
    """How long a step took in the backend, and what it computed."""

    duration_s: float
    num_decodes: int
    num_prefill_tokens: int


NO_STEP = StepFacts(0.0, 0, 0)
"""The facts before the first step."""


class SchedulingView(Protocol):
    """What passes may use beside the draft. All but `bind_early` only reads."""

    @property
    def kv(self) -> KVQuotes: ...

    @property
    def max_num_seqs(self) -> int: ...

    @property
    def max_batched_tokens(self) -> int: ...

    @property
    def num_free_rows(self) -> int: ...

    def bind_early(self, draft: Draft) -> bool:
        """Bind the blocks decided so far, so that later prices and matches count them. The pass cannot take
        that back. Returns False, with no change but evictions, where it cannot be done: the draft will not be
        executed, a request that it preempts still has its blocks, or memory is short."""

    @property
    def last_step(self) -> StepFacts: ...


class SchedulerPass(Protocol):
    """One scheduling concern: called once per step, it edits the draft in place.

    `name` is the name of its file. The order of `draft.waiting` is the order of admission, and that of
    `draft.running` says which request is preempted last. `chunked_prefill` admits, unless another pass does.

    A pass declines to schedule a request in this step as follows. A waiting request: remove it from
    `draft.waiting`; it goes on waiting and is in the next draft again. A request that an earlier pass
    admitted: delete its chunk from `draft.chunks`. A running request: `draft.hold(state)`, and it keeps its
    blocks; or `draft.preempt(state)`, and it waits again. One that can never run: `draft.reject(state,
    reason)`. `draft.record` tells users why.

    A step may be planned ahead, while the step before it is still computed. The draft is discarded if a pass
    preempts or rejects in it, if nothing is scheduled or memory is short, if planning raises an error, or if
    the step in flight fails; then the passes run again for the same step. So a pass must not count a decision
    before the request's state shows it.

    Three attributes are optional. `closes = True`: the pass keeps token budget and memory itself, for running
    and waiting requests, so no other pass has to run behind it. `requires`: names of
    `CapabilityDescriptor.features` that the backend needs to carry out its decisions; a strategy with the
    pass is refused where one is missing. `stable_until`: see `StablePass`.
    """

    @property
    def name(self) -> str: ...

    def __call__(self, draft: Draft, view: SchedulingView) -> None: ...


class Stability(NamedTuple):
    """A promise of a pass that its decisions stay the same until `until_s`.

    In steps that begin before that time it admits, holds, preempts and rejects no request, as long as none
    arrives and none ends. With `same_cache` the promise also ends with any change of the prefix cache.
    """

    until_s: float = inf
    same_cache: bool = False

    def and_also(self, other: Stability) -> Stability:
        """What holds as long as both promises hold."""
        return Stability(min(self.until_s, other.until_s), self.same_cache or other.same_cache)


ALWAYS_STABLE = Stability()
"""Holds until a request arrives or ends."""


def stable_while_all_decode(draft: Draft) -> Stability | None:
    """The promise of a pass that does nothing while every request decodes."""
    return None if draft.waiting or draft.step.num_new_running or draft.chunks else ALWAYS_STABLE


class StablePass(SchedulerPass, Protocol):
    """A pass that can say for how long its decisions stay the same.

    Simulations take many equal steps at once if every pass of the order is one; otherwise they plan each
    step. The promise describes `__call__`: a subclass that overrides `__call__` must override `stable_until`
    too.
    """

    def stable_until(self, draft: Draft, view: SchedulingView) -> Stability | None:
        """How long `__call__` would go on to decide what it decides for this draft.

        None if the pass would do more now than to order the waiting requests, or if it cannot tell. Passes
        are asked in their order. In the draft every running request decodes, or all but one; in the steps
        to come they have more tokens and blocks, and time has passed. The pass edits the draft for the passes
        behind it: it sets the length of the one chunk, which must then be right for all these steps, and it
        reduces `draft.waiting` to the requests that it leaves to those passes, in its order.
        """
