"""Contract of the scheduler: passes that edit a draft, and what they may look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import NamedTuple, Protocol

from sagellm.core.plan import Draft, RequestState
from sagellm.core.protocols.prefix_cache import PrefixHit
from sagellm.core.types import Account


class BlockBudget:
    """Blocks that the decisions of one step may still spend: `available` in all and, where there are quotas,
    what is left below each ceiling that the request's account counts on.

    `ceilings_of(account)` names those ceilings (its tenant's, its class's), each with the blocks that are
    left below it. Accounts that share a ceiling share what is left.

    Guarantees of others are not in it: binding settles them, and puts off a request that counted on too much.
    """

    def __init__(
        self, available: int, ceilings_of: Callable[[Account], Mapping[str, int]] | None = None
    ) -> None:
        self.available = available
        self._ceilings_of = ceilings_of
        self._left: dict[str, int] = {}
        self._names: dict[Account, tuple[str, ...]] = {}

    def left(self, state: RequestState) -> int:
        """What this request could get."""
        return min([self.available, *(self._left[name] for name in self._ceilings(state))])

    def spend(self, state: RequestState, num_blocks: int) -> bool:
        """Take the blocks, or change nothing and answer False."""
        if num_blocks > self.left(state):
            return False
        self._add(state, -num_blocks)
        return True

    def spend_together(self, num_blocks: int) -> bool:
        """Take blocks for many requests at once, or change nothing and answer False: where there are quotas
        it matters who."""
        if self._ceilings_of is not None and num_blocks:
            return False
        if num_blocks > self.available:
            return False
        self.available -= num_blocks
        return True

    def gain(self, state: RequestState, num_blocks: int) -> None:
        """A request gives back what it holds."""
        self._add(state, num_blocks)

    def is_capped(self, state: RequestState, num_blocks: int) -> bool:
        """Whether a ceiling is in the way, so that only blocks that count on it would help the request."""
        return bool(self._short(state, num_blocks))

    def competitors(
        self, state: RequestState, num_blocks: int, others: Sequence[RequestState]
    ) -> list[RequestState]:
        """Those of `others` whose blocks would help: all of them, or those that count on a ceiling that keeps
        the request from having `num_blocks`."""
        short = self._short(state, num_blocks)
        return [one for one in others if not short.isdisjoint(self._ceilings(one))] if short else list(others)

    def _short(self, state: RequestState, num_blocks: int) -> set[str]:
        return {name for name in self._ceilings(state) if num_blocks > self._left[name]}

    def _add(self, state: RequestState, num_blocks: int) -> None:
        self.available += num_blocks
        for name in self._ceilings(state):
            self._left[name] += num_blocks

    def _ceilings(self, state: RequestState) -> tuple[str, ...]:
        if self._ceilings_of is None:
            return ()
        account = state.request.account
        if account not in self._names:
            left = self._ceilings_of(account)
            self._names[account] = tuple(left)
            self._left = {**left, **self._left}
        return self._names[account]


class ResumeCost(NamedTuple):
    """What it takes to bring back a request that is preempted: seconds to compute again what it loses, or
    `num_host_blocks`, of which `num_free` are free, and seconds of copies, there and back. Seconds are 0
    where nobody knows them."""

    num_host_blocks: int
    num_free: int
    recompute_s: float
    swap_s: float

    @property
    def fits(self) -> bool:
        """Whether there is room in host memory."""
        return 0 < self.num_host_blocks <= self.num_free


class KVQuotes(Protocol):
    """Prices in blocks, asked by passes before anything is bound. Nothing here changes state.

    A set of decisions that a fresh `budget()` can pay binds without fail where there are no quotas; with
    quotas, a request that counted on what is guaranteed to others waits.
    """

    @property
    def block_size(self) -> int: ...

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        ...

    @property
    def version(self) -> int:
        """Another number than before where `match` may answer otherwise than before."""
        ...

    def match(self, state: RequestState) -> PrefixHit:
        """What the index holds of the request, capped so that at least one token is left to compute."""
        ...

    def available_blocks(self) -> int:
        """Free blocks and cached blocks that nobody uses."""
        ...

    def budget(self) -> BlockBudget:
        """What the decisions of one step may spend, to be counted down by whoever decides."""
        ...

    def blocks_to_append(self, state: RequestState, num_tokens: int) -> int:
        """Blocks that a running request lacks to hold `num_tokens` more computed tokens."""
        ...

    def blocks_to_admit(self, hit: PrefixHit, num_tokens: int) -> int:
        """Blocks for `num_tokens` beyond the hit, plus those of the hit that stop being evictable."""
        ...

    def blocks_freed_by_preempting(self, state: RequestState) -> int:
        """Blocks that become available, at least, when a running request is preempted."""
        ...

    def resume_cost(self, state: RequestState) -> ResumeCost:
        """What a running request would need to go on, once it was preempted."""
        ...


class StepFacts(NamedTuple):
    """What a step took in the backend, and what it computed."""

    duration_s: float
    num_decodes: int
    num_prefill_tokens: int


NO_STEP = StepFacts(0.0, 0, 0)
"""Before the first one."""


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
        """Bind the blocks of what is decided so far, so that later prices and matches count them.

        The pass cannot take that back. Returns False, with no change but evictions, where it cannot be done:
        the draft will not be executed, a request that it preempts still has its blocks, or memory is short.
        """
        ...

    @property
    def last_step(self) -> StepFacts: ...


class SchedulerPass(Protocol):
    """One scheduling concern, applied in place. `name` is the file's name.

    A pass that itself keeps the token budget and the memory, for running and waiting requests alike, may have
    an attribute `closes = True`: then nothing runs behind it to see to them. A `StablePass` lets simulations
    take many equal steps at once.
    `requires`, a set of names, says which of `CapabilityDescriptor.features` a backend must have to carry out
    what the pass decides: a strategy with the pass is refused where the backend lacks one.
    """

    @property
    def name(self) -> str: ...

    def __call__(self, draft: Draft, view: SchedulingView) -> None: ...


class Stability(NamedTuple):
    """A promise of a pass: its decisions stay the same in the steps that begin before `until_s`.

    In those steps it admits, holds, preempts and rejects no request, as long as none arrives and none ends.
    With `same_cache` the promise also ends with any change of the prefix cache.
    """

    until_s: float = inf
    same_cache: bool = False

    def and_also(self, other: Stability) -> Stability:
        """What holds as long as both promises hold."""
        return Stability(min(self.until_s, other.until_s), self.same_cache or other.same_cache)


ALWAYS_STABLE = Stability()
"""Holds until a request arrives or ends."""


def stable_while_all_decode(draft: Draft) -> Stability | None:
    """The promise of a pass that does nothing in a step in which every request decodes."""
    return None if draft.waiting or draft.num_new_running or draft.chunks else ALWAYS_STABLE


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
        ...
