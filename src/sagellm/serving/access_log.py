"""What the server notes of each HTTP request: an id, a line in the log, a count by status."""

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
"""Asked every few seconds by machines: logged at debug level while they succeed."""

_REQUEST_ID = re.compile(r"[\w.~:/+=@-]{1,128}", re.ASCII)
_RECORD = "sagellm.record"

log = logging.getLogger("sagellm.access")


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request, from its head to the end of its answer. `times`: those of its prompts, where it
    generates."""

    request_id: str
    method: str
    path: str
    arrived_s: float
    tenant: str = ""
    status: int = CLIENT_CLOSED_REQUEST
    times: list[RequestTimes] = field(default_factory=list)

    def fields(self, now_s: float) -> dict[str, Any]:
        """What the log says of it; what does not apply is left out. Times in seconds."""
        found: dict[str, Any] = {
            "request_id": self.request_id,
            "tenant": clipped(self.tenant),
            "method": clipped(self.method),
            "path": clipped(self.path),
            "status": self.status,
            "queue_s": max((one.queued_s for one in self.times if one.queued_s is not None), default=None),
            "ttft_s": self._since(min((one.first_s for one in self.times if one.first_s), default=None)),
            "total_s": self._since(now_s),
        }
        if self.times:
            usage = sum((one.usage for one in self.times[1:]), self.times[0].usage)
            found |= {
                "prompt_tokens": usage.prompt_tokens,
                "output_tokens": usage.completion_tokens,
                "cached_tokens": usage.cached_tokens,
                "finish_reason": ",".join(sorted({one.finish_reason for one in self.times})),
            }
            if usage.misses is not None:
                missed = {cause: count for cause, count in usage.misses._asdict().items() if count}
                found |= {f"missed_blocks_{cause}": count for cause, count in missed.items()}
        return {name: value for name, value in found.items() if value not in (None, "")}

    def _since(self, at_s: float | None) -> float | None:
        return None if at_s is None else round(at_s - self.arrived_s, 6)


def record_of(scope: Scope) -> RequestRecord:
    """The record of the request; within `AccessLog`."""
    record: RequestRecord = scope[_RECORD]
    return record


class AccessLog:
    """The outermost middleware. The id comes from the client's `x-request-id` if that is 1 to 128 letters,
    digits and `._~:/+=@-`, else it is made here; the answer carries it.

    `count` is called with endpoint, method and status of each request that has ended.
    """

    def __init__(
        self, app: ASGIApp, *, clock: Clock, count: Callable[[str, str, int], None], enabled: bool
    ) -> None:
        self._app = app
        self._clock = clock
        self._count = count
        self._enabled = enabled

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        record = RequestRecord(request_id, scope["method"], scope["path"], self._clock.now())
        scope[_RECORD] = record

        async def noted_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        context = CURRENT_REQUEST_ID.set(request_id)
        try:
            await self._app(scope, receive, noted_send)
        finally:
            CURRENT_REQUEST_ID.reset(context)
            self._note(record, getattr(scope.get("route"), "path", ""))

    def _note(self, record: RequestRecord, endpoint: str) -> None:
        self._count(endpoint, record.method, record.status)
        level = logging.DEBUG if endpoint in PROBES and record.status < 400 else logging.INFO
        if self._enabled and log.isEnabledFor(level):
            fields = record.fields(self._clock.now())
            log.log(level, "request", extra={FIELDS: fields})
