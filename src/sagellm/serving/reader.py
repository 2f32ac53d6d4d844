"""From the bytes of a request to its fields, within bounds and without holding up the event loop."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel
from pydantic_core import from_json

from sagellm.core.errors import RequestError
from sagellm.serving.errors import BodyTooLargeError
from sagellm.serving.parameters import checked

MAX_VALUES = 2**20
"""JSON values in one body: token ids of a batch of prompts, above all. A million take a tenth of a second."""

_READ_AT_ONCE_BYTES = 64 * 2**10
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class RequestReader:
    """Reads bodies of at most `max_body_bytes`; large ones are parsed on another thread."""

    max_body_bytes: int

    async def read(self, model: type[M], request: Request) -> M:
        """The request as `model`. Every defect is a `RequestError` that names the field."""
        body = await self._bytes(request)
        if len(body) <= _READ_AT_ONCE_BYTES:
            return _parse(model, body)
        return await run_in_threadpool(_parse, model, body)

    async def _bytes(self, request: Request) -> bytes:
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self.max_body_bytes:
            raise self._too_large()
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self.max_body_bytes:
                raise self._too_large()
        return bytes(body)

    def _too_large(self) -> BodyTooLargeError:
        return BodyTooLargeError(
            f"the body is larger than {self.max_body_bytes} bytes (server.max_body_bytes): send a smaller one"
        )


def _parse(model: type[M], body: bytes) -> M:
    _check_number_of_values(body)
    return checked(model, json_object(body))


def _check_number_of_values(body: bytes) -> None:
    """Before anything is built. Commas within strings do not count, so a long text is never too many."""
    if body.count(b",") >= MAX_VALUES and _STRING.sub(b"", body).count(b",") >= MAX_VALUES:
        raise BodyTooLargeError(f"the body holds more than {MAX_VALUES} values: send fewer at a time")


def json_object(body: bytes) -> dict[str, Any]:
    """The body's object. It is UTF-8 throughout: half a surrogate pair, in bytes or escaped, is no JSON."""
    try:
        content = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is not JSON in UTF-8: {error}", code="invalid_json") from error
    if not isinstance(content, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    return content
