"""Matrices that are held quantized: read as their checkpoint stores them, or quantized when they are loaded.

The kernel for them packs a matrix and multiplies by it. What it has no form for (another device, no compiler,
odd groups, pieces of one projection that do not agree) is held as what its codes mean: the same model, but in
as much memory as one that was never quantized, and a warning says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sagellm.core.errors import ConfigError, KernelError, UnsupportedModelError
from sagellm.core.protocols.fusion import QuantizedKernel
from sagellm.core.protocols.quantization import (
    FormatSource,
    QuantizedMatrix,
    WeightFormat,
    WeightQuantizer,
)


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the matrices of a model are held: by `quantizer`, or as `stored` says; with neither, as they
    are.
    """

    quantizer: WeightQuantizer | None = None
    stored: WeightFormat | None = None
    method: str = ""
    """The name of either; empty without."""

    @property
    def label(self) -> str:
        """Of the quantizer, which makes another model of the same checkpoint; empty without one."""
        return "" if self.quantizer is None else f"-{self.quantizer.name}"


AS_STORED = Quantization()


def quantization_of(
    config: Mapping[str, Any], quantizer: WeightQuantizer | None, formats: FormatSource | None
) -> Quantization:
    """For a model with this config.json. Raises `UnsupportedModelError` for a form of quantization that
    cannot be read, `ConfigError` where what is quantized would be quantized again.
    """
    stored = config.get("quantization_config") or config.get("compression_config")
    if not stored:
        return Quantization(quantizer, method="" if quantizer is None else quantizer.name)
    if not isinstance(stored, Mapping) or formats is None:
        raise UnsupportedModelError(
            f"this quantized checkpoint ({stored}) cannot be read here: use the float32, bfloat16 or float16 "
            "one"
        )
    if quantizer is not None:
        raise ConfigError(
            f"model.quantization {quantizer.name}: the checkpoint is quantized already; leave it out"
        )
    return Quantization(stored=formats(stored), method=str(stored.get("quant_method")))


def matrix_of(
    stored: WeightFormat, module: str, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int]
) -> QuantizedMatrix:
    """The matrix [outputs, inputs] of the `tensors` of `module`. Raises `UnsupportedModelError` that names
    the module for values that make none.
    """
    try:
        return stored.matrix(tensors, *shape)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{module.removesuffix('.')}: {error}") from error


@dataclass(frozen=True, slots=True, eq=False)
class PackedCodes:
    """A matrix in the form of the kernel that multiplies by it. Implements `Matrix`."""

    kernel: QuantizedKernel
    packed: Any
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        size: int = self.packed.nbytes
        return size

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        product: torch.Tensor = self.kernel.apply(x, self.packed, bias, out)
        return product


def packed(
    pieces: Sequence[QuantizedMatrix], kernel: QuantizedKernel | None, dtype: torch.dtype
) -> PackedCodes:
    """`pieces`, stacked by outputs, for `kernel` and activations of `dtype`. Raises `KernelError` where it
    has no form for them.
    """
    if kernel is None:
        raise KernelError("there is no kernel for it on this device")
    matrix = joined(pieces)
    form = kernel.pack(matrix)
    support = kernel.supports(torch.empty(1, matrix.shape[1], dtype=dtype), form)
    if not support.usable:
        raise KernelError(support.reason)
    return PackedCodes(kernel, form, matrix.shape)


def joined(pieces: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """One matrix, stacked by outputs. Raises `KernelError` where bits, groups or order differ."""
    first, *others = pieces
    for other in others:
        if (other.bits, other.group_size) != (first.bits, first.group_size):
            raise KernelError("its pieces have different bits or group sizes")
        if not _same_order(first.order, other.order):
            raise KernelError("its pieces have their inputs in different orders")
    if not others:
        return first
    scales = torch.cat([piece.scales for piece in pieces])
    zeros = None
    if any(piece.zeros is not None for piece in pieces):
        zeros = torch.cat([_all_zeros(piece) for piece in pieces])
    return replace(first, codes=torch.cat([piece.codes for piece in pieces]), scales=scales, zeros=zeros)


def _same_order(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _all_zeros(piece: QuantizedMatrix) -> torch.Tensor:
    if piece.zeros is not None:
        return piece.zeros
    return torch.full(piece.scales.shape, piece.zero, dtype=torch.uint8, device=piece.codes.device)
