"""Adds a check to schemathesis: data that fits the schemas is accepted. Exceptions are the rules that no
schema can state (they are in the description of the request's schema).

Integers are sent without a fraction: 1.0 is one for JSON Schema, and none for the server.
"""

from __future__ import annotations

import re
from typing import Any

import schemathesis
from schemathesis import Case, CheckContext, HookContext, Response

BEYOND_SCHEMA = re.compile(
    r"maximum context length|must not exceed max_tokens|differ: send one|only whole blocks are held|"
    r"has no option|has no pass|only the configuration may name|must be greater than start"
)


@schemathesis.hook
def map_body(context: HookContext, body: Any) -> Any:
    return _whole(body)


@schemathesis.check
def valid_data_is_accepted(ctx: CheckContext, response: Response, case: Case) -> bool | None:
    meta = case.meta
    if meta is None or not meta.generation.mode.is_positive or response.status_code != 400:
        return None
    message = response.json()["error"]["message"]
    assert BEYOND_SCHEMA.search(message), f"refused, though it fits the schema: {message}"
    return None


def _whole(value: Any) -> Any:
    """The value with its integral floats as integers."""
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
