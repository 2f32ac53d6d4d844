"""A client's connection: limits on time and number, and strict HTTP/1.1.

Uvicorn's h11 protocol answers the requests. `Connection` closes connections that make no progress, refuses
those beyond the limit, and refuses bytes that servers and proxies read differently (request smuggling).
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import uuid
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
from h11._receivebuffer import ReceiveBuffer
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.config import ServerConfig
from sagellm.serving.access_log import REQUEST_ID_HEADER, LineLimit, RequestLog
from sagellm.serving.errors import RETRY_AFTER_S, clipped, error_body

log = logging.getLogger("sagellm.serving")
_errors_only = logging.getLogger("sagellm.serving.connection")
_errors_only.setLevel(logging.ERROR)
"""Replaces uvicorn's own log, which would have a warning for every request that is no HTTP."""

MAX_HEAD_BYTES = 64 * 2**10
"""Request line and headers."""
MAX_CHUNKS = 2**14
"""Of one chunked body: each takes as much time as a small request line, however few bytes it has."""
LINGER_S = 2.0
"""How long a refused connection stays open: closed with unread bytes, the client could lose the answer."""

_MAX_REFUSED = 128
"""Connections beyond the limit that get an answer; those beyond that are closed without one."""
_FORBIDDEN = b"\r\n\0\v\f"
"""Bytes that no line may hold. Other servers read CR or LF alone differently; the rest makes h11's regular
expressions backtrack, in quadratic time."""


class RateLimitedLog:
    """Logs a warning at most once per `interval_s`, with the number left out."""

    def __init__(self, interval_s: float = 10.0, clock: Clock | None = None) -> None:
        self._limit = LineLimit(1, interval_s, clock or MonotonicClock())

    def warning(self, message: str) -> None:
        left_out = self._limit.take()
        if left_out is not None:
            repeated = f" ({left_out + 1} times since the last such line)" if left_out else ""
            log.warning("%s%s", message, repeated)


_Timeout = tuple[float, Callable[[], None]]
"""How long the server waits for something, and what it does then."""


class Connection(H11Protocol):
    """Limits the times for headers, between requests, and for reading an answer.

    `RequestReader` limits the time for a body. `request_log` notes what is answered here, in place of the
    application; `full` warns when connections are refused for their number.
    """

    def __init__(
        self,
        *args: Any,
        settings: ServerConfig,
        request_log: RequestLog,
        full: RateLimitedLog,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.conn = StrictConnection()
        self.logger = _errors_only
        self.timeout_keep_alive = settings.keep_alive_timeout_s  # type: ignore[assignment]
        self._settings = settings
        self._request_log = request_log
        self._full = full
        self._refused = False
        head_s = settings.header_timeout_s
        self._head: _Timeout = (head_s, self._end_without_head)  # of the first request, or one that has begun
        self._next_request: _Timeout = (settings.keep_alive_timeout_s, self.timeout_keep_alive_handler)
        self._rest_of_body: _Timeout = (head_s, self.abort)  # of a request that has been answered
        self._waiting: _Timeout | None = None
        self._wait_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that the send timeout sees every unread byte
        if len(self.connections) <= self._settings.max_connections:
            self._wait_for(self._head)
            return
        limit = f"{self._settings.max_connections} connections are open (server.max_connections)"
        self._full.warning(f"refused a connection: {limit}")
        if len(self.connections) > self._settings.max_connections + _MAX_REFUSED:
            transport.abort()
        else:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, f"{limit}: try again later", "too_many_connections")

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._wait_timer, self._send_timer):
            if timer is not None:
                timer.cancel()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        self._wait_for(self._missing())

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_for(self._missing())

    def send_400_response(self, msg: str) -> None:
        """Answer what h11 refuses. The text of its error says more than `msg`."""
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        self._refuse(HTTPStatus(status), f"invalid HTTP: {clipped(str(error or msg))}", "invalid_http")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_sending()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._send_timer is not None:
            self._send_timer.cancel()

    def _should_upgrade(self) -> bool:
        """False: no other protocol is served, and an offer of one needs no warning."""
        return False

    def _missing(self) -> _Timeout | None:
        """What the server waits for; None while it answers or reads a body."""
        if self._refused or self.transport.is_closing():
            return None
        if self.conn.their_state is h11.IDLE:
            begun = self._waiting is self._head or self.conn.trailing_data[0]
            return self._head if begun else self._next_request
        if self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete:
            return self._rest_of_body
        return None

    def _wait_for(self, waiting: _Timeout | None) -> None:
        """Start the timer. A timer for the same thing runs on: no byte prolongs it."""
        if self._refused or waiting is self._waiting:
            return
        self._waiting = waiting
        if self._wait_timer is not None:
            self._wait_timer.cancel()
        if waiting is not None:
            self._wait_timer = self.loop.call_later(*waiting)

    def _end_without_head(self) -> None:
        if self.conn.trailing_data[0]:
            limit = f"{self._settings.header_timeout_s:g} s (server.header_timeout_s)"
            message = f"the headers did not arrive within {limit}"
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, message, "request_timeout")
        else:  # a connection made in advance and not used
            self.transport.close()

    def _watch_sending(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        self._send_timer = self.loop.call_later(self._settings.send_timeout_s, self._end_unread, unsent)

    def _end_unread(self, unsent_before: int) -> None:
        if self.transport.get_write_buffer_size() < unsent_before:
            self._watch_sending()
        else:
            self.abort()

    def _refuse(self, status: HTTPStatus, message: str, code: str) -> None:
        """Answer in place of the application, drop what still comes, and close."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # another answer has begun
            self.transport.close()
            return
        self._wait_for(None)
        self._refused = True
        request_id = self._note_refusal(status, code)
        log.debug("answered %d to %s (request %s): %s", status, self.client, request_id, message)
        body = error_body(message, status, code=code) | {"request_id": request_id}
        self.transport.write(_response(status, body, request_id))
        self._linger()

    def _note_refusal(self, status: HTTPStatus, code: str) -> str:
        """The id of the request, a new one if none was read.

        A request that the application has begun to answer is logged there, when it sees the disconnect.
        """
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        if cycle is None or cycle.response_complete:
            request_id = uuid.uuid4().hex
            self._request_log.refuse(request_id, status, code)
            return request_id
        record = self._request_log.begin(cycle.scope)  # type: ignore[arg-type]
        record.refused = status
        cycle.disconnected = True
        cycle.message_event.set()
        return record.request_id

    def _linger(self) -> None:
        """Drop what the client still sends, until it closes or `LINGER_S` have passed."""
        if self.transport.get_write_buffer_size():
            self.transport.close()
            return
        try:
            self.transport.write_eof()
        except OSError:  # the client has left
            self.abort()
        else:
            self._wait_timer = self.loop.call_later(LINGER_S, self.abort)

    def abort(self) -> None:
        """Close at once, even during an answer. The application sees a disconnect."""
        self.transport.abort()


def _response(status: HTTPStatus, content: dict[str, Any], request_id: str) -> bytes:
    body = json.dumps(content).encode()
    retry = f"retry-after: {RETRY_AFTER_S}\r\n" if status == HTTPStatus.SERVICE_UNAVAILABLE else ""
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n{REQUEST_ID_HEADER}: {request_id}\r\n{retry}"
        "connection: close\r\n\r\n"
    )
    return head.encode() + body


class StrictConnection(h11.Connection):
    """h11's state machine for a server, with stricter checks.

    Refuses what h11 accepts: CR or LF alone, a body with two lengths, heads and numbers of chunks beyond the
    limits.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self._receive_buffer = _StrictBuffer()

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            if event.http_version[:2] != b"1.":
                version = event.http_version.decode()
                raise h11.RemoteProtocolError(f"HTTP/{version} is not spoken here: send HTTP/1.1", 505)
            names = {name for name, _ in event.headers}
            if b"transfer-encoding" in names and b"content-length" in names:
                raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding: send one of them")
            if b"transfer-encoding" in names and event.http_version < b"1.1":
                raise h11.RemoteProtocolError("Transfer-Encoding needs HTTP/1.1")
        return event


class _StrictBuffer(ReceiveBuffer):
    """Checks that lines end in CRLF and hold no `_FORBIDDEN` byte, each byte once."""

    def __init__(self) -> None:
        super().__init__()
        self._num_chunks = 0

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """The lines of a head, or of the trailers of a chunked body."""
        self._num_chunks = 0
        if self._data[:2] == b"\r\n":
            self._extract(2)
            return []
        checked = self._multiple_lines_search
        end = self._data.find(b"\r\n\r\n", max(0, checked - 3))
        stop = len(self._data) if end < 0 else end + 4
        if self._data[stop - 1 : stop] == b"\r":  # its LF may come with the next packet
            stop -= 1
        _check_line(self._data[checked:stop])
        if stop > MAX_HEAD_BYTES:
            raise h11.LocalProtocolError(f"headers of more than {MAX_HEAD_BYTES} bytes", 431)
        self._multiple_lines_search = stop
        return None if end < 0 else self._extract(stop)[:-4].split(b"\r\n")

    def maybe_extract_next_line(self) -> bytearray | None:
        """The line before a chunk."""
        line = super().maybe_extract_next_line()
        if line is not None:
            _check_line(line)
            self._num_chunks += 1
            if self._num_chunks > MAX_CHUNKS:
                raise h11.LocalProtocolError(
                    f"a body of more than {MAX_CHUNKS} chunks: send larger ones", 413
                )
        return line


def _check_line(line: bytearray) -> None:
    within = line.replace(b"\r\n", b"")
    if len(within.translate(None, _FORBIDDEN)) < len(within):
        raise h11.LocalProtocolError("a line holds NUL, VT, FF, or a CR or LF that is no line end")
