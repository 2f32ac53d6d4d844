"""The shape of latent attention, from a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sagellm.core.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-V2: arXiv:2405.04434). A token's KV is a latent of `rank` numbers
    and a key of `rope_dim` numbers that all heads share. A head's query and key have `nope_dim` numbers more,
    which are not rotated, its value `value_dim`. Queries come from a latent of `query_rank`; None: directly.
    `interleaved`: neighbours are rotated together.
    """

    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_rank: int | None
    interleaved: bool

    def __post_init__(self) -> None:
        for name in ("rank", "rope_dim", "nope_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise UnsupportedModelError(f"config.json: {name} of latent attention must be positive")

    @property
    def width(self) -> int:
        """Numbers of a token's KV."""
        return self.rank + self.rope_dim

    @property
    def key_dim(self) -> int:
        return self.nope_dim + self.rope_dim


def read_latent(config: Mapping[str, Any], *, interleaved: bool) -> LatentSpec:
    """The shape that DeepSeek V2 and V3 have, with their defaults."""
    return LatentSpec(
        rank=config.get("kv_lora_rank", 512),
        rope_dim=config.get("qk_rope_head_dim", 64),
        nope_dim=config.get("qk_nope_head_dim", 128),
        value_dim=config.get("v_head_dim", 128),
        query_rank=config.get("q_lora_rank", 1536),
        interleaved=interleaved,
    )
