"""The options for sampling parameters."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from sagellm.cli._options import OptionGroup, flag, option
from sagellm.core.errors import RequestError, nearest

_NUMBERS: Mapping[str, tuple[type, str]] = {
    "max_tokens": (int, "Longest answer in tokens; default: what the context holds."),
    "temperature": (float, "0: always the likeliest token; default: the model's own."),
    "top_k": (int, "Choose among the k likeliest tokens."),
    "top_p": (float, "Choose among the likeliest tokens that together have this probability."),
    "min_p": (float, "Leave out tokens less likely than this share of the likeliest."),
    "seed": (int, "Makes the answer repeatable."),
}

NAMES = (*_NUMBERS, "stop")


def parse_value(name: str, text: str) -> Any:
    """The value of a sampling parameter. Raises `RequestError` that says what would work."""
    if name not in NAMES:
        raise RequestError(f"no sampling parameter {name!r}.{nearest(name, NAMES)}", name)
    if name == "stop":
        return (text,)
    kind, _ = _NUMBERS[name]
    try:
        return kind(text)
    except ValueError as error:
        wanted = "whole number" if kind is int else "number"
        raise RequestError(f"{name} is {text!r}: write a {wanted}", name) from error


@dataclass(frozen=True, slots=True)
class Sampling(OptionGroup):
    """Sampling parameters by the names of `SamplingParams`; only those that were given."""

    given: Mapping[str, Any]

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        numbers = [
            option(
                name,
                kind,
                flag(f"--{name.replace('_', '-')} {'N' if kind is int else 'X'}", text),
            )
            for name, (kind, text) in _NUMBERS.items()
        ]
        stop = flag("--stop TEXT", "End the answer before this text; may be repeated.")
        return [*numbers, option("stop", list[str], stop)]

    @classmethod
    def take(cls, given: dict[str, Any]) -> Self:
        values = {name: given.pop(name) for name in _NUMBERS}
        stop = given.pop("stop")
        if stop:
            values["stop"] = tuple(stop)
        return cls({name: value for name, value in values.items() if value is not None})
