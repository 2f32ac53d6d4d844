"""`RecurrentStates`: the working states of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from sagellm.core.errors import PlanError
from sagellm.core.plan import Join
from sagellm.engines.native.memory import lazy_zeros
from sagellm.engines.native.recurrent_spec import DeltaSpec

if TYPE_CHECKING:
    from sagellm.engines.native.bridge.description import BridgedSpec
    from sagellm.engines.native.model_spec import ModelSpec


class RecurrentSpan(NamedTuple):
    """`num_tokens` of one row, from `first` on in the flat batch."""

    first: int
    num_tokens: int
    row: int


@dataclass(frozen=True, slots=True)
class RecurrentRows:
    """Which flat tokens continue which states.

    The first `decode` [D] tokens are one of each of these rows; the others belong to `prefill`.
    """

    decode: torch.Tensor
    prefill: Sequence[RecurrentSpan]


@dataclass(frozen=True, slots=True)
class LayerStates:
    """The states of one layer. `conv` [rows, width - 1, channels]: the last inputs of the convolution;
    `matrix` [rows, heads, key, value], in float32 or float64.
    """

    conv: torch.Tensor
    matrix: torch.Tensor


def state_bytes(spec: ModelSpec | BridgedSpec, dtype: torch.dtype) -> int:
    """Bytes of the recurrent states of one sequence, computed in `dtype`."""
    if spec.recurrent is None:
        return 0
    return spec.recurrent.state_bytes(dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize)


class RecurrentStates:
    """The states of `max_rows` rows, by layer; None for a layer without.

    A step moves the states of its rows on in place. If it fails they are void until their rows join anew.
    """

    def __init__(self, spec: DeltaSpec, max_rows: int, device: torch.device, dtype: torch.dtype) -> None:
        zeros = lazy_zeros if device.type == "cpu" else partial(torch.zeros, device=device)
        wide = torch.promote_types(dtype, torch.float32)
        conv, matrix = (max_rows, spec.conv_width - 1, spec.conv_channels), (max_rows, *spec.state_shape)
        self.layers = [
            LayerStates(zeros(conv, dtype=dtype), zeros(matrix, dtype=wide)) if is_recurrent else None
            for is_recurrent in spec.layers
        ]
        self._void: set[int] = set()

    def of(self, layer: int) -> LayerStates:
        """The states of a recurrent layer."""
        states = self.layers[layer]
        assert states is not None
        return states

    def begin(self, joins: Iterable[Join]) -> None:
        """Rows begin with token 0. Raises `PlanError` for one that begins behind it."""
        for join in joins:
            if join.num_computed:
                raise PlanError(
                    f"{join.request_id} joins at token {join.num_computed} without the recurrent state there"
                )
            for states in filter(None, self.layers):
                states.conv[join.row].zero_()
                states.matrix[join.row].zero_()
            self._void.discard(join.row)

    @contextmanager
    def moved_on(self, rows: Sequence[int]) -> Iterator[None]:
        """A step computes these rows. Raises `PlanError` where the state of one is void."""
        void = sorted(self._void.intersection(rows))
        if void:
            raise PlanError(f"rows {void} lost their recurrent state in a failed step; they must join anew")
        self._void.update(rows)
        yield
        self._void.difference_update(rows)
