"""Whether prompt and answer of a request are computed on different instances.

Serving it whole is the default for what gains nothing: a short prompt, or one that is cached already.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from sagellm.core.errors import ConfigError, UnknownNameError, nearest
from sagellm.core.protocols.router import RequestMetadata


@dataclass(frozen=True, slots=True)
class SeparationCase:
    """The two choices for one request. `num_uncached`: prompt tokens to compute in the best place for the
    whole. `whole_s`, `separated_s`: what each costs. `prefill_share`: of the time of all instances, what
    computing prompts took lately. `step_s`: of a decode step, in that place."""

    request: RequestMetadata
    num_uncached: int
    whole_s: float
    separated_s: float
    prefill_share: float = 0.0
    step_s: float = 0.0


class SeparationPolicy(Protocol):
    def separate(self, case: SeparationCase) -> str:
        """The reason to separate; empty: the request is served whole."""

    def observe(self, latencies_s: Mapping[str, float]) -> None:
        """Learn from a finished request, as `Router.observe`."""


class NeverSeparate:
    def separate(self, case: SeparationCase) -> str:
        return ""

    def observe(self, latencies_s: Mapping[str, float]) -> None:
        """Nothing is learned."""


class AlwaysSeparate(NeverSeparate):
    def separate(self, case: SeparationCase) -> str:
        return "always"


@dataclass(slots=True)
class SeparateAbove(NeverSeparate):
    """Separates from `tokens` uncached tokens on."""

    tokens: int = 512

    def separate(self, case: SeparationCase) -> str:
        return f"{case.num_uncached} uncached tokens" if case.num_uncached >= self.tokens else ""


@dataclass(slots=True)
class SeparateByCost(NeverSeparate):
    """Takes what costs less; separation must save `margin` of the whole's cost."""

    margin: float = 0.0

    def separate(self, case: SeparationCase) -> str:
        saved_s = case.whole_s - case.separated_s
        return f"saves {saved_s:.3g} s" if saved_s > self.margin * abs(case.whole_s) else ""


@dataclass(slots=True)
class SeparateAdaptively(NeverSeparate):
    """Separates while answers would else miss their goal for the time per token.

    An instance that computes prompts for a share p of its time gives a token every step / (1 - p) seconds
    (the steps of prompts delay those of answers). Above `high` of the goal, requests with `tokens` uncached
    tokens or more are separated, until it is below `low` of it. Without a goal, cost decides.
    """

    tokens: int = 512
    high: float = 0.8
    low: float = 0.6
    _is_on: bool = False

    def separate(self, case: SeparationCase) -> str:
        goal_s = case.request.slo.tpot_s
        if goal_s is None:
            return SeparateByCost().separate(case)
        idle = 1 - min(case.prefill_share, 0.99)
        expected_s = case.step_s / idle
        self._is_on = expected_s > (self.low if self._is_on else self.high) * goal_s
        if not self._is_on or case.num_uncached < self.tokens or case.step_s > goal_s:
            return ""
        return f"{expected_s * 1e3:.3g} ms per token expected where prompts are computed"


POLICIES: Mapping[str, type[NeverSeparate]] = {
    "never": NeverSeparate,
    "always": AlwaysSeparate,
    "threshold": SeparateAbove,
    "cost": SeparateByCost,
    "adaptive": SeparateAdaptively,
}


def separation_policy(setting: str | Mapping[str, Any]) -> SeparationPolicy:
    """A new policy, by name, or by `name` and options."""
    options: dict[str, Any] = {"name": setting} if isinstance(setting, str) else dict(setting)
    name = options.pop("name", None)
    if name not in POLICIES:
        raise UnknownNameError(f"unknown separation {name!r}.{nearest(str(name), POLICIES)}")
    bad = [option for option, value in options.items() if not _is_number(value) or option.startswith("_")]
    try:
        if bad:
            raise TypeError(f"{bad[0]} must be a number from 0 on")
        return POLICIES[name](**options)
    except TypeError as error:
        raise ConfigError(f"separation {name!r} with {options}: {error}") from error


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
