"""`ServedRequests`: what a front has promised, and where it is being computed.

    add -> waits --place--> placed: attempt n on one instance, or on two --end--> gone
             ^                 |
             +---- retry ------+   an instance is lost: attempt n+1 goes on behind the tokens that were sent

An instance knows a request by the name of its attempt. What an earlier attempt still says has no request any
more, and is passed over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from sagellm.control_plane.instance_types import Service
from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.fleet import FailurePolicy
from sagellm.core.protocols.router import ExecutionInstance, Placement, RequestMetadata, Router
from sagellm.core.types import FinishReason, Request, RequestOutput

_MARK = "~"
"""Between a front, a request's id and the number of its attempt."""


@dataclass(frozen=True, slots=True)
class FleetPolicy:
    """`max_retries`: of a request whose instance was lost. `patience_s`: a request waits so long for an
    instance. `hand_over_lease_s`, `on_failure`: of hand-overs (`HandOver`)."""

    max_retries: int = 8
    patience_s: float = 60.0
    hand_over_lease_s: float = 10.0
    on_failure: FailurePolicy = FailurePolicy.RECOMPUTE
    seed: int = 0


@dataclass(slots=True, eq=False)
class FleetRequest:
    """One request of a client. `origin`: names the front, whose successor counts ids from 1 again.

    `seed`: for instances that draw by position, if the client gave none: each attempt has another id, and
    draws the same. `generated`: what has been handed out of its answer.

    `placement`: the instances of its attempt; None while it waits for one. `reason`: why it was begun again.
    `first_instance`: where its first token came from.
    """

    request: Request
    origin: str = ""
    seed: int = 0
    attempt: int = 0
    generated: list[int] = field(default_factory=list)
    placement: Placement | None = None
    num_retries: int = 0
    queued_since_s: float = 0.0
    first_token_s: float | None = None
    first_instance: str = ""
    reason: str = ""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def attempt_id(self) -> str:
        return f"{self.origin}{_MARK}{self.request.request_id}{_MARK}{self.attempt}"

    @property
    def instances(self) -> set[str]:
        """Where its attempt is, or may be soon."""
        return set() if self.placement is None else {self.placement.prefill, self.placement.decode}

    def service_at(self, instance_id: str) -> Service:
        """What it wants of one of its instances."""
        placement = self.placement
        if placement is not None and placement.is_separated:
            return Service.PREFILL if placement.prefill == instance_id else Service.DECODE
        return Service.GENERATE if self.first_instance in ("", instance_id) else Service.DECODE

    def attempt_request(self, *, is_seeded: bool) -> Request:
        """What an instance is asked to compute now. `is_seeded`: with a seed in any case, if it draws."""
        params = self.request.params
        if is_seeded and params.seed is None and not params.greedy:
            params = replace(params, seed=self.seed)
        return replace(
            self.request, request_id=self.attempt_id, params=params, generated=tuple(self.generated)
        )

    def metadata(self, now_s: float) -> RequestMetadata:
        request, goal_s = self.request, self.request.slo.ttft_s
        slack_s = None if goal_s is None or self.generated else goal_s - (now_s - request.arrival_s)
        return RequestMetadata(
            request.request_id,
            request.tokens,
            request.namespace,
            len(request.tokens) + (request.params.max_tokens or 0),
            request.slo,
            slack_s,
            request.priority,
            request.session_id,
            len(self.generated),
        )


class ServedRequests:
    """The requests by id, by attempt and by instance. `waiting`: those without a placement."""

    def __init__(self) -> None:
        self.waiting: dict[str, FleetRequest] = {}
        self._by_id: dict[str, FleetRequest] = {}
        self._by_attempt: dict[str, FleetRequest] = {}
        self._by_instance: dict[str, dict[str, FleetRequest]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def add(self, served: FleetRequest) -> None:
        self._by_id[served.request_id] = served
        self.waiting[served.request_id] = served

    def get(self, request_id: str) -> FleetRequest | None:
        return self._by_id.get(request_id)

    def of_attempt(self, attempt_id: str) -> FleetRequest | None:
        """None: the attempt is over."""
        return self._by_attempt.get(attempt_id)

    def on(self, instance_id: str) -> list[FleetRequest]:
        """Those whose attempt is there."""
        return list(self._by_instance.get(instance_id, {}).values())

    def services_on(self, instance_id: str) -> dict[str, Service]:
        """What each request there wants of the instance."""
        return {served.request_id: served.service_at(instance_id) for served in self.on(instance_id)}

    def as_seen(self, load: ExecutionInstance, now_s: float, *, is_fresh: bool) -> ExecutionInstance:
        """A report with this clock's time. Requests whose prompt is computed elsewhere wait there too."""
        instance_id = load.instance_id
        coming = sum(
            served.placement is not None and served.placement.prefill != instance_id
            for served in self.on(instance_id)
        )
        return replace(load, num_waiting=load.num_waiting + coming, is_fresh=is_fresh, reported_s=now_s)

    def num_on(self, instance_id: str) -> int:
        return len(self._by_instance.get(instance_id, ()))

    def place(self, served: FleetRequest, placement: Placement) -> None:
        """The attempt begins."""
        del self.waiting[served.request_id]
        served.placement = placement
        self._by_attempt[served.attempt_id] = served
        for instance_id in served.instances:
            self._by_instance.setdefault(instance_id, {})[served.request_id] = served

    def leave_prefill(self, served: FleetRequest) -> None:
        """The prefill instance has drawn its token. The attempt outlives it."""
        placement = served.placement
        if placement is not None and placement.is_separated:
            del self._by_instance[placement.prefill][served.request_id]
            served.placement = replace(placement, prefill=placement.decode)

    def retry(self, served: FleetRequest, now_s: float, reason: str) -> None:
        """The attempt is over; the request waits again."""
        self._end_attempt(served)
        served.attempt += 1
        served.queued_since_s, served.reason = now_s, reason
        self.waiting[served.request_id] = served

    def end(self, request_id: str) -> FleetRequest | None:
        """The request is answered or dropped. None if it is unknown."""
        served = self._by_id.pop(request_id, None)
        if served is not None:
            self.waiting.pop(request_id, None)
            self._end_attempt(served)
        return served

    def all(self) -> Iterable[FleetRequest]:
        return list(self._by_id.values())

    def _end_attempt(self, served: FleetRequest) -> None:
        self._by_attempt.pop(served.attempt_id, None)
        for instance_id in served.instances:
            self._by_instance.get(instance_id, {}).pop(served.request_id, None)
        served.placement = None

    def check(self) -> None:
        """Raise `BookkeepingError` unless each request waits, or has one attempt where it says."""
        for served in self._by_id.values():
            waits = served.request_id in self.waiting
            if waits is not (served.placement is None):
                raise BookkeepingError(f"{served.request_id} waits and is placed, or neither")
            if waits is (self._by_attempt.get(served.attempt_id) is served):
                raise BookkeepingError(f"{served.attempt_id}: its attempt is known and it waits, or neither")
        pairs = {(name, id(served)) for name, own in self._by_instance.items() for served in own.values()}
        placed = {(name, id(served)) for served in self._by_id.values() for name in served.instances}
        if pairs != placed or len(self._by_attempt) + len(self.waiting) != len(self._by_id):
            raise BookkeepingError(f"{len(pairs)} requests are known at instances, {len(placed)} name them")


def possible(placement: Placement, exchanging: Collection[str]) -> Placement:
    """A placement without what needs KV of an instance that exchanges none.

    `exchanging`: the instances that do.
    """
    if placement.is_separated and not {placement.prefill, placement.decode} <= set(exchanging):
        placement = replace(placement, prefill=placement.decode)
    if placement.fetch_from and not {placement.fetch_from, placement.prefill} <= set(exchanging):
        placement = replace(placement, fetch_from="")
    return placement


def failed_output(served: FleetRequest, reason: str, status: int) -> RequestOutput:
    """The last output of a request that ends with an error."""
    request, num_tokens = served.request, len(served.generated)
    return RequestOutput(
        request.request_id, (), len(request.tokens), 0, num_tokens,
        finish_reason=FinishReason.ERROR, error=reason, error_status=status,
    )  # fmt: skip


def observe_end(router: Router, instance_id: str, served: FleetRequest, now_s: float) -> None:
    """Teach the router how long the instances of an answer took. It ended at `instance_id`."""
    arrival_s, first_s = served.request.arrival_s, served.first_token_s
    begin, seen = {}, {"e2e": now_s - arrival_s}
    if first_s is not None:
        begin["ttft"] = first_s - arrival_s
        if len(served.generated) > 1:
            decode_s = now_s - first_s
            seen |= {"decode": decode_s, "tpot": decode_s / (len(served.generated) - 1)}
    if served.first_instance in ("", instance_id):
        router.observe(instance_id, {**begin, **seen})
    else:
        router.observe(served.first_instance, begin)
        router.observe(instance_id, seen)
