"""What the server tells of its KV cache: the forms of answers."""

from __future__ import annotations

from typing import Literal

from sagellm.core.protocols.prefix_cache import PromptSpan, SpanState
from sagellm.serving.schema import Body

GIB = 2**30


class CacheSpan(Body):
    """Tokens `[start, stop)` of a prompt, and what the cache knows of them.

    `incomplete`: cached, but computed again, since a window or recurrent state was not kept with them.
    `partial_block`: they fill no block. `unknown`: never seen, or evicted so long ago that it is forgotten.
    Of evicted ones: how long ago the first of them went, why, for which request (the part of its answer's id
    behind the hyphen; null for other tenants' requests), and the blocks and GiB by which LRU's memory was too
    small, at most.
    """

    start: int
    stop: int
    state: Literal["hit", "incomplete", "evicted", "never_seen", "unknown", "partial_block"]
    tier: Literal["device"] | None = None
    seconds_ago: float | None = None
    cause: str | None = None
    evicted_by: str | None = None
    blocks_needed: int | None = None
    gib_needed: float | None = None

    @classmethod
    def of(cls, span: PromptSpan, tenant: str, bytes_per_block: int) -> CacheSpan:
        """As a tenant may see it."""
        needed, evictor = span.num_blocks_since, span.evictor
        is_own = evictor is not None and evictor.tenant == tenant
        return cls(
            start=span.start,
            stop=span.stop,
            state=span.state.value,
            tier="device" if span.state is SpanState.HIT else None,
            seconds_ago=span.seconds_ago,
            cause=span.cause,
            evicted_by=(evictor.call or None) if evictor is not None and is_own else None,
            blocks_needed=needed,
            gib_needed=None if needed is None else needed * bytes_per_block / GIB,
        )


class SessionDifference(Body):
    """Where a prompt leaves the last request of its session.

    The first token that differs, the text before it, and both texts from there on."""

    token: int
    before: str
    now: str
    then: str


class Explanation(Body):
    """The answer of POST /v1/kv/explain: spans in order, which cover the prompt."""

    num_tokens: int
    block_size: int
    spans: list[CacheSpan]
    session: SessionDifference | None = None


class CacheEviction(Body):
    """What the cache had of a prompt and evicted; for `return_cache_misses`.

    The evicted tokens, and by how much LRU's memory was too small for them, at most. Of the first one also
    for which request of the same tenant, when (seconds since 1970), and why. 0 tokens and null: nothing was
    evicted, as far as is remembered.
    """

    evicted_tokens: int = 0
    evicted_by: str | None = None
    evicted_at: float | None = None
    cause: str | None = None
    gib_needed: float | None = None

    @classmethod
    def of(cls, span: CacheSpan | None, arrived: float) -> CacheEviction:
        """Of a request that arrived at this time, in seconds since 1970."""
        if span is None or span.seconds_ago is None:
            return cls()
        return cls(
            evicted_tokens=span.stop - span.start,
            evicted_by=span.evicted_by,
            evicted_at=arrived - span.seconds_ago,
            cause=span.cause,
            gib_needed=span.gib_needed,
        )
