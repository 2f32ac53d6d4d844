"""Matrices that are held quantized: read as their checkpoint stores them, or quantized when they are loaded.

The kernel for them packs a matrix and multiplies by it. What it has no form for (another device, no compiler,
odd groups, pieces of one projection that do not agree) is held as what its codes mean: the same model, but in
as much memory as one that was never quantized, and a warning says why.
"""

from __future__ import annotations

import logging
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
from sagellm.engines.native.projection import Form

log = logging.getLogger("sagellm.quantization")


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the matrices of a model are held: by `quantizer`, or as `stored` says; with neither, as they
    are.
    """

    quantizer: WeightQuantizer | None = None
    stored: WeightFormat | None = None

    @property
    def label(self) -> str:
        """Of the quantizer, which makes another model of the same checkpoint; empty without one."""
        return "" if self.quantizer is None else f"-{self.quantizer.name}"


def quantization_of(
    config: Mapping[str, Any], quantizer: WeightQuantizer | None, formats: FormatSource | None
) -> Quantization:
    """For a model with this config.json. Raises `UnsupportedModelError` for a form of quantization that
    cannot be read, `ConfigError` where what is quantized would be quantized again.
    """
    stored = config.get("quantization_config") or config.get("compression_config")
    if not stored:
        return Quantization(quantizer)
    if not isinstance(stored, Mapping) or formats is None:
        raise UnsupportedModelError(
            f"this quantized checkpoint ({stored}) cannot be read here: use the float32, bfloat16 or float16 "
            "one"
        )
    if quantizer is not None:
        raise ConfigError(
            f"model.quantization {quantizer.name}: the checkpoint is quantized already; leave it out"
        )
    return Quantization(stored=formats(stored))


@dataclass(slots=True)
class Held:
    """The parameters of a model: `tensors` by name, and for those that are held quantized, whose tensor holds
    packed codes, how to multiply by them, by name of the projection.
    """

    tensors: dict[str, torch.Tensor]
    forms: dict[str, Form]


class Holder:
    """Takes matrices into a model's parameters on `device`, packed for `kernel` where it has a form for them
    and activations in `computed_in`, else in `dtype`, with no more precision than `rounded_to` has.
    """

    def __init__(
        self, kernel: QuantizedKernel | None, device: torch.device, *, dtype: torch.dtype,
        rounded_to: torch.dtype, computed_in: torch.dtype,
    ) -> None:  # fmt: skip
        self.held = Held({}, {})
        self.device, self.dtype = device, dtype
        self._kernel, self._rounded_to, self._computed_in = kernel, rounded_to, computed_in
        self._warned = False

    def take(self, name: str, pieces: Sequence[QuantizedMatrix]) -> None:
        """`pieces` are stacked by outputs."""
        try:
            self._pack(name, joined(pieces))
        except KernelError as error:
            if not self._warned:
                log.warning("%s is held dequantized: %s", name, error)
                self._warned = True
            values = torch.cat([piece.values().to(self._rounded_to) for piece in pieces])
            self.held.tensors[name] = values.to(self.device, self.dtype)

    def _pack(self, name: str, matrix: QuantizedMatrix) -> None:
        kernel = self._kernel
        if kernel is None:
            raise KernelError("there is no kernel for it on this device")
        packed = kernel.pack(matrix)
        support = kernel.supports(torch.empty(1, matrix.shape[1], dtype=self._computed_in), packed)
        if not support.usable:
            raise KernelError(support.reason)
        self.held.tensors[name] = packed.codes
        self.held.forms[name.removesuffix(".weight")] = _form(kernel, packed)


def _form(kernel: QuantizedKernel, packed: Any) -> Form:
    def project(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        result: torch.Tensor = kernel.apply(x, packed, bias)
        return result

    return project


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
