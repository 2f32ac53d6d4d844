"""Whether prompt and answer of a request are computed on different instances.

Serving it whole is the default for what gains nothing: a short prompt, or one that is cached already.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from sagellm.control_plane.router._what_if import goes_apart
from sagellm.control_plane.router.instance_parts import FEWEST, Parts, PartsOptions
from sagellm.core.errors import ConfigError, UnknownNameError, nearest
from sagellm.core.protocols.router import ExecutionInstance, InstanceType, RequestMetadata


@dataclass(frozen=True, slots=True)
class SeparationCase:
    """The two choices for one request.

    `num_uncached`: prompt tokens to compute in the best place for the whole. `whole_s`, `separated_s`: what
    each costs. `whole_ttft_s`, `separated_ttft_s`: until its first token.
    """

    request: RequestMetadata
    num_uncached: int
    whole_s: float
    separated_s: float
    whole_ttft_s: float = 0.0
    separated_ttft_s: float = 0.0


class SeparationPolicy(Protocol):
    def parts(
        self,
        request: RequestMetadata,
        num_uncached: int,
        instances: Sequence[ExecutionInstance],
        now_s: float,
    ) -> Mapping[str, InstanceType]:
        """What hybrid instances are for from now on, by name.

        Those not named may do everything. The same object as before, unless something changes. Called for
        each request before it is placed; `num_uncached`: its tokens that no instance has cached.
        """

    def separate(self, case: SeparationCase) -> str:
        """The reason to separate; empty: the request is served whole."""

    def observe(self, latencies_s: Mapping[str, float]) -> None:
        """Learn from a finished request, as `Router.observe`."""


_NO_PARTS: Mapping[str, InstanceType] = MappingProxyType({})


class NeverSeparate:
    def parts(
        self,
        request: RequestMetadata,
        num_uncached: int,
        instances: Sequence[ExecutionInstance],
        now_s: float,
    ) -> Mapping[str, InstanceType]:
        """Hybrid instances may always do everything."""
        return _NO_PARTS

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
    """Fixes parts of hybrid instances for a while, by the goals that are met.

    None of them computes only prompts, or some do, and the others decode. It takes the number that a replay
    of the last `window` requests finds best, `rounds` times in a row, by `gain` of the goals that the present
    one meets (`instance_parts.py`). Where there are prefill instances, requests with fewer than `tokens`
    uncached tokens are served whole; so are, if the replay finds that better, those whose first token would
    be late at a prefill instance, after `margin` of the time that is left, and earlier elsewhere. Without a
    goal, cost decides.

    `chunk`: prompt tokens of a step, as instances are configured. `transfer_s`, `transfer_token_s`: of a
    hand-over.
    """

    tokens: int = 128
    margin: float = 0.9
    gain: float = 0.03
    rounds: int = 2
    chunk: int = 2048
    window: int = 512
    transfer_s: float = 2e-3
    transfer_token_s: float = 5e-6
    _parts: Parts = field(init=False)
    _ttft_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        if self.chunk < 1 or self.window < FEWEST or self.rounds < 1:
            raise TypeError(f"chunk and rounds are 1 or more, window {FEWEST} or more")
        self._parts = Parts(
            PartsOptions(
                int(self.tokens), self.margin, self.gain, int(self.rounds), int(self.chunk), int(self.window),
                self.transfer_s, self.transfer_token_s,
            )
        )  # fmt: skip

    def parts(
        self,
        request: RequestMetadata,
        num_uncached: int,
        instances: Sequence[ExecutionInstance],
        now_s: float,
    ) -> Mapping[str, InstanceType]:
        return self._parts.place(request, num_uncached, instances, now_s)

    def separate(self, case: SeparationCase) -> str:
        slo, slack_s = case.request.slo, case.request.slo_slack_s
        if slo.tpot_s is None and slo.ttft_s is None:
            return SeparateByCost().separate(case)
        slack_s = math.inf if slack_s is None else self.margin * slack_s
        apart_s, whole_s = case.separated_ttft_s, case.whole_ttft_s
        rescues = self._parts.form.rescues
        if not goes_apart(case.num_uncached, apart_s, whole_s, slack_s, self.tokens, rescues=rescues):
            return ""
        return f"first token after {apart_s:.3g} s where prompts are computed"

    def observe(self, latencies_s: Mapping[str, float]) -> None:
        decode_s, tpot_s = latencies_s.get("decode"), latencies_s.get("tpot")
        self._ttft_s = latencies_s.get("ttft", self._ttft_s)
        if decode_s is not None and tpot_s:
            num_tokens, e2e_s = 1 + round(decode_s / tpot_s), latencies_s.get("e2e", decode_s)
            self._parts.answered(num_tokens, e2e_s, self._ttft_s, tpot_s)


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
