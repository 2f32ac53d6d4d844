"""What a sweep runs: policies x capacities x seeds, and how it counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sagellm.benchmarks.replay.block_trace import BlockTrace
from sagellm.benchmarks.replay.measures import first_counted
from sagellm.core.errors import ConfigError
from sagellm.core.registry import registry
from sagellm.kvmgr.eviction._cost import PrefillCostModel

OPTIMUM = "optimum"
"""The offline bound, where a policy's name is asked for: it knows the future."""
GIVEN = ("capacity", "clock", "seed")
"""What replay itself gives to a policy that takes it."""
DEFAULT_COST = PrefillCostModel()
CAPACITIES = ("0.5%", "1%", "2%", "5%", "10%", "25%")


@dataclass(frozen=True, slots=True)
class Capacity:
    """As it was asked for, and in blocks."""

    text: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Case:
    """One replay. `seed` is None for a policy that takes none, which runs once."""

    policy: str
    capacity: Capacity
    seed: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """`capacities`: counts of blocks, or shares of the trace's unique ones as `1%`. `options`: by policy.
    `causes`: say why blocks were missing, which takes more time than the replay; no speed is reported then.
    `seconds_per_token`, `seconds_per_token_squared`: see `PrefillCostModel`.
    """

    policies: tuple[str, ...]
    capacities: tuple[str, ...] = CAPACITIES
    seeds: tuple[int, ...] = (0,)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    warmup: str = "0%"
    causes: bool = False
    premature_s: float = 60.0
    seconds_per_token: float = DEFAULT_COST.seconds_per_token
    seconds_per_token_squared: float = DEFAULT_COST.seconds_per_token_squared

    def cost(self, block_tokens: int = 1) -> PrefillCostModel:
        """Seconds of prefill for extents of such blocks."""
        return PrefillCostModel(
            block_size=block_tokens,
            seconds_per_token=self.seconds_per_token,
            seconds_per_token_squared=self.seconds_per_token_squared,
        )

    def cases(self, trace: BlockTrace) -> list[Case]:
        """All replays, in order of policy, capacity and seed. Raises the error of whatever in the plan is
        unknown or out of range, before anything runs."""
        self._check(trace)
        capacities = [capacity(text, trace.num_unique) for text in self.capacities]
        return [
            Case(policy, size, seed)
            for policy in dict.fromkeys(self.policies)
            for size in dict.fromkeys(capacities)
            for seed in self._seeds(policy)
        ]

    def _seeds(self, policy: str) -> tuple[int | None, ...]:
        takes_seed = policy != OPTIMUM and "seed" in registry("policy").options(policy)
        return tuple(dict.fromkeys(self.seeds)) if takes_seed else (None,)

    def _check(self, trace: BlockTrace) -> None:
        if not (self.policies and self.capacities and self.seeds):
            raise ConfigError("a sweep needs at least one policy, one capacity and one seed")
        self.cost()
        first_counted(trace, self.warmup)
        if not (self.premature_s >= 0 and math.isfinite(self.premature_s)):
            raise ConfigError(f"premature_s must be 0 or more seconds, got {self.premature_s}")
        for policy in self.options:
            if policy not in self.policies:
                raise ConfigError(f"options are given for {policy!r}, but the sweep runs {self.policies}")
        for policy in self.policies:
            _check_options(policy, self.options.get(policy, {}))


def _check_options(policy: str, options: Mapping[str, Any]) -> None:
    takes = registry("policy").options(policy) if policy != OPTIMUM else {}
    named = [name for name in takes if name not in GIVEN]
    for option in options:
        if option in GIVEN:
            raise ConfigError(f"option {policy}.{option}: replay itself gives it to the policy")
        if option not in named:
            raise ConfigError(
                f"policy {policy!r} has no option {option!r}; it takes {', '.join(named) or 'none'}"
            )


def capacity(text: str, num_unique: int) -> Capacity:
    """`1%` of the unique blocks, rounded, or a count of blocks; at least one. Raises `ConfigError`."""
    try:
        size = float(text.removesuffix("%")) if text.endswith("%") else int(text)
        num_blocks = max(1, round(num_unique * size / 100)) if text.endswith("%") else int(size)
    except (ValueError, OverflowError):
        size = num_blocks = 0
    if not size > 0:
        raise ConfigError(f"capacity {text!r}: write blocks from 1 on, or a share of the unique ones as 1%")
    return Capacity(text, num_blocks)
