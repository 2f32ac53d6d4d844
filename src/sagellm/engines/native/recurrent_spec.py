"""The shape of recurrent layers, from a config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sagellm.core.blocks import cdiv
from sagellm.core.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """Layers by the gated delta rule (Yang et al. 2024, arXiv:2412.06464), where `layers[i]` is True.

    Each of `value_heads` heads has a state [key_dim, value_dim]; `key_heads` queries and keys are shared by
    equally many of them. Queries, keys and values pass a causal convolution over `conv_width` tokens. With
    `by_head` (Qwen3-Next) the rows of the input projection lie head by head in the checkpoint.
    """

    layers: tuple[bool, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    by_head: bool

    def __post_init__(self) -> None:
        for name in ("key_heads", "value_heads", "key_dim", "value_dim", "conv_width"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UnsupportedModelError(
                    f"config.json: {name} of linear attention must be positive, got {value!r}"
                )
        if self.value_heads % self.key_heads:
            raise UnsupportedModelError(
                f"config.json: {self.value_heads} value heads of linear attention, not a multiple of "
                f"{self.key_heads} key heads"
            )

    @property
    def key_size(self) -> int:
        """Numbers of the keys of all heads."""
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Numbers of the values of all heads."""
        return self.value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """Numbers of a token that pass the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Of the matrix state of one layer and sequence."""
        return self.value_heads, self.key_dim, self.value_dim

    def state_bytes(self, itemsize: int, wide_itemsize: int) -> int:
        """Bytes of all layers' states of one sequence; matrix states have the wide numbers.

        Those of a layer are a multiple of 8.
        """
        conv, matrix = (self.conv_width - 1) * self.conv_channels, math.prod(self.state_shape)
        return sum(self.layers) * 8 * cdiv(conv * itemsize + matrix * wide_itemsize, 8)

    def input_order(self) -> tuple[int, ...]:
        """The stored rows of queries, keys, values and output gates, in that order."""
        shared = self.value_heads // self.key_heads * self.value_dim
        size, first = 2 * self.key_dim + 2 * shared, 0
        order: list[int] = []
        for count in (self.key_dim, self.key_dim, shared, shared):
            order += [h * size + first + i for h in range(self.key_heads) for i in range(count)]
            first += count
        return tuple(order)

    def gate_order(self) -> tuple[int, ...]:
        """The stored row of each row of the projection to betas, then decays."""
        shared = self.value_heads // self.key_heads
        firsts = [2 * shared * h + part * shared for part in (0, 1) for h in range(self.key_heads)]
        return tuple(first + i for first in firsts for i in range(shared))
