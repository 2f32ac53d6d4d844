"""What it costs to recompute KV, or to move it from a tier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sagellm.core.errors import ConfigError
from sagellm.core.protocols.eviction import Extent


@dataclass(frozen=True, slots=True)
class PrefillCostModel:
    """Implements `CostBenefitModel` for a dense transformer.

    Prefill of one token at position p takes `seconds_per_token + p * seconds_per_token_squared`: the first
    term is the layers' matrices, the second attention over the tokens in front. A transfer takes the tier's
    latency plus bytes over bandwidth (bytes/s; infinite: the KV is there already). The defaults have the
    order of an 8-billion-parameter model in 16 bits on one large GPU. Measure yours, or use `of_model`.
    """

    block_size: int = 16
    bytes_per_block: int = 2 * 1024 * 1024
    seconds_per_token: float = 5e-5
    seconds_per_token_squared: float = 1.6e-9
    bandwidths: Mapping[str, float] = field(default_factory=dict)
    latencies_s: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.bytes_per_block < 1:
            raise ConfigError(
                f"block_size {self.block_size} and bytes_per_block {self.bytes_per_block} must be positive"
            )
        times = (self.seconds_per_token, self.seconds_per_token_squared, *self.latencies_s.values())
        if min(times) < 0 or not self.seconds_per_token + self.seconds_per_token_squared > 0:
            raise ConfigError(f"costs in seconds must not be negative, and prefill not free: {times}")
        if any(not bandwidth > 0 for bandwidth in self.bandwidths.values()):
            raise ConfigError(f"bandwidths in bytes/s must be positive, not {dict(self.bandwidths)}")

    @classmethod
    def of_model(
        cls,
        num_parameters: float,
        num_layers: int,
        hidden_size: int,
        flops_per_s: float,
        *,
        block_size: int = 16,
        bytes_per_block: int = 2 * 1024 * 1024,
        bandwidths: Mapping[str, float] | None = None,
    ) -> PrefillCostModel:
        """Computed from a model's shape and the FLOP/s that prefill reaches.

        2 FLOPs per parameter and token, and 4 per layer, hidden unit and position in front (queries with
        keys, weights with values).
        """
        if min(num_parameters, num_layers, hidden_size, flops_per_s) <= 0:
            raise ConfigError("parameters, layers, hidden size and FLOP/s must be positive")
        return cls(
            block_size,
            bytes_per_block,
            2 * num_parameters / flops_per_s,
            4 * num_layers * hidden_size / flops_per_s,
            bandwidths or {},
        )

    def recompute_s(self, extent: Extent) -> float:
        """Seconds of prefill for the extent alone, with everything in front of it cached."""
        first = extent.first_position * self.block_size
        num_tokens = extent.num_blocks * self.block_size
        attended = num_tokens * (first + (num_tokens - 1) / 2)
        return num_tokens * self.seconds_per_token + attended * self.seconds_per_token_squared

    def transfer_s(self, extent: Extent, tier: str) -> float:
        bandwidth = self.bandwidths.get(tier)
        if bandwidth is None:
            known = ", ".join(sorted(self.bandwidths)) or "none"
            raise ConfigError(f"no bandwidth is given for tier {tier!r}; known tiers: {known}")
        return self.latencies_s.get(tier, 0.0) + extent.num_blocks * self.bytes_per_block / bandwidth
