"""What differs between the layers of a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sagellm.core.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Heads and MLP width of one layer. It attends to the KV of layer `kv_source`: its own, or an earlier
    layer's of the same shape. With `value_is_key` one projection gives keys and values.
    """

    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    kv_source: int
    value_is_key: bool = False

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "head_dim", "intermediate_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UnsupportedModelError(f"config.json: {name} must be a positive integer, got {value!r}")

    @property
    def kv_size(self) -> int:
        """Numbers of a token's keys."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class TemperatureSpec:
    """Queries grow with their positions in layers without RoPE.

    At position p they are multiplied by 1 + `factor` log(1 + floor((p + 1) / `length`)).
    Llama 4, after Nakanishi 2025, "Scalable-Softmax" (arXiv:2501.19399).
    """

    length: int
    factor: float

    def of(self, positions: torch.Tensor, max_position: int, dtype: torch.dtype) -> torch.Tensor | None:
        """The factors [T, 1, 1] at `positions` [T]; None where all are 1."""
        if max_position + 1 < self.length:
            return None
        steps = torch.floor((positions.to(torch.float32) + 1) / self.length)
        return (torch.log1p(steps) * self.factor + 1).to(dtype)[:, None, None]


@dataclass(frozen=True, slots=True)
class LayerInputSpec:
    """A vector of `width` numbers for each layer and token.

    It is looked up in a table, of `vocab_size` rows for all layers, and projected from the embedding. A gated
    projection behind the MLP adds it to the stream. The table's rows are multiplied by `scale`.
    """

    width: int
    vocab_size: int
    scale: float
