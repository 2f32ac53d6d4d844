"""Type checks of sampling parameters that come from callers of the Python API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from sagellm.core.errors import RequestError, shown

_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_INTEGERS = ("top_k", "n", "min_tokens")
_INTEGERS_OR_NONE = ("seed", "logprobs", "prompt_logprobs", "max_tokens")
_FLAGS = ("include_stop_str_in_output", "ignore_eos")

_PLAIN_NUMBERS = (int, float)
"""Looked at first: to ask for abstract types takes ten times as long."""


def check_types(params: Any) -> None:
    """Raise `RequestError` for a field of `SamplingParams` whose value is of another type."""
    for name in _NUMBERS:
        if not is_number(value := getattr(params, name)):
            raise wrong_type(name, "a number", value)
    for name in _INTEGERS:
        if not is_integer(value := getattr(params, name)):
            raise wrong_type(name, "an integer", value)
    for name in _INTEGERS_OR_NONE:
        value = getattr(params, name)
        if value is not None and not is_integer(value):
            raise wrong_type(name, "an integer or None", value)
    for name in _FLAGS:
        if not isinstance(value := getattr(params, name), bool):
            raise wrong_type(name, "True or False", value)


def as_strings(stop: Any) -> tuple[str, ...]:
    """A tuple of stop strings; one string is one stop string, None is none."""
    found = (stop,) if isinstance(stop, str) else as_tuple("stop", "a string or several", stop)
    if wrong := [value for value in found if not isinstance(value, str)]:
        raise wrong_type("stop", "a string or several", wrong[0])
    return found


def as_token_ids(ids: Any) -> tuple[int, ...]:
    found = as_tuple("stop_token_ids", "several token ids", ids)
    if wrong := [value for value in found if not is_integer(value)]:
        raise wrong_type("stop_token_ids", "several token ids", wrong[0])
    return found


def as_bias(bias: Any) -> Mapping[int, float]:
    """None is none."""
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


def as_tuple(name: str, wanted: str, values: Any) -> tuple[Any, ...]:
    if type(values) is tuple:
        return values
    if not isinstance(values, Iterable) and values is not None:
        raise wrong_type(name, wanted, values)
    return tuple(values or ())


def is_number(value: object) -> bool:
    return type(value) in _PLAIN_NUMBERS or (isinstance(value, Real) and not isinstance(value, bool))


def is_integer(value: object) -> bool:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def wrong_type(name: str, wanted: str, value: object) -> RequestError:
    return RequestError(f"{name} must be {wanted}, got {shown(value)}", name)
