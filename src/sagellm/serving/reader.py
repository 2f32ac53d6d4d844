"""From the bytes of a request to its fields, within bounds.

Large bodies are parsed on another thread, so that the event loop goes on.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel
from pydantic_core import from_json

from sagellm.core.config import ServerConfig
from sagellm.core.errors import RequestError, UnknownModelError
from sagellm.serving.errors import BodyTooLargeError, SlowClientError, clipped
from sagellm.serving.schema import checked

MAX_VALUES = 2**20
"""JSON values in one body: token ids of a batch of prompts, above all. A million take a tenth of a second."""
MAX_NAMES = 2**18
"""Names in all objects of one body, which take ten times as long. A step of an agent with a tool call and its
result has 11: this is room for 20,000 steps and the schemas of 1,000 tools."""

_READ_AT_ONCE_BYTES = 64 * 2**10

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class RequestReader:
    """Reads bodies of at most `max_body_bytes` that arrive within `body_timeout_s`, for the one model."""

    settings: ServerConfig
    model_name: str

    async def read(self, model: type[M], request: Request) -> M:
        """The request as `model`. Every defect is a `RequestError` that names the field."""
        timeout_s = self.settings.body_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                body = await self._bytes(request)
        except TimeoutError:
            limit = f"{timeout_s:g} s (server.body_timeout_s)"
            raise SlowClientError(f"the body did not arrive within {limit}: send it faster") from None
        if len(body) <= _READ_AT_ONCE_BYTES:
            parsed = _parse(model, body)
        else:
            parsed = await run_in_threadpool(_parse, model, body)
        self.check_model(getattr(parsed, "model", None))
        return parsed

    def check_model(self, name: str | None) -> None:
        """Raise `UnknownModelError` for another model than the served one; None means that one."""
        if name is not None and name != self.model_name:
            shown = clipped(repr(name))
            raise UnknownModelError(f"the model {shown} is not served here; {self.model_name!r} is", "model")

    async def _bytes(self, request: Request) -> bytes:
        limit = self.settings.max_body_bytes
        error = f"the body is larger than {limit} bytes (server.max_body_bytes): send a smaller one"
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            raise BodyTooLargeError(error)
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > limit:
                raise BodyTooLargeError(error)
        return bytes(body)


def _parse(model: type[M], body: bytes) -> M:
    structure = without_strings(body)
    _check_number_of_values(structure)
    return checked(model, json_object(body, num_names=structure.count(b":")))


def _check_number_of_values(structure: bytes) -> None:
    """Before anything is built. `structure` is of `without_strings`: a comma or bracket for each value."""
    num_values, num_names = sum(map(structure.count, (b",", b"[", b"{"))), structure.count(b":")
    for count, limit, kind in ((num_values, MAX_VALUES, "values"), (num_names, MAX_NAMES, "names")):
        if count > limit:
            raise BodyTooLargeError(f"the body holds more than {limit} {kind}: send fewer at a time")


def without_strings(body: bytes) -> bytes:
    """A JSON text without the contents of its strings, in linear time. Their closing quotes stay.

    Exact up to the first syntax error, where a parser stops. Outside of strings JSON has no backslash, so
    without the escape pairs every quote that is left opens or closes a string.
    """
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    codes = np.frombuffer(unescaped, np.uint8)
    within_string = np.logical_xor.accumulate(codes == ord('"'))
    return codes[~within_string].tobytes()


def json_object(body: bytes, num_names: int) -> dict[str, Any]:
    """The body's object. Raises `RequestError` for what is no JSON in UTF-8.

    Half a surrogate pair, in bytes or escaped, is no JSON. Nor is a name that an object holds twice, since
    parsers disagree on which value counts. The objects then hold fewer than the `num_names` names of the
    body.
    """
    try:
        content = from_json(body, allow_inf_nan=False)
        if _holds_fewer_names(content, num_names):
            json.loads(body, object_pairs_hook=_without_duplicates)
    except ValueError as error:
        raise RequestError(f"the body is not JSON in UTF-8: {error}", code="invalid_json") from error
    if not isinstance(content, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    return content


def _holds_fewer_names(content: Any, num_names: int) -> bool:
    """Whether the objects hold fewer names. Stops once all are found, before a long list of tokens."""
    containers = [content]
    while containers and num_names > 0:
        container = containers.pop()
        values = container
        if isinstance(container, dict):
            num_names -= len(container)
            values = container.values()
        if isinstance(container, (dict, list)) and num_names > 0:
            containers += [value for value in values if isinstance(value, (dict, list))]
    return num_names > 0


def _without_duplicates(pairs: list[tuple[str, Any]]) -> None:
    names: set[str] = set()
    for name, _ in pairs:
        if name in names:
            raise ValueError(f"an object has the name {clipped(repr(name))} twice")
        names.add(name)
