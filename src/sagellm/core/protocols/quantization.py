"""Contract of quantization: weights, KV or activations in fewer bits, at a stated loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from sagellm.core.blocks import cdiv
from sagellm.core.types import Tokens

if TYPE_CHECKING:
    import torch


class QuantTarget(str, Enum):
    WEIGHTS = "weights"
    KV = "kv"
    ACTIVATIONS = "activations"


@dataclass(frozen=True, slots=True)
class QuantizationProfile:
    """What to quantize and how. `group_size` values share one scale; None: one scale per output channel.

    `skip` names layers (by glob) that keep their format. For KV, prefill and decode may differ: `phase_bits`
    overrides `bits` by phase.
    """

    target: QuantTarget
    bits: int
    group_size: int | None = None
    symmetric: bool = True
    skip: tuple[str, ...] = ()
    phase_bits: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 16:
            raise ValueError(f"bits must be in [1, 16], got {self.bits}")
        if self.group_size is not None and self.group_size < 1:
            raise ValueError(f"group_size must be at least 1, got {self.group_size}")


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One layer: size before and after, and the relative error of its output. The error is measured on the
    calibration data."""

    name: str
    bytes_before: int
    bytes_after: int
    relative_error: float


@dataclass(frozen=True, slots=True)
class QuantizedModel:
    """The model in its new format, with a report per changed layer. Also names the layers that were left as
    they are."""

    model: Any
    profile: QuantizationProfile
    layers: tuple[LayerReport, ...]
    skipped: tuple[str, ...] = ()


class Quantizer(Protocol):
    """One method (GPTQ, AWQ, SmoothQuant, round to nearest, ...)."""

    name: str

    def supports(self, profile: QuantizationProfile) -> str | None:
        """None if it can, else why not, with what it could do instead."""

    def quantize(
        self, model: Any, profile: QuantizationProfile, calibration: Iterable[Tokens] = ()
    ) -> QuantizedModel:
        """The model is left as it was. Seeded: the same input gives the same bytes.

        Raises `SageError` before anything is touched where `supports` says no, where the method needs
        calibration data and got none, or where a layer's width is not a multiple of the group size.
        """


class KVQuantizer(Protocol):
    """KV blocks in fewer bits, on the way into and out of the pool. Each block carries its own scales."""

    profile: QuantizationProfile

    def bytes_per_block(self, num_values: int) -> int:
        """Packed size of a block of that many values, scales included."""

    def encode(self, block: Any) -> Any:
        """Encode a block. Values that are not finite raise `ValueError`: a broken block must not become a
        plausible one."""

    def decode(self, packed: Any) -> Any: ...


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedMatrix:
    """A matrix [outputs, inputs] as whole numbers: each value is (code - zero) scale.

    `codes` [outputs, inputs] are uint8, of `bits` bits. `scales` [outputs, groups], float16, bfloat16 or
    float32, and `zeros` [outputs, groups], uint8, are those of `group_size` columns of the codes, the last
    group's of what is left; without zeros each is 2^(bits - 1). Column j of the codes is input `order[j]`
    (int64 [inputs], each input once); without an order, j. Activations may be rounded to
    `activation_bits`. Raises `ValueError` for what does not fit.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    bits: int
    group_size: int
    zeros: torch.Tensor | None = None
    order: torch.Tensor | None = None
    activation_bits: int = 16

    def __post_init__(self) -> None:
        outputs, inputs = self.codes.shape
        if self.bits not in (4, 8) or self.group_size < 1:
            raise ValueError(f"{self.bits} bits in groups of {self.group_size}: use 4 or 8, and at least 1")
        if self.activation_bits not in (8, 16):
            raise ValueError(f"activations in {self.activation_bits} bits: use 8 or 16")
        expected = (outputs, cdiv(inputs, self.group_size))
        for name, tensor in (("scales", self.scales), ("zeros", self.zeros)):
            if tensor is not None and tuple(tensor.shape) != expected:
                raise ValueError(f"{name} of shape {list(tensor.shape)}, not {list(expected)}")
        if self.order is not None and tuple(self.order.shape) != (inputs,):
            raise ValueError(f"an order of {list(self.order.shape)} for {inputs} inputs")

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def zero(self) -> int:
        """What every zero is where there are no `zeros`."""
        return 1 << (self.bits - 1)

    def values(self) -> torch.Tensor:
        """The matrix in float32, inputs in their own order: what the codes mean."""
        inputs = self.codes.shape[1]

        def spread(groups: torch.Tensor) -> torch.Tensor:
            return groups.float().repeat_interleave(self.group_size, dim=1)[:, :inputs]

        zeros = self.zero if self.zeros is None else spread(self.zeros)
        found = (self.codes.float() - zeros) * spread(self.scales)
        return found if self.order is None else found[:, self.order.argsort()]


class WeightQuantizer(Protocol):
    """Quantizes the matrices of a model while it is loaded, one by one. `name` tells its results from
    others'."""

    name: str

    def quantized(self, name: str, weight: torch.Tensor) -> QuantizedMatrix:
        """`weight` [outputs, inputs], the model's parameter `name`; left as it is. The same bytes for the
        same weight. Raises `ModelError` for values that are not finite or too large for a scale."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint from which a matrix is made. Its shape, its dtypes as safetensors names them,
    whether it may be missing, and the values that config.json implies."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    optional: bool = False
    values: tuple[int, ...] = ()


class WeightFormat(Protocol):
    """How a checkpoint stores quantized matrices; made from its `quantization_config`.

    A matrix is quantized where the checkpoint has any of its `tensors`, in one of their dtypes. The
    constructor raises `UnsupportedModelError` for a configuration that it cannot read, and says what would
    work.
    """

    def tensors(self, outputs: int, inputs: int) -> Mapping[str, StoredTensor]:
        """What is stored for a matrix of this shape, by name behind the module's."""

    def matrix(self, stored: Mapping[str, torch.Tensor], outputs: int, inputs: int) -> QuantizedMatrix:
        """The matrix of these tensors, which are not kept. Raises `UnsupportedModelError` for values that
        make none."""


FormatSource = Callable[[Mapping[str, Any]], WeightFormat]
"""Gives the format for a `quantization_config`; raises `UnsupportedModelError` where there is none."""
