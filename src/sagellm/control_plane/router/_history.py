"""What a router remembers of its placements, and learns from them.

`PlacedLoad`: load that reports do not show yet. `LearnedSpeeds`: corrections of what instances say of
themselves. `Sessions`, `TenantLoad`: where sessions and tenants were placed lately. Every table is bounded:
the oldest entry goes first.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from sagellm.control_plane.router._step_fit import StepFit, StepLine
from sagellm.core.clock import Clock
from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.router import ExecutionInstance

MOST_KEPT = 4096
"""Placements on one instance that are counted, should it never report."""


class Placed(NamedTuple):
    """Placements: how many, prompt tokens to compute, tokens of KV that answers read."""

    num_requests: int = 0
    num_tokens: int = 0
    context: int = 0


@dataclass(slots=True)
class _Placed:
    """Times, uncached prompt tokens and contexts of placements, in order, and their sums."""

    entries: deque[tuple[float, int, int]] = field(default_factory=deque)
    num_tokens: int = 0
    context: int = 0

    def drop_first(self) -> None:
        _, num_tokens, context = self.entries.popleft()
        self.num_tokens -= num_tokens
        self.context -= context


class PlacedLoad:
    """Placements since each instance's last report.

    Without them, all requests between two reports would go to the instance that had the least load. A
    placement counts until a report that is later than it. An instance that never reports (`reported_s` is 0)
    loses the oldest one with each finished request instead.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._placed: dict[str, _Placed] = {}

    def add(self, instance_id: str, num_tokens: int, context: int = 0) -> None:
        placed = self._placed.setdefault(instance_id, _Placed())
        placed.entries.append((self._clock.now(), num_tokens, context))
        placed.num_tokens += num_tokens
        placed.context += context
        if len(placed.entries) > MOST_KEPT:
            placed.drop_first()

    def of(self, instance: ExecutionInstance) -> Placed:
        """What its report does not include."""
        placed = self._placed.get(instance.instance_id)
        if placed is None:
            return Placed()
        entries, reported_s = placed.entries, instance.reported_s
        while entries and entries[0][0] < reported_s:
            placed.drop_first()
        if not entries:
            del self._placed[instance.instance_id]
        return Placed(len(entries), placed.num_tokens, placed.context)

    def finished(self, instance_id: str, *, reports: bool) -> None:
        """A request of that instance has ended."""
        placed = self._placed.get(instance_id)
        if placed is not None and placed.entries and not reports:
            placed.drop_first()

    def check(self) -> None:
        """Raise `BookkeepingError` where sums and entries contradict each other."""
        for name, placed in self._placed.items():
            num_tokens = sum(tokens for _, tokens, _ in placed.entries)
            context = sum(tokens for _, _, tokens in placed.entries)
            if (placed.num_tokens, placed.context) != (num_tokens, context):
                raise BookkeepingError(f"{name}: the placed tokens do not add up")


# -- speeds

_KEEP = 0.95
"""Weight of all earlier requests when one more is observed."""
_PRIOR_S = 0.5
"""Seconds that predictions count as having been right for, before anything was observed."""
_MOST = 4.0
"""A correction is at most this factor, either way."""
_MOST_OPEN = 512
_FLEET_STEPS = 8.0
"""Steps that the whole fleet's count as, beside those of an instance."""
_REFIT_EVERY = 8
"""Reports between two fits, once there are as many: a fit takes longer than all else about a report."""


@dataclass(slots=True)
class _Learned:
    predictions: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_OPEN))
    predicted_s: float = _PRIOR_S
    observed_s: float = _PRIOR_S
    tpot_s: float = 0.0
    reported_s: float = 0.0
    steps: StepFit = field(default_factory=StepFit)
    num_steps: int = 0
    line: StepLine = field(default_factory=StepLine)

    @property
    def factor(self) -> float:
        return min(_MOST, max(1 / _MOST, self.observed_s / self.predicted_s))


class LearnedSpeeds:
    """Seconds per prompt token and per decode step of each instance; lengths of answers.

    The instance's own measurements count first; one that has measured nothing counts as the fastest of the
    others, as it is idle. How steps lengthen is fitted to the reports of an instance, and of all others while
    it has made few. The times to the first token that were predicted for an
    instance are compared with those observed there, in sum, and its speed is corrected by their ratio: an
    instance that is slower than it says, or whose memory is short, gets less.
    """

    def __init__(self, prefill_token_s: float, step_s: float, num_output: float) -> None:
        self.num_output = num_output
        """Tokens of an answer, on average."""
        self._prefill_token_s = prefill_token_s
        self._step_s = step_s
        self._fastest_s = math.inf
        self._learned: dict[str, _Learned] = {}
        self._steps = StepFit()

    def of(self, instance: ExecutionInstance) -> tuple[float, float]:
        """Seconds per prompt token, and per step of decode."""
        learned = self._learned.get(instance.instance_id)
        rate = instance.prefill_token_s or self._prefill_token_s
        step_s = instance.step_s or (learned.tpot_s if learned is not None else 0.0)
        if step_s:
            self._fastest_s = min(self._fastest_s, step_s)
        else:
            step_s = self._step_s if math.isinf(self._fastest_s) else self._fastest_s
        return (rate if learned is None else rate * learned.factor), step_s

    def lengthening(self, instance: ExecutionInstance) -> StepLine:
        """How its decode steps grow with rows and context. Learns from its report."""
        learned = self._learned.setdefault(instance.instance_id, _Learned())
        if instance.step_s and instance.only_decodes and instance.reported_s != learned.reported_s:
            learned.reported_s = instance.reported_s
            step = instance.num_running, instance.num_used_tokens, instance.step_s
            learned.steps.add(*step)
            learned.num_steps += 1
            if learned.num_steps <= _REFIT_EVERY or not learned.num_steps % _REFIT_EVERY:
                self._steps.add(*step)
                learned.line = learned.steps.line(self._steps, _FLEET_STEPS)
        elif not learned.num_steps:
            learned.line = self._steps.line()
        return learned.line

    def predict(self, instance_id: str, ttft_s: float) -> None:
        """A request was placed, and its first token is expected after so long."""
        self._learned.setdefault(instance_id, _Learned()).predictions.append(ttft_s)

    def observe(self, instance_id: str, latencies_s: Mapping[str, float]) -> None:
        """A request has ended. Requests end in about the order in which they were placed, so sums suffice."""
        learned = self._learned.setdefault(instance_id, _Learned())
        tpot_s, ttft_s = latencies_s.get("tpot"), latencies_s.get("ttft")
        if tpot_s is not None and tpot_s > 0:
            learned.tpot_s = tpot_s if not learned.tpot_s else _KEEP * learned.tpot_s + (1 - _KEEP) * tpot_s
        decode_s = latencies_s.get("decode")
        if decode_s is not None and tpot_s:
            self.num_output = _KEEP * self.num_output + (1 - _KEEP) * (1 + decode_s / tpot_s)
        if ttft_s is not None and learned.predictions:
            learned.predicted_s = _KEEP * learned.predicted_s + learned.predictions.popleft()
            learned.observed_s = _KEEP * learned.observed_s + ttft_s


# -- sessions and tenants

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
    """Tokens by instance, at `at_s`. Half of them are forgotten in `HALF_LIFE_S`."""

    at_s: float
    total: float = 0.0
    tokens: dict[str, float] = field(default_factory=dict)


class TenantLoad:
    """The tokens that each tenant had placed on each instance lately."""

    def __init__(self, clock: Clock, most: int = MAX_TENANTS) -> None:
        self._clock = clock
        self._most = most
        self._shares: OrderedDict[str, TenantShare] = OrderedDict()

    def add(self, tenant: str, instance_id: str, num_tokens: float) -> None:
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
