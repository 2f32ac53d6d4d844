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
    """Counters of one engine, updated by `record` once for each admitted request.

    Tokens are counted for each of `tenants`, the names that the operator has configured; all other tenants
    count together, since clients make up names without end. Not thread-safe: the thread that admits requests
    writes, others read a `snapshot` that it made.
    """

    def __init__(self, tenants: Iterable[str] = ()) -> None:
        self._tenants = frozenset(tenants)
        self.reset()

    def reset(self) -> None:
        """Count from zero again."""
        self.num_requests = 0
        self.num_hit_requests = 0
        self.num_tokens = 0
        self.num_hit_tokens = 0
        self.num_blocks = 0
        self.num_hit_blocks = 0
        self._sharing = 0.0
        self._match_sum_s = 0.0
        self._match_counts = [0] * (len(BUCKET_BOUNDS_S) + 1)
        self._by_tenant: dict[str, TenantReuse] = {}

    def record(
        self,
        num_tokens: int,
        num_hit_tokens: int,
        num_blocks: int,
        num_hit_blocks: int,
        match_s: float | None = None,
        *,
        tenant: str = "",
    ) -> None:
        """Count one admitted request: its prompt, and how much of it was resident."""
        if not (0 <= num_hit_tokens <= num_tokens and 0 <= num_hit_blocks <= num_blocks):
            raise ValueError(
                f"hits must be between 0 and all: {num_hit_tokens} of {num_tokens} tokens, "
                f"{num_hit_blocks} of {num_blocks} blocks"
            )
        self.num_requests += 1
        self.num_tokens += num_tokens
        self.num_blocks += num_blocks
        if num_hit_tokens:
            self.num_hit_requests += 1
            self.num_hit_tokens += num_hit_tokens
        if num_hit_blocks:
            self.num_hit_blocks += num_hit_blocks
            self._sharing += num_hit_blocks / num_blocks
        if match_s is not None:
            self.observe_match(match_s)
        name = (tenant if tenant in self._tenants else OTHER_TENANTS) if tenant else NO_TENANT
        before = self._by_tenant.get(name, TenantReuse())
        self._by_tenant[name] = TenantReuse(
            before.num_tokens + num_tokens, before.num_hit_tokens + num_hit_tokens
        )

    def by_tenant(self) -> Mapping[str, TenantReuse]:
        """The tokens by configured tenant, of all others together and of requests without one."""
        return dict(self._by_tenant)

    def observe_match(self, seconds: float) -> None:
        """The time of one look-up."""
        self._match_counts[bisect_left(BUCKET_BOUNDS_S, seconds)] += 1
        self._match_sum_s += seconds

    @property
    def token_hit_ratio(self) -> float:
        return _ratio(self.num_hit_tokens, self.num_tokens)

    @property
    def block_hit_ratio(self) -> float:
        return _ratio(self.num_hit_blocks, self.num_blocks)

    @property
    def request_hit_ratio(self) -> float:
        """Requests that reused any token, over all requests."""
        return _ratio(self.num_hit_requests, self.num_requests)

    @property
    def mean_sharing(self) -> float:
        """The mean over all requests of the fraction of their blocks that was resident."""
        return _ratio(self._sharing, self.num_requests)

    @property
    def saved_prefill_tokens(self) -> int:
        """Prompt tokens that no step had to compute."""
        return self.num_hit_tokens

    @property
    def num_matches(self) -> int:
        """Look-ups whose time was observed."""
        return sum(self._match_counts)

    def match_buckets(self) -> tuple[tuple[float, int], ...]:
        """Cumulative counts, see `PrefixReuseSnapshot.match_buckets`."""
        ends = (*BUCKET_BOUNDS_S, float("inf"))
        return tuple(zip(ends, accumulate(self._match_counts), strict=True))

    def quantile(self, q: float) -> float | None:
        """Seconds under which the fraction `q` of the matches stayed; None before the first.

        Known to a factor of 2.5, and to 0.25 us: linear inside a bucket, as Prometheus' `histogram_quantile`
        does it. What is above the last bound counts as the last bound.
        """
        if not 0.0 <= q <= 1.0:
            raise ValueError(f"q must be between 0 and 1, got {q}")
        rank = q * self.num_matches
        below, low = 0, 0.0
        for high, count in zip(BUCKET_BOUNDS_S, self._match_counts, strict=False):
            if count and below + count >= rank:
                return low + (high - low) * (rank - below) / count
            below, low = below + count, high
        return BUCKET_BOUNDS_S[-1] if self.num_matches else None

    def snapshot(self) -> PrefixReuseSnapshot:
        return PrefixReuseSnapshot(
            num_requests=self.num_requests,
            num_hit_requests=self.num_hit_requests,
            num_tokens=self.num_tokens,
            num_hit_tokens=self.num_hit_tokens,
            num_blocks=self.num_blocks,
            num_hit_blocks=self.num_hit_blocks,
            request_hit_ratio=self.request_hit_ratio,
            token_hit_ratio=self.token_hit_ratio,
            block_hit_ratio=self.block_hit_ratio,
            mean_sharing=self.mean_sharing,
            num_matches=self.num_matches,
            match_sum_s=self._match_sum_s,
            match_buckets=self.match_buckets(),
        )


def _ratio(part: float, whole: int) -> float:
    return part / whole if whole else 0.0
