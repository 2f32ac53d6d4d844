"""Whether a request enters the fleet now, later or not at all.

A strategy orders and decides; the controller around it knows limits that hold for each of them: what a tenant
may use, what fits, how many may wait.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from sagellm.control_plane.quota_waits import OVERLOADED, QuotaWaits
from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import ConfigError, RequestError, UnknownNameError, nearest
from sagellm.core.protocols.router import ExecutionInstance, InstanceType, RequestMetadata

DEPTH = 8
"""Requests that may wait at each instance: its own scheduler orders them better than a queue before it."""


@dataclass(frozen=True, slots=True)
class Admit:
    """The request is placed now."""


@dataclass(frozen=True, slots=True)
class Delay:
    """The request waits: ask again when an instance has room."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reject:
    """The request ends; the reason says what would have worked."""

    reason: str


Decision: TypeAlias = Admit | Delay | Reject
ADMIT = Admit()


@dataclass(frozen=True, slots=True)
class AdmissionCase:
    """What a strategy decides by. `has_room`: some instance takes one more. `compute_s`: what computing the
    prompt takes on the best instance; `ttft_s`: until its first token there, with what waits. `load`: share
    of all places that are taken."""

    request: RequestMetadata
    has_room: bool
    compute_s: float
    ttft_s: float
    load: float


class AdmissionStrategy(Protocol):
    def order(self, request: RequestMetadata, arrived_s: float, compute_s: float) -> float:
        """Of those that wait, the smallest goes first. It does not change while a request waits, and grows
        with `arrived_s` without bound, so that no request waits for ever."""

    def decide(self, case: AdmissionCase) -> Decision: ...

    def observe(self, ttft_s: float, goal_s: float | None) -> None:
        """Learn from a request that has its first token."""


@dataclass(slots=True)
class Fifo:
    """In order of arrival, as there is room."""

    def order(self, request: RequestMetadata, arrived_s: float, compute_s: float) -> float:
        return arrived_s

    def decide(self, case: AdmissionCase) -> Decision:
        return ADMIT if case.has_room else Delay("every instance is full")

    def observe(self, ttft_s: float, goal_s: float | None) -> None:
        """Nothing is learned."""


@dataclass(slots=True)
class ByPriority(Fifo):
    """A step of priority is worth `patience_s` seconds of waiting. The last `reserve` of the places are kept
    for requests of a priority above 0."""

    patience_s: float = 60.0
    reserve: float = 0.1

    def order(self, request: RequestMetadata, arrived_s: float, compute_s: float) -> float:
        return arrived_s - request.priority * self.patience_s

    def decide(self, case: AdmissionCase) -> Decision:
        if case.has_room and case.request.priority <= 0 and case.load >= 1 - self.reserve:
            return Delay("the last places are kept for higher priorities")
        return Fifo.decide(self, case)


@dataclass(slots=True)
class ByDeadline(Fifo):
    """The latest start that still meets the goal comes first.

    A request without a goal has `default_s` seconds. A request whose goal cannot be met any more is
    rejected, so that others meet theirs."""

    default_s: float = 30.0

    def order(self, request: RequestMetadata, arrived_s: float, compute_s: float) -> float:
        goal_s = request.slo.ttft_s
        return arrived_s + (self.default_s if goal_s is None else goal_s) - compute_s

    def decide(self, case: AdmissionCase) -> Decision:
        slack_s = case.request.slo_slack_s
        if slack_s is not None and case.ttft_s > slack_s:
            late_s = case.ttft_s - slack_s
            return Reject(
                f"the first token would come {late_s:.3g} s too late: a goal of "
                f"{(case.request.slo.ttft_s or 0.0) + late_s:.3g} s could be met now"
            )
        return Fifo.decide(self, case)


@dataclass(slots=True)
class ByCost(Fifo):
    """Cheap requests first: a second of computing counts as `weight` seconds of waiting. While more than
    `busy` of the places are taken, what takes longer than `budget_s` waits."""

    weight: float = 10.0
    busy: float = 0.75
    budget_s: float = 1.0

    def order(self, request: RequestMetadata, arrived_s: float, compute_s: float) -> float:
        return arrived_s + self.weight * compute_s

    def decide(self, case: AdmissionCase) -> Decision:
        if case.has_room and case.load > self.busy and case.compute_s > self.budget_s:
            return Delay(f"its prompt takes {case.compute_s:.3g} s, and the fleet is busy")
        return Fifo.decide(self, case)


@dataclass(slots=True)
class Adaptive(ByDeadline):
    """Orders by deadline, and learns how many requests the fleet can hold.

    The share of places in use grows by a hundredth with each goal that is met and shrinks by a tenth with
    each one that is missed (additive increase, multiplicative decrease; Chiu and Jain 1989). No request is
    rejected for its goal."""

    least: float = 0.1
    share: float = 1.0

    def decide(self, case: AdmissionCase) -> Decision:
        if case.has_room and case.load >= self.share:
            return Delay("more at once would miss their goals")
        return Fifo.decide(self, case)

    def observe(self, ttft_s: float, goal_s: float | None) -> None:
        if goal_s is not None:
            met = ttft_s <= goal_s
            self.share = min(1.0, self.share + 0.01) if met else max(self.least, self.share * 0.9)


STRATEGIES: Mapping[str, type[Fifo]] = {
    "fifo": Fifo,
    "priority": ByPriority,
    "slo": ByDeadline,
    "cost": ByCost,
    "adaptive": Adaptive,
}


def admission_strategy(setting: str | Mapping[str, Any]) -> AdmissionStrategy:
    """A new strategy by name, or by `name` and options."""
    options: dict[str, Any] = {"name": setting} if isinstance(setting, str) else dict(setting)
    name = options.pop("name", None)
    if name not in STRATEGIES:
        raise UnknownNameError(f"unknown admission {name!r}.{nearest(str(name), STRATEGIES)}")
    for option, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ConfigError(f"admission {name!r}: {option} is a number from 0 on, got {value!r}")
    try:
        return STRATEGIES[name](**options)
    except TypeError as error:
        raise ConfigError(f"admission {name!r} with {options}: {error}") from error


class AdmissionController:
    """Decides for one front. `enter` comes once for each request, then `decide` until it is placed.

    `quotas`: a request that has entered counts there until it ends, also where it is placed again.

    `depth`: requests that may wait at each instance. `max_waiting`: in the queues before them.
    """

    def __init__(
        self,
        strategy: str | Mapping[str, Any] = "fifo",
        quotas: QuotaWaits | None = None,
        *,
        depth: int = DEPTH,
        max_waiting: int = 4096,
        clock: Clock | None = None,
    ) -> None:
        if depth < 1 or max_waiting < 0:
            raise ConfigError(
                f"admission needs a depth of at least 1 and max_waiting of at least 0, got {depth} and "
                f"{max_waiting}"
            )
        self.strategy = admission_strategy(strategy)
        self.quotas = QuotaWaits(clock=clock) if quotas is None else quotas
        self.depth = depth
        self.max_waiting = max_waiting
        self._clock = clock or MonotonicClock()
        self._accepted: deque[float] = deque()

    def enter(self, request: RequestMetadata, num_waiting: int) -> bool:
        """Whether a new request may be decided on. Else `quotas.released` names it later.

        `num_waiting`: requests in the queues. Raises `RequestError` (429) where too many wait, and for what
        its tenant may not use.
        """
        num_waiting += len(self.quotas)
        if num_waiting >= self.max_waiting:
            waiting = f"{num_waiting} requests wait already: try again later"
            error = RequestError(waiting, code="rate_limit_exceeded")
            error.status = OVERLOADED
            raise error
        return self.quotas.enter(request)

    def decide(
        self,
        request: RequestMetadata,
        instances: Sequence[ExecutionInstance],
        num_waiting: int = 0,
        num_cached: int = 0,
    ) -> Decision:
        """`num_waiting`: requests before this one in the queues. `num_cached`: tokens of its prompt on the
        instance that has most of it. Costs time linear in the instances."""
        serving = [instance for instance in instances if instance.kind is not InstanceType.EMBEDDING]
        refused = self._never_fits(request, serving)
        if refused is not None:
            return refused
        decision: Decision
        if not serving:
            decision = Delay("no instance serves at the moment")
        else:
            decision = self.strategy.decide(self.case(request, serving, num_cached))
        if isinstance(decision, Delay) and num_waiting >= self.max_waiting:
            return Reject(f"{num_waiting} requests wait already, {decision.reason}: try again later")
        if isinstance(decision, Admit):
            self._accepted.append(self._clock.now())
        return decision

    def case(
        self, request: RequestMetadata, serving: Sequence[ExecutionInstance], num_cached: int = 0
    ) -> AdmissionCase:
        """A request against the instances as they last reported, with what was accepted since."""
        reported_s = min(instance.reported_s for instance in serving)
        while self._accepted and self._accepted[0] < reported_s:
            self._accepted.popleft()
        compute = max(1, len(request.tokens) - num_cached)
        places = taken = 0
        compute_s = ttft_s = math.inf
        for instance in serving:
            most = (instance.max_num_seqs or instance.num_running) + self.depth
            is_full = instance.num_waiting >= self.depth or not _holds(instance, request)
            places += most
            taken += most if is_full else min(most, instance.num_requests)
            compute_s = min(compute_s, compute * instance.prefill_token_s)
            ttft_s = min(ttft_s, (instance.num_queued_tokens + compute) * instance.prefill_token_s)
        taken += len(self._accepted)
        return AdmissionCase(request, taken < places, compute_s, ttft_s, min(1.0, taken / places))

    def _never_fits(self, request: RequestMetadata, serving: Sequence[ExecutionInstance]) -> Reject | None:
        most = max((instance.num_blocks * instance.block_size for instance in serving), default=0)
        needed = max(request.kv_cache_size_tokens, len(request.tokens))
        if (
            not most
            or needed <= most
            or any(not instance.num_blocks * instance.block_size for instance in serving)
        ):
            return None
        return Reject(
            f"the request needs KV for {needed} tokens, the largest instance has room for {most}: "
            f"shorten the prompt or max_tokens by {needed - most}"
        )


def _holds(instance: ExecutionInstance, request: RequestMetadata) -> bool:
    """Whether the instance has free blocks for the prompt, or nothing else to do."""
    if not instance.block_size or not instance.num_requests:
        return True
    return instance.num_free_blocks * instance.block_size >= len(request.tokens)
