"""Feeds an engine on a simulated clock with requests by time of arrival, and notes when what happened."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sagellm.core.clock import ManualClock
from sagellm.core.errors import CapacityError
from sagellm.core.events import EventBus, RequestFinished, RequestScheduled
from sagellm.core.protocols.engine import EngineCore
from sagellm.core.types import FinishReason, Request

MAX_IDLE_STEPS = 3
"""Steps without time passing, in a row, after which an engine that has work is stuck."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One request's life in seconds of the simulated clock; `scheduled_s` is when its first step was
    planned."""

    request_id: str
    queued_s: float
    scheduled_s: float
    first_token_s: float
    finished_s: float
    num_output_tokens: int

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.queued_s

    @property
    def tpot_s(self) -> float:
        """Mean seconds per token after the first; 0 for an answer of one token."""
        return (self.finished_s - self.first_token_s) / max(1, self.num_output_tokens - 1)


def drive(
    engine: EngineCore,
    clock: ManualClock,
    events: EventBus,
    requests: Iterable[Request],
    *,
    pipelined: bool = True,
) -> list[Timing]:
    """Run until all requests have ended; their timings by arrival. `events` are those of the engine.

    `pipelined`: the host plans a step while the one before it runs (asynchronous scheduling), so what arrives
    during a step is queued at its end and is in the step after the next; without, in the next.
    Raises `CapacityError` for a request that the engine cannot serve.
    """
    arrivals = sorted(requests, key=lambda request: request.arrival_s)
    log = _Log(clock.now())
    stop = (
        events.subscribe(RequestFinished, log.finished),
        events.subscribe(RequestScheduled, log.scheduled),
    )
    next_one, began_s, idle = 0, clock.now(), 0
    try:
        while next_one < len(arrivals) or engine.has_work():
            if not engine.has_work():
                clock.advance(max(0.0, arrivals[next_one].arrival_s - clock.now()))
                began_s = clock.now()
            now_s = clock.now()
            log.planned_s = began_s if pipelined else now_s
            while next_one < len(arrivals) and arrivals[next_one].arrival_s <= log.planned_s:
                log.queued_s[arrivals[next_one].request_id] = log.planned_s
                engine.add(arrivals[next_one])
                next_one += 1
            engine.step()
            began_s = now_s
            idle = idle + 1 if clock.now() == now_s else 0
            if idle > MAX_IDLE_STEPS:
                raise CapacityError("the engine has work and computes nothing: a request does not fit")
    finally:
        for unsubscribe in stop:
            unsubscribe()
    return [log.timing(one) for one in arrivals]


class _Log:
    """What is known of each request so far. `planned_s`: when the step that runs next was planned."""

    def __init__(self, now_s: float) -> None:
        self.planned_s = now_s
        self.queued_s: dict[str, float] = {}
        self._scheduled_s: dict[str, float] = {}
        self._ended: dict[str, RequestFinished] = {}

    def scheduled(self, event: RequestScheduled) -> None:
        self._scheduled_s.setdefault(event.request_id, self.planned_s)

    def finished(self, event: RequestFinished) -> None:
        self._ended[event.request_id] = event

    def timing(self, request: Request) -> Timing:
        event, wanted = self._ended[request.request_id], request.params.max_tokens
        cut_short = event.reason == FinishReason.LENGTH and event.num_output_tokens < (wanted or 0)
        served = event.reason in (FinishReason.LENGTH, FinishReason.STOP) and not cut_short
        if event.first_token_s is None or not served:
            raise CapacityError(
                f"request {request.request_id} ended ({event.reason}) with {event.num_output_tokens} tokens: "
                "give the engine more KV blocks and a longer context, or leave the request out"
            )
        times_s = (self.queued_s[request.request_id], self._scheduled_s[request.request_id])
        first_s, last_s = event.first_token_s, event.finished_s
        return Timing(request.request_id, *times_s, first_s, last_s, event.num_output_tokens)
