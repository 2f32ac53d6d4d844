"""`RecurrentStates`: the working states of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from sagellm.core.errors import PlanError
from sagellm.core.plan import Join
from sagellm.engines.native.memory import lazy_zeros
from sagellm.engines.native.recurrent_spec import RecurrentSpec

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

    The first `decode` [D] tokens are one of each of these rows; the others belong to `prefill`. `kept`: by
    row, the states that the step keeps.
    """

    decode: torch.Tensor
    prefill: Sequence[RecurrentSpan]
    kept: Mapping[int, Sequence[KeptPart]] = field(default_factory=dict)

    def cuts(self, row: int, num_tokens: int) -> list[int]:
        """Behind which tokens a state is kept, and behind the last of `num_tokens`."""
        inside = {part.after for part in self.kept.get(row, ()) if 0 < part.after < num_tokens}
        return [*sorted(inside), num_tokens]


class KeptPart(NamedTuple):
    """A state that is kept `after` so many tokens of the step, in `buffer`."""

    after: int
    buffer: torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerStates:
    """The states of one layer. `conv` [rows, width - 1, channels]: the last inputs of the convolution;
    `matrix` [rows, *state shape], in float32 or float64. A kept state has them from `first_byte` on.
    """

    conv: torch.Tensor
    matrix: torch.Tensor
    first_byte: int

    def keep(self, rows: RecurrentRows, row: int, after: int) -> None:
        """Copy the states of a row where one is kept `after` so many tokens."""
        for part in rows.kept.get(row, ()):
            if part.after == after:
                for own, kept in self._pairs(row, part.buffer):
                    kept.copy_(own)

    def restore(self, row: int, kept_state: torch.Tensor) -> None:
        """Let a row begin with a kept state."""
        for own, kept in self._pairs(row, kept_state):
            own.copy_(kept)

    def _pairs(self, row: int, buffer: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        first = self.first_byte
        for own in (self.matrix[row].view(-1), self.conv[row].view(-1)):
            last = first + own.nbytes
            yield own, buffer[first:last].view(own.dtype)
            first = last


def state_bytes(spec: ModelSpec | BridgedSpec, dtype: torch.dtype) -> int:
    """Bytes of the recurrent states of one sequence, computed in `dtype`."""
    if spec.recurrent is None:
        return 0
    return spec.recurrent.state_bytes(dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize)


class RecurrentStates:
    """The states of `max_rows` rows, by layer; None for a layer without.

    A step moves the states of its rows on in place. If it fails they are void until their rows join anew.
    """

    def __init__(self, spec: RecurrentSpec, max_rows: int, device: torch.device, dtype: torch.dtype) -> None:
        zeros = lazy_zeros if device.type == "cpu" else partial(torch.zeros, device=device)
        wide = torch.promote_types(dtype, torch.float32)
        conv, matrix = (max_rows, spec.conv_width - 1, spec.conv_channels), (max_rows, *spec.state_shape)
        self.num_bytes = 0
        self.layers: list[LayerStates | None] = []
        for is_recurrent in spec.layers:
            if not is_recurrent:
                self.layers.append(None)
                continue
            self.layers.append(
                LayerStates(zeros(conv, dtype=dtype), zeros(matrix, dtype=wide), self.num_bytes)
            )
            self.num_bytes += spec.state_bytes(dtype.itemsize, wide.itemsize) // sum(spec.layers)
        self._void: set[int] = set()

    def of(self, layer: int) -> LayerStates:
        """The states of a recurrent layer."""
        states = self.layers[layer]
        assert states is not None
        return states

    def begin(self, join: Join, kept_state: torch.Tensor | None) -> None:
        """A row begins with a kept state, or with token 0. Raises `PlanError` for one that has neither."""
        if join.num_computed and kept_state is None:
            raise PlanError(
                f"{join.request_id} joins at token {join.num_computed} without the recurrent state there"
            )
        for states in filter(None, self.layers):
            if kept_state is not None:
                states.restore(join.row, kept_state)
            else:
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
