"""Inputs of each layer's own (Gemma 4: per-layer embeddings)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from sagellm.core.protocols.fusion import Matrix, StoredMatrix
from sagellm.engines.native.layer_spec import LayerInputSpec


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Makes the vectors of all layers, from token ids and their embeddings."""

    spec: LayerInputSpec
    table: StoredMatrix
    projection: Matrix
    norm: torch.Tensor
    eps: float

    def of(self, tokens: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """[T, layers, width], of `tokens` [T] and their embeddings [T, hidden]."""
        projected: torch.Tensor = self.projection.multiply(embedded) * embedded.shape[1] ** -0.5
        by_layer = projected.reshape(len(tokens), -1, self.spec.width)
        looked_up: torch.Tensor = self.table.rows(tokens, embedded.dtype, self.spec.scale).view(
            by_layer.shape
        )
        normed = F.rms_norm(by_layer, by_layer.shape[2:], self.norm, self.eps)
        return (normed + looked_up) * 2**-0.5


@dataclass(frozen=True, slots=True)
class LayerInput:
    """The gated projection by which one layer adds its vector to the stream."""

    gate: Matrix
    up: Matrix
    activation: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """What is added to the stream `x` [T, hidden], before its norm.

        `given` [T, width] are the layer's vectors.
        """
        added: torch.Tensor = self.up.multiply(self.activation(self.gate.multiply(x)) * given)
        return added
