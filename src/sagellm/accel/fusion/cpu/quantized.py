"""A linear layer with 8- or 4-bit weights by the C++ kernel.

Weights are codes with scales by groups. x is quantized as well, each row by groups of 32 inputs to 8 or 16
bits (`quantized_rows`), as llama.cpp does for its `q8_0` and `q4_0`. So products are of integers, 64 in one
instruction where the CPU has VNNI. One kernel serves any number of rows: one row costs the reading of the
codes, and for many rows the codes are unpacked once for 64. A row's result has the same bits in any batch and
on any number of threads.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from sagellm.accel.fusion.cpu.calls import DTYPE_CODES, Caller, CpuKernel, int32s, int64s, pointers, structure
from sagellm.accel.fusion.cpu.library import kernel_function
from sagellm.accel.fusion.cpu.linear import wrong_groups, wrong_output
from sagellm.core.blocks import cdiv
from sagellm.core.errors import KernelError
from sagellm.core.protocols.quantization import QuantizedMatrix

GROUP, PANEL = 32, 16
_FOURS = GROUP // 4
_SCALES = (torch.float32, torch.float16)
_STEPS = {8: 127.0, 16: 127.0 * 256.0}
_LEAST = 1e-30
"""A group of x that is smaller than this everywhere counts as zeros."""

_Matrix = structure(
    "Matrix",
    pointers("codes", "scales", "zeros", "order"),
    int64s("outputs", "inputs", "groups_per_scale"),
    int32s("scale_type", "bits", "activation_bits"),
)

_FIELDS = (
    pointers("matrix", "x", "bias", "y"),
    int64s("rows", "x_row_stride", "x_column_stride"),
    int32s("x_type", "y_type"),
)
_Rows = structure("Rows", *_FIELDS)

_Groups = structure("Groups", pointers("starts"), int64s("matrices", "outputs"), *_FIELDS)


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A matrix as the kernel reads it, in panels of 16 outputs. The last panel is filled up with zero scales.
    `codes` are uint8 [panels, groups of 32, bytes]: see quantized.cpp. `scales` and `zeros` are [panels,
    scale groups, 16], `order` is int32 [inputs].
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    order: torch.Tensor | None
    bits: int
    activation_bits: int
    group_size: int
    outputs: int
    inputs: int
    matrix: ctypes.Structure = field(init=False, repr=False)

    def __post_init__(self) -> None:
        matrix = _Matrix(
            self.codes.data_ptr(), self.scales.data_ptr(), _address(self.zeros), _address(self.order),
            self.outputs, self.inputs, cdiv(min(self.group_size, self.inputs), GROUP),
            DTYPE_CODES[self.scales.dtype], self.bits, self.activation_bits,
        )  # fmt: skip
        object.__setattr__(self, "matrix", matrix)

    @property
    def nbytes(self) -> int:
        parts = (self.codes, self.scales, self.zeros, self.order)
        return sum(part.nbytes for part in parts if part is not None)

    def unpacked(self) -> QuantizedMatrix:
        """The matrix that was packed; bfloat16 scales have become float32."""
        panels, groups = self.codes.shape[:2]
        fours = self.codes
        if self.bits == 4:
            fours = torch.cat([fours & 15, fours >> 4], dim=2)
        lanes = fours.view(panels, groups, _FOURS, PANEL, 4).permute(0, 3, 1, 2, 4)
        codes = lanes.reshape(panels * PANEL, groups * GROUP)[: self.outputs, : self.inputs]
        order = None if self.order is None else self.order.long()
        scales, zeros = self._by_output(self.scales), None
        if self.zeros is not None:
            zeros = self._by_output(self.zeros)
        return QuantizedMatrix(codes, scales, self.bits, self.group_size, zeros, order, self.activation_bits)

    def _by_output(self, panels: torch.Tensor) -> torch.Tensor:
        return panels.transpose(1, 2).flatten(0, 1)[: self.outputs]


class CpuQuantizedLinear(CpuKernel):
    """Implements `QuantizedKernel`: x W^T + bias.

    Inputs: `x` [T, in] in float32, bfloat16 or float16; a `PackedWeight`; `bias` [out] or None; and
    optionally `output`. The result is [T, out] in x's dtype, or `output`, which may be float32. A group of x
    that holds a NaN or an infinity makes the whole row's result NaN. Tolerances are against the twin, which
    quantizes x in the same way. `apply` raises `CapacityError` where memory runs out.
    """

    name = "linear_quantized"
    c_name = "sagellm_linear_quantized"

    def __init__(self, library: ctypes.CDLL, caller: Caller) -> None:
        super().__init__(library, caller)
        self._grouped = kernel_function(library, "sagellm_grouped_quantized")

    def pack(self, matrix: QuantizedMatrix) -> PackedWeight:
        """Groups are multiples of 32 columns, or one group has them all. Raises `KernelError` for others."""
        outputs, inputs = matrix.shape
        if matrix.group_size % GROUP and matrix.group_size < inputs:
            raise KernelError(
                f"{self.name} has no form for groups of {matrix.group_size}: multiples of {GROUP}"
            )
        scales = matrix.scales if matrix.scales.dtype in _SCALES else matrix.scales.float()
        return PackedWeight(
            _packed_codes(matrix.codes, matrix.bits),
            _by_panel(scales),
            None if matrix.zeros is None else _by_panel(matrix.zeros),
            None if matrix.order is None else matrix.order.int(),
            matrix.bits, matrix.activation_bits, matrix.group_size, outputs, inputs,
        )  # fmt: skip

    def reference(
        self, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The slow twin, in float64: the product of the values of both sides' codes."""
        matrix = weight.unpacked()
        ordered = x if matrix.order is None else x[:, matrix.order]
        whole, scales = quantized_rows(ordered, matrix.activation_bits)
        rows = (whole * scales.double()).flatten(1)[:, : weight.inputs]
        in_place = QuantizedMatrix(matrix.codes, matrix.scales, matrix.bits, matrix.group_size, matrix.zeros)
        product = F.linear(rows, in_place.values().double())
        product = product if bias is None else product + bias.double()
        return product.to(x.dtype) if output is None else output.copy_(product)

    def _obstacle(
        self, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
    ) -> str:  # fmt: skip
        if x.dtype not in DTYPE_CODES:
            return f"no kernel for {x.dtype}"
        if x.ndim != 2 or x.shape[1] != weight.inputs:
            return f"shapes {list(x.shape)} and {[weight.outputs, weight.inputs]} make no linear layer"
        if bias is not None and (
            bias.dtype != x.dtype or bias.shape != (weight.outputs,) or not bias.is_contiguous()
        ):
            return f"the bias is not {weight.outputs} contiguous values of {x.dtype}"
        return wrong_output(output, x, weight.outputs) or self._device_obstacle(x, weight.codes)

    def _compute(
        self, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        rows = x.shape[0]
        y = x.new_empty((rows, weight.outputs)) if output is None else output
        job = _Rows(
            ctypes.addressof(weight.matrix), x.data_ptr(), _address(bias), y.data_ptr(), rows, *x.stride(),
            DTYPE_CODES[x.dtype], DTYPE_CODES[y.dtype],
        )  # fmt: skip
        self._call(self.name, self._function, job, weight, x, bias, y)
        return y

    def apply_grouped(
        self, x: torch.Tensor, weight: PackedWeight, starts: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Matrix.multiply_grouped`. A row's bits are those of `apply`. Raises `KernelError` for inputs
        that are not as that says."""
        reason = self._obstacle(x, weight) or wrong_groups(x, weight.outputs, starts, bias)
        if reason:
            raise KernelError(f"{self.name}: {reason}")
        rows, matrices = x.shape[0], len(starts) - 1
        y = x.new_empty((rows, weight.outputs // matrices))
        job = _Groups(
            starts.data_ptr(), matrices, y.shape[1], ctypes.addressof(weight.matrix), x.data_ptr(),
            _address(bias), y.data_ptr(), rows, *x.stride(), DTYPE_CODES[x.dtype], DTYPE_CODES[y.dtype],
        )  # fmt: skip
        self._call(self.name, self._grouped, job, starts, weight, x, bias, y)
        return y


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _packed_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    outputs, inputs = codes.shape
    padded = F.pad(codes, (0, -inputs % GROUP, 0, -outputs % PANEL))
    panels, groups = padded.shape[0] // PANEL, padded.shape[1] // GROUP
    lanes = padded.view(panels, PANEL, groups, GROUP).view(torch.int32)  # four codes as one word
    words = lanes.permute(0, 2, 3, 1).contiguous()
    fours = words.view(torch.uint8).view(panels, groups, _FOURS, 4 * PANEL)
    if bits == 4:
        fours = fours[:, :, : _FOURS // 2] | fours[:, :, _FOURS // 2 :] << 4
    return fours.flatten(2)


def _by_panel(groups: torch.Tensor) -> torch.Tensor:
    """[outputs, groups] as [panels, groups, 16]."""
    padded = F.pad(groups, (0, 0, 0, -len(groups) % PANEL))
    return padded.view(len(padded) // PANEL, PANEL, groups.shape[1]).transpose(1, 2).contiguous()


def quantized_rows(x: torch.Tensor, bits: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [T, in] as integers of 8 or 16 bits and scales. Both are float32 [T, groups, 32 or 1]. Inputs are
    filled up with zeros to a multiple of 32.
    """
    padded = F.pad(x.float(), (0, -x.shape[1] % GROUP))
    groups = padded.view(len(x), padded.shape[1] // GROUP, GROUP)
    steps = _STEPS[bits]
    most = groups.abs().amax(2, keepdim=True)
    inverse = torch.where(most > _LEAST, torch.full_like(most, steps) / most, 0.0)
    whole = torch.round(groups * inverse)
    finite = most.isfinite()
    return torch.where(finite, whole, 0.0), torch.where(finite, most / steps, torch.nan)
