"""What layers are made of: projections and norms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from sagellm.core.protocols.fusion import Matrix
from sagellm.engines.native.loading import ModelWeights
from sagellm.engines.native.model_spec import ModelSpec
from sagellm.engines.native.parallel.tensor_ranks import TensorRanks


@dataclass(frozen=True, slots=True)
class Linear:
    """A projection: a matrix and optionally a bias. With `ranks` it is their sum: each has some inputs."""

    matrix: Matrix
    bias: torch.Tensor | None
    ranks: TensorRanks | None = None

    @classmethod
    def of(cls, weights: ModelWeights, name: str, ranks: TensorRanks | None = None) -> Linear:
        return cls(weights.matrices[name], weights.tensors.get(f"{name}.bias"), ranks)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [T, in] to [T, out]; strides are those of the matrix product."""
        product: torch.Tensor = self.matrix.multiply(x, self.bias)
        return product if self.ranks is None else self.ranks.summed(product)


@dataclass(frozen=True, slots=True)
class NormWeights:
    """The scale and shift of a norm; both None: not affine."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None

    @classmethod
    def of(cls, weights: ModelWeights, name: str, offset: float, factor: float = 1.0) -> NormWeights:
        """The weights of a norm, its scale as (scale + `offset`) `factor`."""
        scale = weights.tensors.get(f"{name}.weight")
        if scale is not None and (offset or factor != 1.0):
            wide = scale.to(torch.promote_types(scale.dtype, torch.float32))
            scale = ((wide + offset) * factor).to(scale.dtype)
        return cls(scale, weights.tensors.get(f"{name}.bias"))


def normed(spec: ModelSpec, x: torch.Tensor, norm: NormWeights) -> torch.Tensor:
    """RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) or LayerNorm, over the last dimension."""
    if spec.rms_norm:
        return F.rms_norm(x, x.shape[-1:], norm.weight, spec.norm_eps)
    return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, spec.norm_eps)
