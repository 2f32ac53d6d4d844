"""`RecurrentLayer`: what all layers with a recurrent state do, over a flat batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from sagellm.engines.native.recurrent.states import LayerStates, RecurrentRows

if TYPE_CHECKING:
    from sagellm.engines.native.layer_parts import Linear


@dataclass(frozen=True, slots=True)
class RecurrentLayer(ABC):
    """Projections, a causal convolution, a recurrence and an output projection.

    `conv` is [width, channels], its bias [channels] or None.
    """

    into: Linear
    output: Linear
    conv: torch.Tensor
    conv_bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor, rows: RecurrentRows, states: LayerStates) -> torch.Tensor:
        """The layer's output [T, hidden] for `x` [T, hidden]. Moves the states of all rows on."""
        projected, count = self._projected(x), len(rows.decode)
        parts: list[torch.Tensor] = []
        for row in rows.kept:
            states.keep(rows, row, 0)
        if count:
            parts.append(self._decoded([tensor[:count] for tensor in projected], rows.decode, states))
        for start, num_tokens, row in rows.prefill:
            first = start
            for after in rows.cuts(row, num_tokens):
                last = start + after
                parts.append(self._prefilled([tensor[first:last] for tensor in projected], row, states))
                states.keep(rows, row, after)
                first = last
        return self.output(torch.cat(parts) if len(parts) > 1 else parts[0])

    def _decoded(
        self, projected: Sequence[torch.Tensor], rows: torch.Tensor, states: LayerStates
    ) -> torch.Tensor:
        """The output's input for one token of each of `rows`."""
        window = torch.cat([states.conv[rows], self._channels(projected).unsqueeze(1)], 1)
        states.conv[rows] = window[:, 1:]
        convolved = self._convolved(window)[:, 0]
        outputs, states.matrix[rows] = self._computed(
            convolved, projected, states.matrix[rows], is_decode=True
        )
        return outputs

    def _prefilled(self, projected: Sequence[torch.Tensor], row: int, states: LayerStates) -> torch.Tensor:
        """The output's input for tokens of one row."""
        channels = self._channels(projected)
        window = torch.cat([states.conv[row], channels])
        states.conv[row] = window[len(channels) :]
        convolved = self._convolved(window[None])[0]
        outputs, states.matrix[row] = self._computed(
            convolved, projected, states.matrix[row], is_decode=False
        )
        return outputs

    def _convolved(self, window: torch.Tensor) -> torch.Tensor:
        """The causal convolution and SiLU of windows [B, width - 1 + T, channels]."""
        num_tokens = window.shape[1] - len(self.conv) + 1
        total = window[:, :num_tokens] * self.conv[0]
        for i in range(1, len(self.conv)):
            total = total + window[:, i : i + num_tokens] * self.conv[i]
        return F.silu(total if self.conv_bias is None else total + self.conv_bias)

    @abstractmethod
    def _projected(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """What is projected from `x` [T, hidden], each [T, ...]."""

    @abstractmethod
    def _channels(self, projected: Sequence[torch.Tensor]) -> torch.Tensor:
        """The part of it that is convolved, [T, channels]."""

    @abstractmethod
    def _computed(
        self, convolved: torch.Tensor, projected: Sequence[torch.Tensor], states: torch.Tensor, *,
        is_decode: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """The output's input [T, ...] and new states.

        In decode there is a state for each token, else all tokens continue one.
        """
