"""Parts that the schemas of requests are made of (JSON Schema)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel

from sagellm.core.types import SAMPLING_RANGES

Schema = dict[str, Any]
NULL: Schema = {"type": "null"}


def rule(model: type[BaseModel], *, is_possible: bool = True) -> Schema:
    """A rule by its fields, or true for its defaults."""
    fields = [{"type": "boolean"}, model.model_json_schema()]
    return or_null(*fields) if is_possible else {"enum": [None, False]}


def numbers_below(limit: int) -> str:
    """A regular expression for the numbers below `limit`, without leading zeros."""
    digits = str(limit - 1)
    forms = ["0", f"[1-9][0-9]{{0,{len(digits) - 2}}}"] if len(digits) > 1 else []
    for i, digit in enumerate(digits):
        lowest = 1 if i == 0 and len(digits) > 1 else 0
        if int(digit) > lowest:
            forms.append(f"{digits[:i]}[{lowest}-{int(digit) - 1}][0-9]{{{len(digits) - i - 1}}}")
    return "|".join([*forms, digits])


def given(name: str, value: Schema) -> Schema:
    return {"properties": {name: value}, "required": [name]}


def in_range(name: str, *, whole: bool) -> Schema:
    low, high = SAMPLING_RANGES[name]
    return {"type": "integer" if whole else "number", "minimum": low} | (
        {} if math.isinf(high) else {"maximum": high}
    )


def integer(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def or_null(*schemas: Mapping[str, Any]) -> Schema:
    return {"anyOf": [*schemas, NULL]}


def neutral(values: Iterable[Any]) -> Schema:
    """Null, or one of the values. JSON Schema has one 1, so 1.0 is none beside it."""
    return {"enum": [None, *(value for value in values if not isinstance(value, float))]}
