"""The options for sampling parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from sagellm.cli._options import OptionGroup, flag
from sagellm.core.errors import RequestError, nearest


@dataclass(frozen=True, slots=True)
class Sampling(OptionGroup):
    """Sampling parameters by the names of `SamplingParams`."""

    max_tokens: int | None = flag("N", "Longest answer in tokens; default: what the context holds.")
    max_reasoning_tokens: int | None = flag("N", "Longest reasoning in tokens; then the model must answer.")
    soft_reasoning_tokens: int | None = flag("N", "Behind so many tokens reasoning ends ever sooner.")
    soft_reasoning_slope: float | None = flag(
        "X", "Added to the logit of the end of reasoning with each further token; default: 0.1."
    )
    temperature: float | None = flag("X", "0: always the likeliest token; default: the model's own.")
    top_k: int | None = flag("N", "Choose among the k likeliest tokens.")
    top_p: float | None = flag("X", "Choose among the likeliest tokens that together have this probability.")
    min_p: float | None = flag("X", "Leave out tokens less likely than this share of the likeliest.")
    seed: int | None = flag("N", "Makes the answer repeatable.")
    stop: tuple[str, ...] = flag("TEXT", "End the answer before this text; may be repeated.", ())


def parse_value(name: str, text: str) -> Any:
    """The value of a sampling parameter. Raises `RequestError` that says what would work."""
    kinds = get_type_hints(Sampling)
    if name not in kinds:
        raise RequestError(f"no sampling parameter {name!r}.{nearest(name, kinds)}", name)
    if name == "stop":
        return (text,)
    kind, _ = get_args(kinds[name])
    try:
        return kind(text)
    except ValueError as error:
        wanted = "whole number" if kind is int else "number"
        raise RequestError(f"{name} is {text!r}: write a {wanted}", name) from error
