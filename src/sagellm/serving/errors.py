"""The errors that the server answers with, in OpenAI's form.

RequestError (core)
├── UnauthorizedError    401, no key or a wrong one
├── ForbiddenError       403, administration without an admin key
├── NotFoundError        404, what does not exist
├── ConflictError        409, a limit of what may be held
├── BodyTooLargeError    413, a body that is refused unread
├── SlowClientError      408, a body that does not arrive, or a stream that its client does not read
├── OverloadedError      429, too many requests wait
├── UnavailableError     503, shutting down, or the engine loop has failed
├── GenerationError      500, the engine failed on this request
└── CallError            500, a call to the engine raised an unexpected exception
"""

from __future__ import annotations

import asyncio
import logging
import math
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sagellm.core.errors import RequestError

log = logging.getLogger("sagellm.serving")

CLIENT_CLOSED_REQUEST = 499
"""A status for the log alone, as nginx has it: the client has left."""
CURRENT_REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the HTTP request that this task answers; `AccessLog` sets it."""
RETRY_AFTER_S = 1
MAX_ECHO_CHARS = 100
MAX_MESSAGE_CHARS = 2000


class UnauthorizedError(RequestError):
    status = 401
    code = "invalid_api_key"


class ForbiddenError(RequestError):
    status = 403
    code = "admin_disabled"


class NotFoundError(RequestError):
    status = 404
    code = "not_found"


class ConflictError(RequestError):
    status = 409
    code = "limit_exceeded"


class BodyTooLargeError(RequestError):
    status = 413
    code = "request_too_large"


class SlowClientError(RequestError):
    status = 408
    code = "slow_client"


class OverloadedError(RequestError):
    status = 429
    code = "rate_limit_exceeded"


class UnavailableError(RequestError):
    status = 503
    code = "service_unavailable"


class GenerationError(RequestError):
    status = 500
    code = "generation_failed"


class CallError(RequestError):
    status = 500
    code = "internal_error"


def error_body(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """`{"error": {...}, "request_id": ...}` with the type that belongs to the status."""
    message, param = clipped(message, MAX_MESSAGE_CHARS), param and clipped(param)
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    request_id = CURRENT_REQUEST_ID.get()
    return body | {"request_id": request_id} if request_id else body


def clipped(text: str, max_chars: int = MAX_ECHO_CHARS) -> str:
    """A client's text, cut to the length that an error may repeat."""
    return text if len(text) <= max_chars else f"{text[:max_chars]}... ({len(text)} characters)"


def body_of(error: RequestError) -> dict[str, Any]:
    return error_body(str(error), error.status, error.param, error.code)


def install(app: FastAPI) -> None:
    """Answer every error of the app in OpenAI's form."""
    app.add_exception_handler(RequestError, _refused)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(ClientDisconnect, _left)
    app.add_middleware(BugAnswers)


class BugAnswers:
    """Answers an exception that nothing else handles with 500, and logs it.

    Unlike Starlette's exception handlers it does not raise again, which would end the connection under the
    client's next request. It raises only if an answer has begun. A cancelled task ends without an answer:
    only the shutdown of the server cancels, after it has closed the connection.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def noted_send(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, noted_send)
        except asyncio.CancelledError:
            log.debug("%s was cut off by the end of the server", scope["type"])
        except Exception as error:
            if begun or scope["type"] != "http":
                raise
            request_id = CURRENT_REQUEST_ID.get()
            log.exception("%s %s failed (request %s)", scope["method"], clipped(scope["path"]), request_id)
            message = f"internal error: {type(error).__name__}; the server's log has the details of request "
            body = error_body(message + request_id, 500, code="internal_error")
            await JSONResponse(body, 500)(scope, receive, send)


async def _refused(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestError)
    headers = _retry_headers(error) if error.status in (429, 503) else {}
    if error.status in (408, 503):  # a slow body is left unread; the server ends
        headers["Connection"] = "close"
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(body_of(error), error.status, headers)


def _retry_headers(error: RequestError) -> dict[str, str]:
    """When to try again. OpenAI's clients do not, where the second header says so."""
    after_s = RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
    return {"x-should-retry": "false"} if math.isinf(after_s) else {"Retry-After": str(math.ceil(after_s))}


async def _left(request: Request, _error: Exception) -> Response:
    log.debug("%s %s: the client left during its upload", request.method, clipped(request.url.path))
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _no_route(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    message = f"{clipped(request.method)} {clipped(request.url.path)}: {status.phrase}"
    if status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED):
        message += "; GET /openapi.json lists the endpoints and their methods"
    code = status.phrase.lower().replace(" ", "_")
    headers = dict(error.headers or {})
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        routes = [route for route in request.app.routes if isinstance(route, Route)]
        matching = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
        # Starlette would name the methods of the first route alone.
        headers["Allow"] = ", ".join(sorted(set().union(*(route.methods or () for route in matching))))
    return JSONResponse(error_body(message, status, code=code), status, headers)
