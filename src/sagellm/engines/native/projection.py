"""Multiplying a step's tokens by a matrix: by torch, or by a kernel that has matrices in a form of its own.

A kernel is taken where it is faster on this machine over the sizes that decode and prefill have
(`packing_pays`): which form a matrix has is settled when it is loaded, and then it is the only one.

Torch: for a decode batch the float32 GEMM of x86 CPUs (MKL) is slow as x W^T and a third faster as
(W x^T)^T: at 16 rows of 1024 inputs 20 against 32 GFLOP/s on one AVX-512 core, at 32 rows 32 against 52. The
second form wants x transposed, which is cheap (x is small), and returns a transposed result, which
elementwise operations keep: the gated MLP runs transposed from end to end. Below and above that range the
plain form is as fast or faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from sagellm.core.protocols.fusion import LinearKernel, Matrix
from sagellm.engines.native.timing import cpu_s, one_thread

FEWEST_ROWS, MOST_ROWS = 5, 192
MEASURED_ROWS = (1, 8, 32, 256)
_INPUTS, _OUTPUTS, _REPEATS = 1024, 384, 3


def project(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x` [T, in] times `weight` [out, in], as [T, out]; the result may be the view of an [out, T] tensor."""
    few = FEWEST_ROWS <= len(x) <= MOST_ROWS
    if not few or x.dtype != torch.float32 or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    columns = x.t().contiguous()
    if bias is None:
        return torch.mm(weight, columns).t()
    return torch.addmm(bias[:, None], weight, columns).t()


def look_up(table: torch.Tensor, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows `index` of `table` in `dtype`."""
    return F.embedding(index, table).to(dtype)


LookUp = Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """A matrix as torch has it. Implements `Matrix`."""

    weight: torch.Tensor
    look_up: LookUp = look_up

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

    def rows(self, index: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.look_up(self.weight, index, dtype or self.dtype)

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As `project`."""
        product = project(x, self.weight, bias)
        return product if out is None else out.copy_(product)


@dataclass(frozen=True, slots=True)
class Race:
    """CPU seconds of torch and of the kernel by number of rows, on one thread."""

    seconds: dict[int, tuple[float, float]]

    @property
    def speedup(self) -> float:
        """The kernel's, the geometric mean over all sizes."""
        ratios = [torch_s / kernel_s for torch_s, kernel_s in self.seconds.values()]
        return math.prod(ratios) ** (1 / len(ratios))


def packing_pays(kernel: LinearKernel | None, dtype: torch.dtype, weight_dtype: torch.dtype) -> bool:
    """Whether `kernel` multiplies activations of `dtype` by matrices of `weight_dtype`, and does it faster
    than torch does by matrices of `dtype`.
    """
    if kernel is None or not kernel.multiplies(dtype, weight_dtype):
        return False
    return race(kernel, dtype, weight_dtype).speedup > 1


def race(kernel: LinearKernel, dtype: torch.dtype, weight_dtype: torch.dtype) -> Race:
    """Torch against the kernel, which is one of one thread."""
    dense = Dense(torch.ones(_OUTPUTS, _INPUTS, dtype=dtype))
    packed = kernel.empty(_OUTPUTS, _INPUTS, weight_dtype, torch.zeros)
    packed.store(0, torch.ones(_OUTPUTS, _INPUTS, dtype=weight_dtype))
    with one_thread():
        return Race({rows: _seconds(dense, packed, rows, dtype) for rows in MEASURED_ROWS})


def _seconds(dense: Matrix, packed: Matrix, rows: int, dtype: torch.dtype) -> tuple[float, float]:
    x = torch.ones(rows, _INPUTS, dtype=dtype)
    return cpu_s(lambda: dense.multiply(x), _REPEATS), cpu_s(lambda: packed.multiply(x), _REPEATS)
