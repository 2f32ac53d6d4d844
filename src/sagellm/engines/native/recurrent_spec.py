"""The shape of recurrent layers, from a config.json."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from sagellm.core.blocks import cdiv
from sagellm.core.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class RecurrentSpec(ABC):
    """Layers with a recurrent state in the place of attention, where `layers[i]` is True.

    What enters the recurrence passes a causal convolution over `conv_width` tokens.
    """

    layers: tuple[bool, ...]
    conv_width: int

    @property
    @abstractmethod
    def conv_channels(self) -> int:
        """Numbers of a token that pass the convolution."""

    @property
    @abstractmethod
    def state_shape(self) -> tuple[int, int, int]:
        """Of the matrix state of one layer and sequence: heads, rows, columns."""

    def state_bytes(self, itemsize: int, wide_itemsize: int) -> int:
        """Bytes of all layers' states of one sequence; matrix states have the wide numbers.

        Those of a layer are a multiple of 8.
        """
        conv, matrix = (self.conv_width - 1) * self.conv_channels, math.prod(self.state_shape)
        return sum(self.layers) * 8 * cdiv(conv * itemsize + matrix * wide_itemsize, 8)


def _check_positive(spec: RecurrentSpec, *names: str) -> None:
    for name in (*names, "conv_width"):
        value = getattr(spec, name)
        if not isinstance(value, int) or value < 1:
            raise UnsupportedModelError(
                f"config.json: {name} of recurrent layers must be positive, got {value!r}"
            )


@dataclass(frozen=True, slots=True)
class DeltaSpec(RecurrentSpec):
    """The gated delta rule (Yang et al. 2024, arXiv:2412.06464).

    Each of `value_heads` heads has a state [key_dim, value_dim]; `key_heads` queries and keys are shared by
    equally many of them. Queries, keys and values pass the convolution. With `by_head` (Qwen3-Next) the rows
    of the input projection lie head by head in the checkpoint.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    by_head: bool

    def __post_init__(self) -> None:
        _check_positive(self, "key_heads", "value_heads", "key_dim", "value_dim")
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
        return 2 * self.key_size + self.value_size

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.value_heads, self.key_dim, self.value_dim

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


@dataclass(frozen=True, slots=True)
class MambaSpec(RecurrentSpec):
    """Mamba-2 (Dao and Gu 2024, arXiv:2405.21060).

    Each of `heads` heads has a state [state_dim, head_dim]; what is written to states and read from them (B
    and C) is shared by equally many heads in each of `groups`. `has_bias`: of the projections; `conv_bias`:
    of the convolution.
    """

    heads: int
    head_dim: int
    state_dim: int
    groups: int
    norm_eps: float
    has_bias: bool
    conv_bias: bool

    def __post_init__(self) -> None:
        _check_positive(self, "heads", "head_dim", "state_dim", "groups")
        if self.heads % self.groups:
            raise UnsupportedModelError(
                f"config.json: {self.heads} Mamba heads, not a multiple of {self.groups} groups"
            )

    @property
    def inner_size(self) -> int:
        """Numbers of the values of all heads."""
        return self.heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Numbers of what all groups write; as many are read."""
        return self.groups * self.state_dim

    @property
    def conv_channels(self) -> int:
        return self.inner_size + 2 * self.group_size

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.heads, self.state_dim, self.head_dim
