"""Checks of the values that requests and their parameters are made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from sagellm.core.errors import RequestError, shown


def is_number(value: object) -> bool:
    # Plain types first: a check against an abstract type takes ten times as long.
    return type(value) in (int, float) or (isinstance(value, Real) and not isinstance(value, bool))


def is_integer(value: object) -> bool:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def as_tuple(name: str, wanted: str, values: Any, is_right: Callable[[object], bool]) -> tuple[Any, ...]:
    """A tuple of the values; None is none."""
    if values is not None and not isinstance(values, Iterable):
        raise wrong_type(name, wanted, values)
    found = tuple(values or ())
    for value in found:
        if not is_right(value):
            raise wrong_type(name, wanted, value)
    return found


def as_bias(bias: Any) -> Mapping[int, float]:
    """The bias of tokens by id; None is none."""
    if not bias and isinstance(bias, dict):
        return bias
    wanted = "a mapping from token ids to numbers"
    if not isinstance(bias or {}, Mapping):
        raise wrong_type("logit_bias", wanted, bias)
    found: Mapping[int, float] = bias or {}
    for token_id, value in found.items():
        if not (is_integer(token_id) and is_number(value)):
            raise wrong_type("logit_bias", wanted, {token_id: value})
    return found


def wrong_type(name: str, wanted: str, value: object) -> RequestError:
    return RequestError(f"{name} must be {wanted}, got {shown(value)}", name)


def in_range(
    name: str, value: float, low: float, high: float, *, open_low: bool = False, param: str | None = None
) -> None:
    """Raise `RequestError` unless `low <= value <= high` (`<` with `open_low`); NaN fails."""
    above = value > low if open_low else value >= low
    if above and value <= high and not math.isinf(value):
        return
    if math.isinf(high) and not math.isinf(value):
        raise RequestError(f"{name} must be at least {low}, got {value}", param or name)
    ends = f"{'(' if open_low else '['}{low}, {high}]"
    raise RequestError(f"{name} must be in {ends}, got {value}", param or name)
