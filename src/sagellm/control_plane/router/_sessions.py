"""Where sessions and tenants have been placed lately, and how much work that was.

Both tables are bounded: the oldest entry goes first."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field

from sagellm.core.clock import Clock
from sagellm.core.errors import BookkeepingError

MAX_SESSIONS = 1 << 16
MAX_TENANTS = 4096
HALF_LIFE_S = 30.0


class Sessions:
    """The instance of each session's last turn, and how many prompt tokens it had."""

    def __init__(self, most: int = MAX_SESSIONS) -> None:
        self._most = most
        self._placed: OrderedDict[str, tuple[str, int]] = OrderedDict()

    def of(self, session_id: str | None) -> tuple[str, int]:
        """Instance and tokens; an empty name without a turn before."""
        return ("", 0) if session_id is None else self._placed.get(session_id, ("", 0))

    def place(self, session_id: str, instance_id: str, num_tokens: int) -> None:
        self._placed[session_id] = (instance_id, num_tokens)
        self._placed.move_to_end(session_id)
        if len(self._placed) > self._most:
            self._placed.popitem(last=False)


@dataclass(slots=True)
class TenantShare:
    """Tokens by instance, as they counted at `at_s`; they lose half of their weight in `HALF_LIFE_S`."""

    at_s: float
    total: float = 0.0
    tokens: dict[str, float] = field(default_factory=dict)


class TenantLoad:
    """The tokens that each tenant had placed on each instance lately."""

    def __init__(self, clock: Clock, most: int = MAX_TENANTS) -> None:
        self._clock = clock
        self._most = most
        self._shares: OrderedDict[str, TenantShare] = OrderedDict()

    def add(self, tenant: str, instance_id: str, num_tokens: int) -> None:
        share = self._shares.setdefault(tenant, TenantShare(self._clock.now()))
        self._shares.move_to_end(tenant)
        self._age(share)
        share.total += num_tokens
        share.tokens[instance_id] = share.tokens.get(instance_id, 0.0) + num_tokens
        if len(self._shares) > self._most:
            self._shares.popitem(last=False)

    def of(self, tenant: str) -> TenantShare:
        """The tenant's share now; empty for one that was not placed lately."""
        share = self._shares.get(tenant)
        if share is None:
            return TenantShare(0.0)
        self._age(share)
        return share

    def _age(self, share: TenantShare) -> None:
        now_s = self._clock.now()
        if now_s > share.at_s:
            factor = 0.5 ** ((now_s - share.at_s) / HALF_LIFE_S)
            kept = {name: tokens * factor for name, tokens in share.tokens.items() if tokens * factor >= 1}
            share.tokens, share.total, share.at_s = kept, sum(kept.values()), now_s

    def check(self) -> None:
        """Raise `BookkeepingError` where a tenant's tokens do not add up."""
        for tenant, share in self._shares.items():
            if abs(share.total - sum(share.tokens.values())) > 1e-6 * max(1.0, share.total):
                raise BookkeepingError(f"tenant {tenant!r}: the tokens do not add up to {share.total}")


class RecentWork:
    """Seconds of work that were placed lately, per second; what is older counts less, by `HALF_LIFE_S`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._at_s = self._began_s = clock.now()
        self._work_s = 0.0

    def add(self, seconds: float) -> None:
        self._age()
        self._work_s += seconds

    def per_second(self) -> float:
        self._age()
        span_s = HALF_LIFE_S / math.log(2)
        seen_s = span_s * (1 - 0.5 ** ((self._at_s - self._began_s) / HALF_LIFE_S))
        return self._work_s / max(1.0, float(seen_s))

    def _age(self) -> None:
        now_s = self._clock.now()
        self._work_s *= 0.5 ** ((now_s - self._at_s) / HALF_LIFE_S)
        self._at_s = now_s
