"""Contract of the scheduler: passes that edit a draft, and what they may look at."""

from __future__ import annotations

from typing import Protocol

from sagellm.core.plan import Draft, RequestState
from sagellm.core.protocols.prefix_cache import PrefixHit


class KVQuotes(Protocol):
    """Prices in blocks, asked by passes before anything is bound. Nothing here changes state.

    A set of decisions whose prices sum to at most `available_blocks()` binds without fail.
    """

    @property
    def block_size(self) -> int: ...

    def match(self, state: RequestState) -> PrefixHit:
        """What the index holds of the request, capped so that at least one token is left to compute."""
        ...

    def available_blocks(self) -> int:
        """Free blocks and cached blocks that nobody uses."""
        ...

    def price_to_grow(self, state: RequestState, num_tokens: int) -> int:
        """Blocks that a running request lacks to hold `num_tokens` more computed tokens."""
        ...

    def price_to_admit(self, hit: PrefixHit, num_tokens: int) -> int:
        """Blocks for `num_tokens` beyond the hit, plus those of the hit that stop being evictable."""
        ...

    def gain_of_preempting(self, state: RequestState) -> int:
        """Blocks that become available, at least, when a running request is preempted."""
        ...


class SchedulingView(Protocol):
    """What passes may read beside the draft."""

    @property
    def kv(self) -> KVQuotes: ...

    @property
    def max_num_seqs(self) -> int: ...

    @property
    def max_batched_tokens(self) -> int: ...

    @property
    def num_free_rows(self) -> int: ...


class SchedulerPass(Protocol):
    """One scheduling concern, applied in place. `name` is the file's name."""

    @property
    def name(self) -> str: ...

    def __call__(self, draft: Draft, view: SchedulingView) -> None: ...
