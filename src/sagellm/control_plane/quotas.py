"""What each tenant may use of the whole fleet."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import BookkeepingError, ConfigError
from sagellm.core.protocols.router import RequestMetadata


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one tenant; None is none.

    `tokens_per_s`: of prompts and expected answers, in the long run; `burst_tokens` at once (None: those of
    ten seconds).
    """

    max_requests: int | None = None
    tokens_per_s: float | None = None
    burst_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.max_requests is not None and self.max_requests < 1:
            raise ConfigError(f"max_requests is at least 1, got {self.max_requests}")
        if self.tokens_per_s is not None and not 0 < self.tokens_per_s < math.inf:
            raise ConfigError(f"tokens_per_s is above 0, got {self.tokens_per_s}")
        if self.burst_tokens is not None and (self.tokens_per_s is None or self.burst_tokens < 1):
            raise ConfigError("burst_tokens is at least 1 and needs tokens_per_s, at which it fills again")

    @property
    def burst(self) -> float:
        if self.burst_tokens is not None:
            return self.burst_tokens
        return math.inf if self.tokens_per_s is None else 10 * self.tokens_per_s


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
    running: set[str] = field(default_factory=set)


class TenantQuotas:
    """Counts each tenant's requests and tokens; remembers those tenants alone that use anything."""

    def __init__(
        self, quotas: Mapping[str, Quota], default: Quota = Quota(), clock: Clock | None = None
    ) -> None:
        self._quotas = dict(quotas)
        self._default = default
        self._clock = clock or MonotonicClock()
        self._usage: dict[str, _Usage] = {}
        self._tenant_of: dict[str, str] = {}

    def limit(self, request: RequestMetadata) -> QuotaLimit | None:
        """What stands against the request now; None: it may start."""
        tenant = request.namespace.tenant
        quota, usage, tokens = self._quota(tenant), self._current(tenant), _tokens(request)
        if tokens > quota.burst:
            return QuotaLimit(
                True, None,
                f"the request may use {tokens} tokens, its tenant {quota.burst:.0f} at once: ask for less",
            )  # fmt: skip
        if usage is None:
            return None
        if quota.max_requests is not None and len(usage.running) >= quota.max_requests:
            return QuotaLimit(False, None, f"its tenant has {quota.max_requests} requests at a time")
        missing = usage.spent + tokens - quota.burst
        if missing > 0 and quota.tokens_per_s is not None:
            until_s = usage.at_s + missing / quota.tokens_per_s
            return QuotaLimit(False, until_s, f"its tenant has {quota.tokens_per_s:g} tokens per second")
        return None

    def start(self, request: RequestMetadata) -> None:
        """Count a request. Raises `BookkeepingError` for one that is running."""
        if request.request_id in self._tenant_of:
            raise BookkeepingError(f"request {request.request_id!r} is counted already")
        tenant = request.namespace.tenant
        usage = self._current(tenant) or _Usage(self._clock.now())
        usage.running.add(request.request_id)
        if self._quota(tenant).tokens_per_s is not None:
            usage.spent += _tokens(request)
        self._usage[tenant] = usage
        self._tenant_of[request.request_id] = tenant

    def finish(self, request_id: str) -> None:
        """The request has ended. Does nothing for one that is not counted."""
        tenant = self._tenant_of.pop(request_id, None)
        if tenant is not None:
            self._usage[tenant].running.discard(request_id)
            self._current(tenant)

    def _quota(self, tenant: str) -> Quota:
        return self._quotas.get(tenant, self._default)

    def _current(self, tenant: str) -> _Usage | None:
        """What a tenant uses now; None, and forgotten, if that is nothing."""
        usage = self._usage.get(tenant)
        if usage is None:
            return None
        now_s, rate = self._clock.now(), self._quota(tenant).tokens_per_s
        usage.spent = max(0.0, usage.spent - (now_s - usage.at_s) * rate) if rate is not None else 0.0
        usage.at_s = now_s
        if not usage.running and not usage.spent:
            del self._usage[tenant]
            return None
        return usage

    def check(self) -> None:
        """Raise `BookkeepingError` where requests and tenants contradict each other."""
        running = {name: tenant for tenant, usage in self._usage.items() for name in usage.running}
        if running != self._tenant_of:
            raise BookkeepingError("running requests and their tenants do not match")
        for tenant, usage in self._usage.items():
            if not 0 <= usage.spent <= self._quota(tenant).burst + 1e-6:
                raise BookkeepingError(f"tenant {tenant!r} has spent {usage.spent} tokens")


def _tokens(request: RequestMetadata) -> int:
    return max(request.kv_cache_size_tokens, len(request.tokens))
