"""`PrefixReuseMetrics`: counters of prefix reuse, and how long look-ups took."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import accumulate

from sagellm.core.protocols.prefix_cache import PrefixReuseSnapshot, TenantReuse

BUCKET_BOUNDS_S: tuple[float, ...] = (
    2.5e-07, 5e-07, 1e-06, 2.5e-06, 5e-06, 1e-05, 2.5e-05, 5e-05, 1e-04, 2.5e-04, 5e-04,
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0,
)  # fmt: skip
"""Upper ends of the buckets in seconds, in the usual steps of 1, 2.5 and 5. One more takes what is above."""
NO_TENANT, OTHER_TENANTS = "(none)", "(other)"
"""Names for requests without a tenant, and for all tenants that the configuration does not name."""


class PrefixReuseMetrics:
    """Implements `ReuseRecorder` for one engine.

    Tokens are counted for each of `tenants`, the names that the operator has configured; all other tenants
    count together, since clients make up names without end. Not thread-safe: the thread that admits requests
    writes, others read a `snapshot` that it made.
    """

    def __init__(self, tenants: Iterable[str] = ()) -> None:
        self._tenants = frozenset(tenants)
        self._num_requests = 0
        self._num_hit_requests = 0
        self._num_tokens = 0
        self._num_hit_tokens = 0
        self._num_blocks = 0
        self._num_hit_blocks = 0
        self._sharing = 0.0
        self._match_sum_s = 0.0
        self._match_counts = [0] * (len(BUCKET_BOUNDS_S) + 1)
        self._by_tenant: dict[str, TenantReuse] = {}

    def record(
        self, num_tokens: int, num_hit_tokens: int, num_blocks: int, num_hit_blocks: int, *, tenant: str = ""
    ) -> None:
        if not (0 <= num_hit_tokens <= num_tokens and 0 <= num_hit_blocks <= num_blocks):
            raise ValueError(
                f"hits must be between 0 and all: {num_hit_tokens} of {num_tokens} tokens, "
                f"{num_hit_blocks} of {num_blocks} blocks"
            )
        self._num_requests += 1
        self._num_tokens += num_tokens
        self._num_blocks += num_blocks
        if num_hit_tokens:
            self._num_hit_requests += 1
            self._num_hit_tokens += num_hit_tokens
        if num_hit_blocks:
            self._num_hit_blocks += num_hit_blocks
            self._sharing += num_hit_blocks / num_blocks
        name = (tenant if tenant in self._tenants else OTHER_TENANTS) if tenant else NO_TENANT
        before = self._by_tenant.get(name, TenantReuse())
        self._by_tenant[name] = TenantReuse(
            before.num_tokens + num_tokens, before.num_hit_tokens + num_hit_tokens
        )

    def by_tenant(self) -> Mapping[str, TenantReuse]:
        return dict(self._by_tenant)

    def observe_match(self, seconds: float) -> None:
        self._match_counts[bisect_left(BUCKET_BOUNDS_S, seconds)] += 1
        self._match_sum_s += seconds

    def snapshot(self) -> PrefixReuseSnapshot:
        ends = (*BUCKET_BOUNDS_S, float("inf"))
        return PrefixReuseSnapshot(
            num_requests=self._num_requests,
            num_hit_requests=self._num_hit_requests,
            num_tokens=self._num_tokens,
            num_hit_tokens=self._num_hit_tokens,
            num_blocks=self._num_blocks,
            num_hit_blocks=self._num_hit_blocks,
            sharing=self._sharing,
            match_sum_s=self._match_sum_s,
            match_buckets=tuple(zip(ends, accumulate(self._match_counts), strict=True)),
        )
