"""Gives each HTTP request an id, a log line and a count."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sagellm.core.clock import Clock
from sagellm.core.log_lines import FIELDS
from sagellm.serving.errors import CLIENT_CLOSED_REQUEST, CURRENT_REQUEST_ID, clipped
from sagellm.serving.metrics import RequestTimes

REQUEST_ID_HEADER = "x-request-id"
PROBES = frozenset({"/health", "/ready", "/version", "/metrics"})
"""Polled every few seconds by machines: logged at debug level while they succeed."""

MAX_REFUSAL_LINES = 20
REFUSAL_INTERVAL_S = 10.0

_REQUEST_ID = re.compile(r"[\w.~:/+=@-]{1,128}", re.ASCII)
_RECORD = "sagellm.record"

log = logging.getLogger("sagellm.access")


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request, from its head to the end of its answer.

    `times`: those of its prompts, if it generates. `refused`: the status that the connection answered with,
    in place of the application.
    """

    request_id: str
    method: str
    path: str
    arrived_s: float
    tenant: str = ""
    status: int = CLIENT_CLOSED_REQUEST
    refused: int | None = None
    times: list[RequestTimes] = field(default_factory=list)

    def fields(self, now_s: float) -> dict[str, Any]:
        """The fields of the log line, without those that do not apply. Times in seconds."""
        found: dict[str, Any] = {
            "request_id": self.request_id,
            "tenant": clipped(self.tenant),
            "method": clipped(self.method),
            "path": clipped(self.path),
            "status": self.refused or self.status,
            "queue_s": max((t.queued_s for t in self.times if t.queued_s is not None), default=None),
            "ttft_s": self._since(min((t.first_s for t in self.times if t.first_s), default=None)),
            "total_s": self._since(now_s),
        }
        if self.times:
            usage = sum((t.usage for t in self.times[1:]), self.times[0].usage)
            found |= {
                "prompt_tokens": usage.prompt_tokens,
                "output_tokens": usage.completion_tokens,
                "cached_tokens": usage.cached_tokens,
                "finish_reason": ",".join(sorted({t.finish_reason for t in self.times})),
            }
            if usage.misses is not None:
                missed = {cause: count for cause, count in usage.misses._asdict().items() if count}
                found |= {f"missed_blocks_{cause}": count for cause, count in missed.items()}
        return {name: value for name, value in found.items() if value not in (None, "")}

    def _since(self, at_s: float | None) -> float | None:
        return None if at_s is None else round(at_s - self.arrived_s, 6)


def record_of(scope: Scope) -> RequestRecord:
    """The record of a request that `AccessLog` handles."""
    record: RequestRecord = scope[_RECORD]
    return record


class LineLimit:
    """At most `max_lines` per `interval_s`."""

    def __init__(self, max_lines: int, interval_s: float, clock: Clock) -> None:
        self._max_lines = max_lines
        self._interval_s = interval_s
        self._clock = clock
        self._until_s: float | None = None
        self._num_lines = 0
        self._num_left_out = 0

    def take(self) -> int | None:
        """The lines left out since the last one, or None if none is allowed."""
        now_s = self._clock.now()
        if self._until_s is None or now_s >= self._until_s:
            self._until_s, self._num_lines = now_s + self._interval_s, 0
        if self._num_lines == self._max_lines:
            self._num_left_out += 1
            return None
        self._num_lines += 1
        left_out, self._num_left_out = self._num_left_out, 0
        return left_out


class RequestLog:
    """Counts HTTP requests, and writes a line for each if it is `enabled`.

    `count` is called with endpoint, method and status of each request that has ended.
    """

    def __init__(self, clock: Clock, count: Callable[[str, str, int], None], *, enabled: bool) -> None:
        self._clock = clock
        self._count = count
        self._enabled = enabled
        self._refusals: dict[str, LineLimit] = {}

    def begin(self, scope: Scope) -> RequestRecord:
        """The record of a request, a new one if there is none."""
        if _RECORD not in scope:
            given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
            request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
            scope[_RECORD] = RequestRecord(request_id, scope["method"], scope["path"], self._clock.now())
        return record_of(scope)

    def end(self, record: RequestRecord, endpoint: str) -> None:
        status = record.refused or record.status
        self._count(endpoint, record.method, status)
        level = logging.DEBUG if endpoint in PROBES and status < 400 else logging.INFO
        if self._enabled and log.isEnabledFor(level):
            log.log(level, "request", extra={FIELDS: record.fields(self._clock.now())})

    def refuse(self, request_id: str, status: int, code: str) -> None:
        """Note what a connection answers itself. Method and path are unknown: no request was read.

        Each `code` has at most `MAX_REFUSAL_LINES` lines per `REFUSAL_INTERVAL_S`, since a flood costs a
        client little.
        """
        self._count("", "", status)
        limit = self._refusals.get(code)
        if limit is None:
            limit = self._refusals[code] = LineLimit(MAX_REFUSAL_LINES, REFUSAL_INTERVAL_S, self._clock)
        if not self._enabled or (left_out := limit.take()) is None:
            return
        fields = {"request_id": request_id, "status": status, "error": code}
        log.info("request", extra={FIELDS: fields | ({"lines_left_out": left_out} if left_out else {})})


class AccessLog:
    """The outermost middleware: gives each request an id and a record.

    The id is the client's `x-request-id` if that is 1 to 128 letters, digits and `._~:/+=@-`, else a new one.
    The answer has it as a header.
    """

    def __init__(self, app: ASGIApp, *, request_log: RequestLog) -> None:
        self._app = app
        self._request_log = request_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = self._request_log.begin(scope)

        async def noted_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = record.request_id
            await send(message)

        context = CURRENT_REQUEST_ID.set(record.request_id)
        try:
            await self._app(scope, receive, noted_send)
        finally:
            CURRENT_REQUEST_ID.reset(context)
            self._request_log.end(record, getattr(scope.get("route"), "path", ""))
