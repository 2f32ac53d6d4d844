"""A linear layer by the C++ kernel of this folder: `x W^T + bias`.

W lies in panels, in its checkpoint's number format. One kernel serves any number of rows: for few, reading W
is the whole cost, and panels are one stream of memory; for many, a block of a panel stays in L1 while all
rows meet it. A row's result has the same bits whatever the rows beside it, and on any number of threads.

The kernel is called through ctypes and not as a torch operator, which nothing here would trace. Measured: a
call costs 15 us, through `torch.library` with a Python implementation 17 to 24. An operator in C++ costs 5,
but 15 s of compiling against torch's headers instead of 2.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from sagellm.accel.fusion.cpu.calls import (
    DTYPE_CODES,
    Caller,
    CpuKernel,
    floats,
    int32s,
    int64s,
    pointers,
    structure,
)
from sagellm.accel.fusion.cpu.library import kernel_function
from sagellm.core.blocks import cdiv
from sagellm.core.errors import KernelError
from sagellm.core.native_code import CpuLevel
from sagellm.core.protocols.fusion import Tolerance, Zeros

_GROUPS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 1}

_FIELDS = (
    pointers("x", "panels", "bias", "y"),
    int64s("rows", "outputs", "inputs", "x_stride", "y_stride"),
    int32s("x_type", "weight_type", "y_type"),
)
_Job = structure("Linear", *_FIELDS)

_Grouped = structure("Grouped", pointers("starts"), int64s("matrices"), *_FIELDS)

_Packing = structure(
    "Packing",
    pointers("weight", "panels"),
    int64s("rows", "inputs", "weight_stride", "first"),
    int32s("weight_type"),
)

_Gather = structure(
    "Gather",
    pointers("table", "index", "y"),
    int64s("rows", "outputs", "inputs", "panel", "group"),
    floats("scale"),
    int32s("type", "y_type"),
)


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """A matrix [outputs, inputs] in panels [panel, group, output, input of the group]. Panels end in zeros.
    Implements `StoredMatrix`.
    """

    kernel: CpuLinear
    panels: torch.Tensor
    shape: tuple[int, int]

    @property
    def dtype(self) -> torch.dtype:
        return self.panels.dtype

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes

    def store(self, first: int, rows: torch.Tensor) -> None:
        """Raises `KernelError` for rows that do not fit."""
        self.kernel.pack(self, first, rows)

    def rows(self, index: torch.Tensor, dtype: torch.dtype | None = None, scale: float = 1.0) -> torch.Tensor:
        """Raises `KernelError` for an index outside the matrix."""
        return self.kernel.gather_panels(self.panels, self.shape, index, dtype or self.dtype, scale)

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, output: torch.Tensor | None = None
    ) -> torch.Tensor:
        product: torch.Tensor = self.kernel.apply(x, self, bias, output)
        return product

    def multiply_grouped(
        self, x: torch.Tensor, starts: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.kernel.apply_grouped(x, self, starts, bias)


class CpuLinear(CpuKernel):
    """Implements `LinearKernel`: x W^T + bias. Inputs: `x` [T, in]; a `PackedMatrix` [out, in]; `bias` [out]
    or None; and optionally `output`. The result is [T, out] in x's dtype, or `output`, which may be float32.
    `multiplies` names the dtypes of both. `apply` raises `CapacityError` where memory runs out.
    """

    name = "linear"
    c_name = "sagellm_linear"
    tolerances: tuple[Tolerance, ...] = CpuKernel.tolerances[:2]

    def __init__(self, library: ctypes.CDLL, caller: Caller, level: CpuLevel) -> None:
        super().__init__(library, caller)
        self._pack = kernel_function(library, "sagellm_pack")
        self._gather = kernel_function(library, "sagellm_gather")
        self._grouped = kernel_function(library, "sagellm_grouped_linear")
        library.sagellm_panel.restype = ctypes.c_int64
        self._panel: int = library.sagellm_panel()
        self._weight_dtypes = {torch.float32: frozenset(DTYPE_CODES)}
        if "avx512_bf16" in level.cpu_flags:
            self._weight_dtypes[torch.bfloat16] = frozenset({torch.bfloat16})

    def multiplies(self, dtype: torch.dtype, weight_dtype: torch.dtype) -> bool:
        return weight_dtype in self._weight_dtypes.get(dtype, ())

    def empty(
        self, outputs: int, inputs: int, dtype: torch.dtype, zeros: Zeros = torch.zeros
    ) -> PackedMatrix:
        group = _GROUPS[dtype]
        shape = (cdiv(outputs, self._panel), cdiv(inputs, group), self._panel, group)
        return PackedMatrix(self, zeros(shape, dtype=dtype), (outputs, inputs))

    def reference(
        self, x: torch.Tensor, matrix: PackedMatrix, bias: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        weight = matrix.rows(torch.arange(matrix.shape[0]))
        if output is None:
            return torch.nn.functional.linear(x, weight.to(x.dtype), bias)
        bias = None if bias is None else bias.to(output.dtype)
        return output.copy_(torch.nn.functional.linear(x.to(output.dtype), weight.to(output.dtype), bias))

    def pack(self, matrix: PackedMatrix, first: int, rows: torch.Tensor) -> None:
        """See `PackedMatrix.store`."""
        inputs = matrix.shape[1]
        if rows.dtype != matrix.dtype or rows.ndim != 2 or rows.shape[1] != inputs or not rows.is_cpu:
            raise KernelError(
                f"rows of {inputs} {matrix.dtype} are packed, not {rows.dtype} {list(rows.shape)}"
            )
        if not 0 <= first <= first + len(rows) <= matrix.shape[0]:
            raise KernelError(f"{len(rows)} rows from {first} on are not in {matrix.shape[0]}")
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        job = _Packing(
            rows.data_ptr(), matrix.panels.data_ptr(), len(rows), inputs, rows.stride(0), first,
            DTYPE_CODES[rows.dtype],
        )  # fmt: skip
        self._call("pack", self._pack, job, rows, matrix)

    def gather(
        self, table: torch.Tensor, index: torch.Tensor, dtype: torch.dtype, scale: float = 1.0
    ) -> torch.Tensor:
        """Raises `KernelError` for a table that is not contiguous, or an index outside it."""
        if table.ndim != 2 or not table.is_contiguous() or not table.is_cpu:
            raise KernelError(f"no contiguous table on a CPU: {list(table.shape)} on {table.device}")
        return self.gather_panels(table[:, :, None, None], (len(table), table.shape[1]), index, dtype, scale)

    def gather_panels(
        self, panels: torch.Tensor, shape: tuple[int, int], index: torch.Tensor, dtype: torch.dtype,
        scale: float,
    ) -> torch.Tensor:  # fmt: skip
        """Rows `index` of a matrix of this shape in panels; see `PackedMatrix.rows`."""
        if panels.dtype not in DTYPE_CODES or dtype not in (panels.dtype, torch.float32):
            raise KernelError(f"rows of {panels.dtype} are read as such or as float32, not as {dtype}")
        if index.ndim != 1 or not index.is_cpu or index.is_floating_point():
            raise KernelError(f"rows are read at integers [n], not at {index.dtype} {list(index.shape)}")
        index = index if index.dtype == torch.int64 and index.is_contiguous() else index.long().contiguous()
        y = panels.new_empty((len(index), shape[1]), dtype=dtype)
        job = _Gather(
            panels.data_ptr(), index.data_ptr(), y.data_ptr(), len(index), *shape, *panels.shape[2:], scale,
            DTYPE_CODES[panels.dtype], DTYPE_CODES[dtype],
        )  # fmt: skip
        self._call("gather", self._gather, job, panels, index, y)
        return y

    def _compute(
        self, x: torch.Tensor, matrix: PackedMatrix, bias: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        outputs, inputs = matrix.shape
        y = x.new_empty(len(x), outputs) if output is None else output
        job = _Job(
            x.data_ptr(), matrix.panels.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(),
            len(x), outputs, inputs, x.stride(0), outputs, DTYPE_CODES[x.dtype],
            DTYPE_CODES[matrix.panels.dtype], DTYPE_CODES[y.dtype],
        )  # fmt: skip
        self._call(self.name, self._function, job, x, matrix, bias, y)
        return y

    def apply_grouped(
        self, x: torch.Tensor, matrix: PackedMatrix, starts: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Matrix.multiply_grouped`. A row's bits are those of `apply`. Raises `KernelError` for inputs
        that are not as that says."""
        matrices = len(starts) - 1
        reason = self._obstacle(x, matrix) or wrong_groups(x, matrix.shape[0], starts, bias)
        if reason:
            raise KernelError(f"{self.name}: {reason}")
        outputs, inputs = matrix.shape[0] // matrices, matrix.shape[1]
        y = x.new_empty(len(x), outputs)
        job = _Grouped(
            starts.data_ptr(), matrices, x.data_ptr(), matrix.panels.data_ptr(),
            None if bias is None else bias.data_ptr(), y.data_ptr(), len(x), outputs, inputs, x.stride(0),
            outputs, DTYPE_CODES[x.dtype], DTYPE_CODES[matrix.panels.dtype], DTYPE_CODES[y.dtype],
        )  # fmt: skip
        self._call(self.name, self._grouped, job, starts, x, matrix, bias, y)
        return y

    def _obstacle(
        self, x: torch.Tensor, matrix: PackedMatrix, bias: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
    ) -> str:  # fmt: skip
        if matrix.dtype not in self._weight_dtypes.get(x.dtype, ()):
            return f"no kernel for {x.dtype} times {matrix.dtype}"
        if x.ndim != 2 or x.shape[1] != matrix.shape[1]:
            return f"shapes {list(x.shape)} and {list(matrix.shape)} make no linear layer"
        if x.stride(1) != 1 and x.shape[1] > 1:
            return "the rows of x are not contiguous"
        if bias is not None and (
            bias.dtype != x.dtype or bias.shape != matrix.shape[:1] or not bias.is_contiguous()
        ):
            return f"the bias is not {matrix.shape[0]} contiguous values of {x.dtype}"
        return wrong_output(output, x, matrix.shape[0]) or self._device_obstacle(x)


def wrong_groups(x: torch.Tensor, outputs: int, starts: torch.Tensor, bias: torch.Tensor | None) -> str:
    """Why these are no groups of rows for a stack; empty if they are."""
    matrices = len(starts) - 1
    if starts.dtype is not torch.int64 or not starts.is_contiguous() or not starts.is_cpu or matrices < 1:
        return f"starts are contiguous int64 on a CPU, not {starts.dtype} {list(starts.shape)}"
    if outputs % matrices:
        return f"{outputs} outputs are not {matrices} equal matrices"
    shape = (matrices, outputs // matrices)
    if bias is not None and (bias.dtype != x.dtype or bias.shape != shape or not bias.is_contiguous()):
        return f"the bias is not contiguous {x.dtype} {list(shape)}"
    return ""


def wrong_output(output: torch.Tensor | None, x: torch.Tensor, outputs: int) -> str:
    """Why a linear layer cannot write its result to `output`; empty if it can."""
    if output is None or (
        output.shape == (len(x), outputs) and output.is_contiguous() and output.is_cpu
        and output.dtype in (x.dtype, torch.float32)
    ):  # fmt: skip
        return ""
    return f"out is no contiguous [{len(x)}, {outputs}] of {x.dtype} or float32"
