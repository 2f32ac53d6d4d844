"""A pass-through proxy that asks vLLM to report the hits of each request.

Every request is passed on as it came, and every answer as it comes. Completions and chats get one field more,
`vllm_xargs: {"kv_cache_report_mode": "full"}`, unless the client has set it.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

import httpx2
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from sagellm.core.errors import ConfigError

REPORTED = ("/v1/completions", "/v1/chat/completions")
FIELD, MODE = "vllm_xargs", "kv_cache_report_mode"
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"]
HOP_BY_HOP = frozenset(
    (
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer",
        "transfer-encoding", "upgrade", "host", "content-length",
    )
)  # fmt: skip
"""Headers of one connection (RFC 9110, 7.6.1), and those that change with the body."""
GRACE_S = 2


def with_reported_hits(body: bytes) -> bytes:
    """The body with the field that asks for reports. One that is no JSON object stays as it is: the server
    answers it."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return body
    extra = request.get(FIELD) if isinstance(request, dict) else []
    if extra is not None and not isinstance(extra, dict):
        return body
    merged: dict[str, Any] = {MODE: "full", **(extra or {})}
    return json.dumps({**request, FIELD: merged}).encode()


class ReportingProxy:
    """Serves `upstream` on `host` and `port` in a thread, from construction to `close`. `port` 0 takes a free
    one; `url` says which. Raises `ConfigError` if it cannot be bound."""

    def __init__(self, upstream: str, host: str = "127.0.0.1", port: int = 0) -> None:
        self._upstream = upstream.rstrip("/")
        app = Starlette(
            routes=[Route("/{path:path}", self._forward, methods=METHODS)], lifespan=self._with_client
        )
        try:
            self._socket = socket.create_server((host, port), backlog=2048)
        except OSError as error:
            raise ConfigError(
                f"the proxy cannot listen on {host}:{port} ({error.strerror}): choose another --listen"
            ) from error
        config = uvicorn.Config(
            app, log_level="error", access_log=False, timeout_graceful_shutdown=GRACE_S, lifespan="on"
        )
        self._server = uvicorn.Server(config)
        self.url = f"http://{host}:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, name="watch proxy", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])

    @asynccontextmanager
    async def _with_client(self, app: Starlette) -> AsyncIterator[None]:
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=100)
        async with httpx2.AsyncClient(timeout=None, limits=limits) as self._client:
            yield

    async def _forward(self, request: Request) -> Response:
        body = await request.body()
        if request.method == "POST" and request.url.path in REPORTED:
            body = with_reported_hits(body)
        query = f"?{request.url.query}" if request.url.query else ""
        outgoing = self._client.build_request(
            request.method,
            f"{self._upstream}{request.url.path}{query}",
            headers=[(name, value) for name, value in request.headers.items() if name not in HOP_BY_HOP],
            content=body,
        )
        try:
            answer = await self._client.send(outgoing, stream=True)
        except httpx2.HTTPError as error:
            reason = str(error) or type(error).__name__
            text = f"the proxy of sagellm watch cannot reach {self._upstream}: {reason}"
            return JSONResponse({"error": {"message": text, "type": "bad_gateway"}}, status_code=502)
        headers = {name: value for name, value in answer.headers.items() if name not in HOP_BY_HOP}
        return StreamingResponse(_raw(answer), status_code=answer.status_code, headers=headers)

    def close(self) -> None:
        """Stop listening; answers that take longer than `GRACE_S` are broken off."""
        self._server.should_exit = True
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


async def _raw(answer: httpx2.Response) -> AsyncIterator[bytes]:
    """The bytes as they come. Starlette ends the iteration when the client goes away."""
    try:
        async for chunk in answer.aiter_raw():
            yield chunk
    finally:
        await answer.aclose()
