"""What a server answers when it cannot serve, in OpenAI's form.

RequestError (core)
├── UnauthorizedError    401, no key or a wrong one
├── OverloadedError      429, too many requests wait
├── UnavailableError     503, shutting down, or the engine loop has failed
└── GenerationError      500, the engine gave this request up
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from sagellm.core.errors import RequestError

RETRY_AFTER_S = 1


class UnauthorizedError(RequestError):
    status = 401
    code = "invalid_api_key"


class OverloadedError(RequestError):
    status = 429
    code = "rate_limit_exceeded"


class UnavailableError(RequestError):
    status = 503
    code = "service_unavailable"


class GenerationError(RequestError):
    status = 500
    code = "generation_failed"


def error_body(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """`{"error": {...}}` with the type that belongs to the status."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def body_of(error: RequestError) -> dict[str, Any]:
    return error_body(str(error), error.status, error.param, error.code)


def install(app: FastAPI) -> None:
    """Answer every error of the app in OpenAI's form."""
    app.add_exception_handler(RequestError, _refused)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(Exception, _bug)


async def _refused(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestError)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if error.status in (429, 503) else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(body_of(error), error.status, headers)


async def _no_route(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    message = f"{request.method} {request.url.path}: {status.phrase}"
    code = status.phrase.lower().replace(" ", "_")
    return JSONResponse(error_body(message, status, code=code), status, dict(error.headers or {}))


async def _bug(_request: Request, error: Exception) -> JSONResponse:
    message = f"internal error: {type(error).__name__}; the server's log has the details"
    return JSONResponse(error_body(message, 500, code="internal_error"), 500)
