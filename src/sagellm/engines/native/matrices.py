"""The forms of a matrix: dense, packed by a kernel, or quantized.

A kernel is used where it is faster on this machine over the sizes of decode and prefill
(`packing_is_faster`). A matrix gets its form when it is loaded and has no other.

Torch: for a decode batch the float32 GEMM of x86 CPUs (MKL) is slow as x W^T and a third faster as (W x^T)^T:
at 16 rows of 1024 inputs 20 against 32 GFLOP/s on one AVX-512 core, at 32 rows 32 against 52. The second form
wants x transposed, which is cheap (x is small), and returns a transposed result, which elementwise operations
keep: the gated MLP runs transposed from end to end. Below and above that range the plain form is as fast or
faster.

A quantized matrix that the kernel cannot pack is held as the values of its codes, with a warning
(accel/quantization/README.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import geometric_mean
from typing import Any, Protocol

import torch
from torch.nn import functional as F

from sagellm.core.errors import ConfigError, KernelError, UnsupportedModelError
from sagellm.core.protocols.fusion import FusedKernel, LinearKernel, QuantizedKernel
from sagellm.core.protocols.quantization import FormatSource, QuantizedMatrix, WeightFormat, WeightQuantizer
from sagellm.engines.native.measure import MARGIN, in_turns, recorded, torch_threads

FEWEST_ROWS, MOST_ROWS = 5, 192
MEASURED_ROWS = (1, 8, 32, 256)
_INPUTS, _OUTPUTS, _ROUNDS = 1024, 384, 7


def project(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x` [T, in] times `weight` [out, in], as [T, out]. The result may be a view of an [out, T] tensor."""
    few = FEWEST_ROWS <= len(x) <= MOST_ROWS
    if not few or x.dtype != torch.float32 or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    columns = x.t().contiguous()
    if bias is None:
        return torch.mm(weight, columns).t()
    return torch.addmm(bias[:, None], weight, columns).t()


def look_up(table: torch.Tensor, index: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Rows `index` of `table` in `dtype`, times `scale`."""
    rows = F.embedding(index, table).to(dtype)
    return rows if scale == 1.0 else rows * scale


class LookUp(Protocol):
    """A function as `look_up`."""

    def __call__(
        self, table: torch.Tensor, index: torch.Tensor, dtype: torch.dtype, scale: float = 1.0, /
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """A matrix as a torch tensor. Implements `StoredMatrix`."""

    weight: torch.Tensor
    look_up: LookUp = look_up
    grouped: FusedKernel | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def store(self, first: int, rows: torch.Tensor) -> None:
        self.weight[first : first + len(rows)].copy_(rows)

    def rows(self, index: torch.Tensor, dtype: torch.dtype | None = None, scale: float = 1.0) -> torch.Tensor:
        return self.look_up(self.weight, index, dtype or self.dtype, scale)

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, output: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As `project`."""
        product = project(x, self.weight, bias)
        return product if output is None else output.copy_(product)

    def multiply_grouped(
        self, x: torch.Tensor, starts: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """By the kernel `grouped`; else one product for each matrix that has rows.

        Without the kernel a GPU waits for `starts`.
        """
        kernel = self.grouped
        if kernel is not None and kernel.supports(x, self.weight, starts, bias).usable:
            by_kernel: torch.Tensor = kernel.apply(x, self.weight, starts, bias)
            return by_kernel
        bounds: list[int] = starts.tolist()
        matrices = self.weight.view(len(bounds) - 1, -1, self.shape[1])
        product = x.new_empty(len(x), matrices.shape[1])
        for i, (begin, end) in enumerate(pairwise(bounds)):
            if begin < end:
                product[begin:end] = project(x[begin:end], matrices[i], None if bias is None else bias[i])
        return product


def packing_is_faster(kernel: LinearKernel | None, dtype: torch.dtype, weight_dtype: torch.dtype) -> bool:
    """Whether `kernel` is faster than torch by `MARGIN`, in the geometric mean over `MEASURED_ROWS`. The
    kernel multiplies `dtype` by `weight_dtype`, torch `dtype` by `dtype`.
    """
    if kernel is None or not kernel.multiplies(dtype, weight_dtype):
        return False
    seconds = time_kernel(kernel, dtype, weight_dtype)
    return geometric_mean(torch_s / kernel_s for torch_s, kernel_s in seconds.values()) > MARGIN


def time_kernel(
    kernel: LinearKernel, dtype: torch.dtype, weight_dtype: torch.dtype
) -> dict[int, tuple[float, float]]:
    """CPU seconds of torch and kernel by number of rows. `kernel` has one thread.

    They are recorded: a model takes what `footprint` has told, and the same in every run.
    """

    def timed() -> list[float]:
        dense = Dense(torch.ones(_OUTPUTS, _INPUTS, dtype=dtype))
        packed = kernel.empty(_OUTPUTS, _INPUTS, weight_dtype, torch.zeros)
        packed.store(0, torch.ones(_OUTPUTS, _INPUTS, dtype=weight_dtype))
        seconds = []
        with torch_threads(1):
            for rows in MEASURED_ROWS:
                x = torch.ones(rows, _INPUTS, dtype=dtype)
                runs = [partial(matrix.multiply, x) for matrix in (dense, packed)]
                seconds += in_turns(x.device, runs, _ROUNDS)
        return seconds

    case = f"{weight_dtype} matrices times {MEASURED_ROWS} rows of {dtype}"
    found = recorded(case, getattr(kernel, "build", ""), timed)
    return dict(zip(MEASURED_ROWS, zip(found[::2], found[1::2], strict=True), strict=True))


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a model's matrices are quantized: by `quantizer`, as `stored`, or not at all."""

    quantizer: WeightQuantizer | None = None
    stored: WeightFormat | None = None
    method: str = ""
    """The name of the quantizer or the stored format; empty without."""

    @property
    def label(self) -> str:
        """A suffix for the fingerprint: a quantizer makes another model of the same checkpoint."""
        return "" if self.quantizer is None else f"-{self.quantizer.name}"


NOT_QUANTIZED = Quantization()


def quantization_of(
    config: Mapping[str, Any], quantizer: WeightQuantizer | None, formats: FormatSource | None
) -> Quantization:
    """The quantization of a model with this config.json. Raises `UnsupportedModelError` for a format that
    cannot be read, `ConfigError` if a quantized checkpoint would be quantized again.
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


@dataclass(frozen=True, slots=True, eq=False)
class PackedQuantizedMatrix:
    """A matrix in the form of the kernel that multiplies by it. Implements `Matrix`."""

    kernel: QuantizedKernel
    packed: Any
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        size: int = self.packed.nbytes
        return size

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, output: torch.Tensor | None = None
    ) -> torch.Tensor:
        product: torch.Tensor = self.kernel.apply(x, self.packed, bias, output)
        return product

    def multiply_grouped(
        self, x: torch.Tensor, starts: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        product: torch.Tensor = self.kernel.apply_grouped(x, self.packed, starts, bias)
        return product


def packed(
    pieces: Sequence[QuantizedMatrix], kernel: QuantizedKernel | None, dtype: torch.dtype
) -> PackedQuantizedMatrix:
    """`pieces`, stacked by outputs, in the form of `kernel` for activations of `dtype`. Raises `KernelError`
    where it has no form for them.
    """
    if kernel is None:
        raise KernelError("there is no kernel for it on this device")
    matrix = joined(pieces)
    form = kernel.pack(matrix)
    support = kernel.supports(torch.empty(1, matrix.shape[1], dtype=dtype), form)
    if not support.usable:
        raise KernelError(support.reason)
    return PackedQuantizedMatrix(kernel, form, matrix.shape)


def joined(pieces: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """One matrix, stacked by outputs. Raises `KernelError` where bits, groups or order differ."""
    first, *others = pieces
    for other in others:
        if (other.bits, other.group_size) != (first.bits, first.group_size):
            raise KernelError("its pieces have different bits or group sizes")
        a, b = first.order, other.order
        if a is not b and (a is None or b is None or not torch.equal(a, b)):
            raise KernelError("its pieces have their inputs in different orders")
    if not others:
        return first
    scales = torch.cat([piece.scales for piece in pieces])
    zeros = None
    if any(piece.zeros is not None for piece in pieces):
        zeros = torch.cat(
            [
                torch.full(p.scales.shape, p.zero, dtype=torch.uint8, device=p.codes.device)
                if p.zeros is None
                else p.zeros
                for p in pieces
            ]
        )
    return replace(first, codes=torch.cat([piece.codes for piece in pieces]), scales=scales, zeros=zeros)
