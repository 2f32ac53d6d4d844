"""A pass-through proxy that asks vLLM to report the hits of each request.

Every request is passed on as it came, and every answer as it comes. Completions and chats get one field more,
`vllm_xargs: {"kv_cache_report_mode": "full"}`, unless the client has set it. A client that leaves ends its
request at the server.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, Self

import httpx2
import msgspec
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import Receive, Scope, Send

from sagellm.core.errors import ConfigError

log = logging.getLogger(__name__)

REPORTED = (b"/v1/completions", b"/v1/chat/completions")
FIELD, MODE, FULL = "vllm_xargs", "kv_cache_report_mode", msgspec.Raw(b'"full"')
HOP_BY_HOP = frozenset(
    (
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection",
        b"te", b"trailer", b"upgrade", b"host", b"expect",
    )
)  # fmt: skip
"""Headers of one connection (RFC 9110, 7.6.1), and those that the proxy itself answers."""
FRAMING = frozenset((b"content-length", b"transfer-encoding"))
CONNECT_S = 10.0
IDLE_S = 2.0
"""An idle connection to the server is closed after it: before the server (uvicorn: 5 s) closes it, because a
request that meets the end of a connection fails."""
GRACE_S = 2

Headers = list[tuple[bytes, bytes]]
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def with_reported_hits(body: bytes) -> bytes:
    """The body with the field that asks for reports.

    All other values keep their bytes. A body that is no JSON object, or says itself how hits are reported,
    stays as it is."""
    try:
        fields = _FIELDS.decode(body)
        own = fields.get(FIELD, msgspec.Raw(b"null"))
        extra = {} if bytes(own).strip() == b"null" else _FIELDS.decode(own)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return body
    if MODE in extra:
        return body
    return msgspec.json.encode({**fields, FIELD: {**extra, MODE: FULL}})


class ReportingProxy:
    """Serves `upstream` on `host` and `port` in a thread, from construction to `close`.

    `port` 0 takes a free one; `url` says which. Bodies of other requests and all answers pass in pieces, so
    memory holds one piece of each, and whole bodies of completions and chats. Raises `ConfigError` if the
    port cannot be bound, or `upstream` is not `http://host:port`."""

    def __init__(self, upstream: str, host: str = "127.0.0.1", port: int = 0) -> None:
        self._upstream = _server(upstream)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=2048)
            # Connections inherit it. asyncio sets it only for sockets that name their protocol; without it
            # each answer waits 40 ms for the client's delayed acknowledgement.
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            raise ConfigError(
                f"the proxy cannot listen on {host}:{port} ({error.strerror}): choose another --listen"
            ) from error
        config = uvicorn.Config(
            self._serve_http,
            interface="asgi3",
            lifespan="off",
            ws="none",
            http="h11",
            log_level="critical",  # what fails is logged here, in one line each
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=GRACE_S,
        )
        self._server = uvicorn.Server(config)
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run()), name="watch proxy", daemon=True
        )
        self._thread.start()

    async def _run(self) -> None:
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=100, keepalive_expiry=IDLE_S)
        # The transport, not a client: a client adds headers of its own and mixes its users' cookies.
        async with httpx2.AsyncHTTPTransport(limits=limits) as self._transport:
            await self._server.serve(sockets=[self._socket])

    async def _serve_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request (ASGI)."""
        if not scope["raw_path"].startswith(b"/"):
            text = f"{scope['raw_path'].decode('latin-1')!r} is no path: this proxy serves one server only"
            await PlainTextResponse(text, status_code=400)(scope, receive, send)
            return
        is_sent = asyncio.Event()
        exchange = asyncio.create_task(self._exchange(scope, receive, send, is_sent))
        gone = asyncio.create_task(_until_gone(receive, is_sent))
        try:
            await asyncio.wait((exchange, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            exchange.cancel()
            gone.cancel()
            await asyncio.gather(exchange, gone, return_exceptions=True)
        if not exchange.cancelled() and (error := exchange.exception()) is not None:
            raise error

    async def _exchange(self, scope: Scope, receive: Receive, send: Send, is_sent: asyncio.Event) -> None:
        """Pass the request on and its answer back."""
        request = Request(scope, receive)
        try:
            answer = await self._transport.handle_async_request(await self._outgoing(request, is_sent))
        except ClientDisconnect:
            return
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            text = f"the proxy of sagellm watch cannot reach {self._upstream}: {reason}"
            response = JSONResponse({"error": {"message": text, "type": "bad_gateway"}}, status_code=502)
            await response(scope, receive, send)
            return
        try:
            headers = list(_end_to_end(answer.headers.raw, {b"transfer-encoding"}))
            await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
            assert isinstance(answer.stream, httpx2.AsyncByteStream)
            async for piece in answer.stream:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except httpx2.HTTPError as error:
            log.warning("%s broke off an answer: %s", self._upstream, str(error) or type(error).__name__)
            raise  # the client's connection is cut, too
        finally:
            await answer.aclose()

    async def _outgoing(self, request: Request, is_sent: asyncio.Event) -> httpx2.Request:
        """The request for the server. `is_sent` is set when its body has been read."""
        target = request.scope["raw_path"]
        if request.scope["query_string"]:
            target += b"?" + request.scope["query_string"]
        content: Any
        if request.method == "POST" and request.scope["raw_path"] in REPORTED:
            body = with_reported_hits(await request.body())
            headers = [*_end_to_end(request.headers.raw, FRAMING), (b"content-length", b"%d" % len(body))]
            content = _Body(_once(body, is_sent))
        else:
            # Both would let a client hide a second request in the first (RFC 9112, 6.1).
            dropped = {b"content-length"} if "transfer-encoding" in request.headers else ()
            headers = list(_end_to_end(request.headers.raw, dropped))
            content = _Body(_pieces(request, is_sent))
        host = self._upstream.netloc
        return httpx2.Request(
            request.method,
            self._upstream.copy_with(raw_path=target),
            headers=[(b"host", host), *headers],
            stream=content,
            extensions={"timeout": {"connect": CONNECT_S, "read": None, "write": None, "pool": None}},
        )

    def close(self) -> None:
        """Stop listening; answers that take longer than `GRACE_S` are broken off."""
        self._server.should_exit = True
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Body(httpx2.AsyncByteStream):
    """A request's body as the transport takes it."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._pieces


async def _once(body: bytes, is_sent: asyncio.Event) -> AsyncIterator[bytes]:
    is_sent.set()
    yield body


async def _pieces(request: Request, is_sent: asyncio.Event) -> AsyncIterator[bytes]:
    async for piece in request.stream():
        if piece:
            yield piece
    is_sent.set()


async def _until_gone(receive: Receive, is_sent: asyncio.Event) -> None:
    """Return when the client has gone away. Only this reads messages once the body is there."""
    await is_sent.wait()
    while (await receive())["type"] != "http.disconnect":
        pass


def _end_to_end(
    headers: Iterable[tuple[bytes, bytes]], but: Iterable[bytes]
) -> Iterator[tuple[bytes, bytes]]:
    """The headers for the other end, names in small letters. Those in `but` are left out."""
    small = [(name.lower(), value) for name, value in headers]
    named = {
        token.strip().lower() for name, value in small if name == b"connection" for token in value.split(b",")
    }
    dropped = HOP_BY_HOP | named | frozenset(but)
    return (header for header in small if header[0] not in dropped)


def _server(upstream: str) -> httpx2.URL:
    """The server's address. Raises `ConfigError` if it is none."""
    try:
        url = httpx2.URL(upstream)
    except httpx2.InvalidURL as error:
        raise ConfigError(f"--proxy {upstream!r} is no address ({error}): write http://host:port") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"--proxy {upstream!r}: write http://host:port")
    if url.path != "/" or url.query:
        raise ConfigError(
            f"--proxy {upstream!r} has a path: write {url.scheme}://{url.netloc.decode()} alone; clients "
            "name paths themselves"
        )
    return url
