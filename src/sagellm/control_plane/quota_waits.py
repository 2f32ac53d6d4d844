r"""`QuotaWaits`: requests that wait for the quota of their tenant.

    enter -> counted: goes to a queue ----------------------------- leave
         \-> waits behind its tenant's others --released--> counted --/

They are in none of the fleet's queues. So a tenant over its quota holds up no other, however many wait.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter

from sagellm.control_plane.quotas import TenantQuotas, tokens_of
from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import BookkeepingError, RequestError
from sagellm.core.protocols.engine import TenantUse
from sagellm.core.protocols.router import RequestMetadata

OVERLOADED = 429
"""HTTP's status."""
OTHER_TENANTS = "(other)"


class QuotaWaits:
    """Requests of a tenant start in the order in which they came.

    A call takes constant or logarithmic time for each request that moves; tenants of which nothing has
    changed are not looked at. `patience_s`: a request waits so long.
    """

    def __init__(
        self, quotas: TenantQuotas | None = None, *, patience_s: float = 60.0, clock: Clock | None = None
    ) -> None:
        self._clock = clock or MonotonicClock()
        self._quotas = quotas or TenantQuotas({}, self._clock)
        self._patience_s = patience_s
        self._waiting: dict[str, dict[str, RequestMetadata]] = {}
        """By tenant and id, the earliest first; no tenant without a request."""
        self._since_s: dict[str, tuple[float, str]] = {}
        """By id, the earliest first: since when it waits, and its tenant."""
        self._num_tokens: Counter[str] = Counter()
        """By tenant: those of its requests that wait."""
        self._due: list[tuple[float, str]] = []
        """A heap: when a tenant has the tokens for its first request."""
        self._freed: dict[str, None] = {}
        """Tenants whose first request may start now."""
        self._num_refused: Counter[str] = Counter()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._since_s)

    def enter(self, request: RequestMetadata) -> bool:
        """Whether a new request is counted and may go on. Else it waits here.

        Raises `RequestError` (429) for one that can never start, or not within the patience.
        """
        tenant, now_s = request.namespace.tenant, self._clock.now()
        limit = self._quotas.limit(request, self._num_tokens[tenant])
        if limit is None and tenant not in self._waiting:
            self._quotas.start(request)
            return True
        if limit is not None and (limit.never or (limit.until_s or 0.0) > now_s + self._patience_s):
            self._num_refused[self._shown(tenant)] += 1
            raise self._refusal(limit.reason, math.inf if limit.never else limit.until_s or 0.0)
        self._waiting.setdefault(tenant, {})[request.request_id] = request
        self._since_s[request.request_id] = now_s, tenant
        self._num_tokens[tenant] += tokens_of(request)
        self._freed[tenant] = None  # `released` finds out what it waits for
        return False

    def released(self) -> list[str]:
        """Requests that are counted now and go on."""
        now_s, found = self._clock.now(), []
        while self._due and self._due[0][0] <= now_s:
            self._freed[heapq.heappop(self._due)[1]] = None
        freed, self._freed = self._freed, {}
        for tenant in freed:
            while tenant in self._waiting:
                name, request = next(iter(self._waiting[tenant].items()))
                limit = self._quotas.limit(request)
                if limit is not None:
                    if limit.until_s is not None:
                        heapq.heappush(self._due, (limit.until_s, tenant))
                    break
                self._take_out(name)
                self._quotas.start(request)
                found.append(name)
        return found

    def late(self) -> list[tuple[str, str]]:
        """Requests whose patience is over, and why they wait. They stay until `leave`."""
        until_s, found = self._clock.now() - self._patience_s, []
        for name, (since_s, tenant) in self._since_s.items():
            if since_s > until_s:
                break
            limit = self._quotas.limit(self._waiting[tenant][name])
            reason = "others of its tenant come first" if limit is None else limit.reason
            self._num_refused[self._shown(tenant)] += 1
            found.append((name, f"{reason}, and it has waited {self._patience_s:g} s: try again later"))
        return found

    def leave(self, request_id: str, num_tokens: int | None = None) -> None:
        """The request has ended, in whatever way, with so many tokens. Does nothing the second time."""
        tenant = self._quotas.finish(request_id, num_tokens)
        if tenant is None and request_id in self._since_s:
            tenant = self._take_out(request_id)
        if tenant in self._waiting:
            self._freed[tenant] = None

    def load(self) -> dict[str, TenantUse]:
        """Of each tenant with a quota of its own, and of all others."""
        quotas, waiting = self._quotas, self._waiting
        found = {
            tenant: TenantUse(
                quotas.num_running(tenant), len(waiting.get(tenant, ())), self._num_refused[tenant]
            )
            for tenant in quotas.quotas
        }
        if not quotas.has_any:
            return found
        running, waits, _ = (sum(column) for column in zip((0, 0, 0), *found.values(), strict=True))
        found[OTHER_TENANTS] = TenantUse(
            quotas.num_all_running - running, len(self) - waits, self._num_refused[OTHER_TENANTS]
        )
        return found

    def _shown(self, tenant: str) -> str:
        return tenant if tenant in self._quotas.quotas else OTHER_TENANTS

    def _take_out(self, request_id: str) -> str:
        _, tenant = self._since_s.pop(request_id)
        request = self._waiting[tenant].pop(request_id)
        self._num_tokens[tenant] -= tokens_of(request)
        if not self._waiting[tenant]:
            del self._waiting[tenant], self._num_tokens[tenant]
        return tenant

    def _refusal(self, reason: str, until_s: float) -> RequestError:
        after_s = until_s - self._clock.now()
        if math.isfinite(after_s):
            reason += f", and would start in {after_s:.0f} s: try again then, or ask for fewer tokens"
        error = RequestError(reason, code="rate_limit_exceeded")
        error.status, error.retry_after_s = OVERLOADED, after_s
        return error

    def check(self) -> None:
        """Raise `BookkeepingError` where requests, tenants and tokens contradict each other."""
        self._quotas.check()
        waiting = {name: tenant for tenant, own in self._waiting.items() for name in own}
        if waiting != {name: tenant for name, (_, tenant) in self._since_s.items()}:
            raise BookkeepingError("requests that wait for a quota and their tenants do not match")
        tokens = {tenant: sum(map(tokens_of, own.values())) for tenant, own in self._waiting.items()}
        if tokens != {tenant: count for tenant, count in self._num_tokens.items() if count}:
            raise BookkeepingError(f"tenants wait for {dict(self._num_tokens)} tokens, not {tokens}")
        if any(not own for own in self._waiting.values()):
            raise BookkeepingError("a tenant without a request waits")
