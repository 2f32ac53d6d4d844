"""What each tenant may use of the whole fleet, and what it uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import BookkeepingError
from sagellm.core.fleet_config import TenantQuota
from sagellm.core.protocols.router import RequestMetadata

EVERY_OTHER = "*"
"""The name whose quota each tenant has that is not named."""
ANSWER_TOKENS = 256
"""Most requests name no `max_tokens`, or more than they use; all of it counts once it is known."""
_UNLIMITED = TenantQuota()


class QuotaLimit(NamedTuple):
    """Why a tenant's request must wait. `never`: it can never enter. `until_s`: when there are enough tokens
    again; None: when one of its requests ends."""

    never: bool
    until_s: float | None
    reason: str


@dataclass(slots=True)
class _Usage:
    """Tokens `spent` of the burst at `at_s`. They come back at the quota's rate."""

    at_s: float
    spent: float = 0.0
    running: dict[str, int] = field(default_factory=dict)
    """By request, the tokens that were counted when it started."""


class TenantQuotas:
    """Counts each tenant's requests and tokens; remembers those tenants alone that use anything.

    A request counts with `tokens_of` until it ends, and with what it has used from then on. So the rate holds
    in the long run: what was used beyond the burst is owed, and the tenant's next requests wait for it.
    """

    def __init__(self, quotas: Mapping[str, TenantQuota], clock: Clock | None = None) -> None:
        self.quotas = dict(quotas)
        self._default = self.quotas.pop(EVERY_OTHER, _UNLIMITED)
        self._clock = clock or MonotonicClock()
        self._usage: dict[str, _Usage] = {}
        self._tenant_of: dict[str, str] = {}

    def limit(self, request: RequestMetadata, num_ahead: int = 0) -> QuotaLimit | None:
        """What stands against the request now; None: it may start. `num_ahead`: tokens of its tenant's
        requests that start before it."""
        tenant = request.namespace.tenant
        quota, tokens = self.quota_of(tenant), tokens_of(request)
        if tokens > quota.burst:
            return QuotaLimit(
                True, None,
                f"the request counts {tokens} tokens, its tenant has {quota.burst:.0f} at once: shorten the "
                f"prompt or max_tokens by {tokens - quota.burst:.0f}",
            )  # fmt: skip
        usage = self._current(tenant)
        if usage is None and not num_ahead:
            return None
        spent, at_s, running = (0.0, self._clock.now(), 0) if usage is None else (
            usage.spent, usage.at_s, len(usage.running)
        )  # fmt: skip
        missing = spent + num_ahead + tokens - quota.burst
        if missing > 0 and quota.tokens_per_s is not None:
            until_s = at_s + missing / quota.tokens_per_s
            return QuotaLimit(False, until_s, f"its tenant has {quota.tokens_per_s:g} tokens per second")
        if quota.max_requests is not None and running >= quota.max_requests:
            return QuotaLimit(False, None, f"its tenant has {quota.max_requests} requests at a time")
        return None

    def start(self, request: RequestMetadata) -> None:
        """Count a request. Raises `BookkeepingError` for one that is running."""
        if request.request_id in self._tenant_of:
            raise BookkeepingError(f"request {request.request_id!r} is counted already")
        self._forget_idle()
        tenant = request.namespace.tenant
        usage = self._current(tenant) or _Usage(self._clock.now())
        usage.running[request.request_id] = tokens_of(request)
        if self.quota_of(tenant).tokens_per_s is not None:
            usage.spent += tokens_of(request)
        self._usage[tenant] = usage
        self._tenant_of[request.request_id] = tenant

    def finish(self, request_id: str, num_tokens: int | None = None) -> str | None:
        """The request has ended with so many tokens; returns its tenant.

        `num_tokens` None: those that were counted. Returns None for a request that is not counted.
        """
        tenant = self._tenant_of.pop(request_id, None)
        if tenant is None:
            return None
        usage = self._usage[tenant]
        counted = usage.running.pop(request_id)
        if num_tokens is not None and self.quota_of(tenant).tokens_per_s is not None:
            self._current(tenant)
            usage.spent = max(0.0, usage.spent + num_tokens - counted)
            self._usage[tenant] = usage
        self._current(tenant)
        return tenant

    def num_running(self, tenant: str) -> int:
        """Its requests that are counted."""
        usage = self._usage.get(tenant)
        return 0 if usage is None else len(usage.running)

    @property
    def has_any(self) -> bool:
        """Whether any tenant has a limit."""
        return bool(self.quotas) or self._default is not _UNLIMITED

    @property
    def num_all_running(self) -> int:
        return len(self._tenant_of)

    def quota_of(self, tenant: str) -> TenantQuota:
        return self.quotas.get(tenant, self._default)

    def _current(self, tenant: str) -> _Usage | None:
        """What a tenant uses now; None, and forgotten, if that is nothing."""
        usage = self._usage.get(tenant)
        if usage is None:
            return None
        now_s, rate = self._clock.now(), self.quota_of(tenant).tokens_per_s
        usage.spent = max(0.0, usage.spent - (now_s - usage.at_s) * rate) if rate is not None else 0.0
        usage.at_s = now_s
        if not usage.running and not usage.spent:
            del self._usage[tenant]
            return None
        return usage

    def _forget_idle(self) -> None:
        """Look at the tenants that were looked at longest ago. Names may come without end."""
        for tenant in list(islice(self._usage, 2)):
            if self._current(tenant) is not None:
                self._usage[tenant] = self._usage.pop(tenant)

    def check(self) -> None:
        """Raise `BookkeepingError` where requests and tenants contradict each other."""
        running = {name: tenant for tenant, usage in self._usage.items() for name in usage.running}
        if running != self._tenant_of:
            raise BookkeepingError("running requests and their tenants do not match")
        for tenant, usage in self._usage.items():
            if usage.spent < 0:
                raise BookkeepingError(f"tenant {tenant!r} has spent {usage.spent} tokens")


def tokens_of(request: RequestMetadata) -> int:
    """What counts when a request starts. Its prompt, and `ANSWER_TOKENS` of its answer at most."""
    answer = request.kv_cache_size_tokens - len(request.tokens)
    return len(request.tokens) + min(max(0, answer), ANSWER_TOKENS)
