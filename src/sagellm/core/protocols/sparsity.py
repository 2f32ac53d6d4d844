"""Contract of sparsity: weights or attention left out, at a stated loss."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from sagellm.core.types import Tokens


class SparsityPattern(str, Enum):
    """Which weights are zeroed together. `N:M`: at most N of M neighbours are kept; `BLOCK` chooses blocks,
    `UNSTRUCTURED` single weights."""

    TWO_FOUR = "2:4"
    FOUR_EIGHT = "4:8"
    BLOCK = "block"
    UNSTRUCTURED = "unstructured"

    @property
    def fixed_ratio(self) -> float | None:
        """The only ratio that the pattern allows, or None where it is free."""
        return 0.5 if self in (SparsityPattern.TWO_FOUR, SparsityPattern.FOUR_EIGHT) else None


@dataclass(frozen=True, slots=True)
class SparseLayer:
    """One layer: the share of zero weights, and the relative error of its output."""

    name: str
    ratio: float
    relative_error: float


@dataclass(frozen=True, slots=True)
class SparseModel:
    """`accelerated` is false where no kernel uses the zeros: smaller on disk, not faster."""

    model: Any
    pattern: SparsityPattern
    layers: tuple[SparseLayer, ...]
    accelerated: bool

    @property
    def ratio(self) -> float:
        """Mean over layers."""
        return sum(layer.ratio for layer in self.layers) / len(self.layers) if self.layers else 0.0


class SparsityController(Protocol):
    """One method (magnitude, Wanda, SparseGPT, ...) with one pattern."""

    name: str
    pattern: SparsityPattern

    def apply_sparsity(self, model: Any, ratio: float, calibration: Iterable[Tokens] = ()) -> SparseModel:
        """A pruned copy of the model.

        Exactly `ratio` of each pruned layer's weights are zero (up to one pattern group). Raises `ValueError`
        for a ratio outside [0, 1) or other than the pattern's `fixed_ratio`, and `SageError`, before any
        change, where the method needs calibration data and got none.
        """


class AttentionSelector(Protocol):
    """Sparse attention: which KV blocks a query has to read."""

    def select(self, query: Any, num_blocks: int, budget_blocks: int) -> tuple[int, ...]:
        """At most `budget_blocks` distinct indices in rising order, always with the last block. With a budget
        of at least `num_blocks` it returns all of them: attention is then exact."""
