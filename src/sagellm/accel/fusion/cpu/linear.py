"""A linear layer by the C++ kernel of this folder: `x W^T + bias`, W in panels, in the number format of its
checkpoint.

One kernel for any number of rows: for few, reading W is all that costs, and panels are one stream of memory;
for many, a block of a panel stays in L1 while all rows meet it. A row's result has the same bits whatever
the rows beside it, and on any number of threads.

It is called through ctypes and not as a torch operator, which nothing here would trace. Measured: a call
costs 15 us, through `torch.library` with a Python implementation 17 to 24. An operator in C++ costs 5, but
15 s of compiling against torch's headers instead of 2.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sagellm.accel.fusion.cpu.calls import Caller, Function
from sagellm.accel.fusion.cpu.library import CpuLevel, loaded
from sagellm.core.blocks import cdiv
from sagellm.core.errors import KernelError
from sagellm.core.protocols.fusion import KernelSupport, Tolerance, Zeros

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_GROUPS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 1}
_USABLE = KernelSupport(usable=True)


class _Job(ctypes.Structure):
    """`struct Linear` of packed.h."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("y_stride", ctypes.c_int64),
        ("x_type", ctypes.c_int32),
        ("weight_type", ctypes.c_int32),
        ("y_type", ctypes.c_int32),
    )


class _Packing(ctypes.Structure):
    """`struct Packing` of packed.h."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("panels", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("weight_stride", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("weight_type", ctypes.c_int32),
    )


class _Gather(ctypes.Structure):
    """`struct Gather` of packed.h."""

    _fields_ = (
        ("table", ctypes.c_void_p),
        ("index", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "outputs", "inputs", "panel", "group")),
        ("type", ctypes.c_int32),
        ("y_type", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """A matrix [outputs, inputs] in panels [panel, group, output, input of the group], zeros where they end.
    Implements `Matrix`.
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
        """`rows` [n, inputs] become the outputs [first, first + n). Raises `KernelError` if they do not
        fit.
        """
        self.kernel.pack(self, first, rows)

    def rows(self, index: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Those outputs' weights, [len(index), inputs], in `dtype`: the matrix's, which is the default, or
        float32. Raises `KernelError` for an index that is none of an output.
        """
        return self.kernel.rows(self, index, dtype or self.dtype)

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`x` [T, inputs] times this, as [T, outputs]; that is `out`, of x's dtype or float32, if given."""
        return self.kernel.apply(x, self, bias, out)


class CpuLinear:
    """Implements `LinearKernel`: inputs are `x` [T, in], a `PackedMatrix` [out, in] `bias` [out] or None and
    maybe `out`, the result is [T, out] in x's dtype, or `out`, which may be float32. `weight_dtypes` says for
    each dtype of x which ones a matrix may have.
    """

    name = "linear"
    tolerances: tuple[Tolerance, ...] = (
        Tolerance("float32", 2e-5, 2e-5),
        Tolerance("bfloat16", 1e-2, 1.6e-2),
    )
    """For sums of about unit size. Sums are float32 in another order than torch's."""

    def __init__(
        self,
        run: Function,
        pack: Function,
        gather: Function,
        panel: int,
        weight_dtypes: Mapping[torch.dtype, frozenset[torch.dtype]],
        caller: Caller,
    ) -> None:
        self._run, self._pack, self._gather = run, pack, gather
        self._panel, self._call = panel, caller
        self._weight_dtypes = weight_dtypes

    def multiplies(self, dtype: torch.dtype, weight_dtype: torch.dtype) -> bool:
        return weight_dtype in self._weight_dtypes.get(dtype, ())

    def empty(
        self, outputs: int, inputs: int, dtype: torch.dtype, zeros: Zeros = torch.zeros
    ) -> PackedMatrix:
        group = _GROUPS[dtype]
        shape = (cdiv(outputs, self._panel), cdiv(inputs, group), self._panel, group)
        return PackedMatrix(self, zeros(shape, dtype=dtype), (outputs, inputs))

    def supports(self, *inputs: Any) -> KernelSupport:
        reason = self._obstacle(*inputs)
        return KernelSupport(usable=False, reason=reason) if reason else _USABLE

    def apply(self, *inputs: Any) -> torch.Tensor:
        """Raises `KernelError` where `supports` says no, and where memory runs out."""
        reason = self._obstacle(*inputs)
        if reason:
            raise KernelError(reason)
        return self._computed(*inputs)

    def reference(self, *inputs: Any) -> torch.Tensor:
        return _reference(*inputs)

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
            _TYPES[rows.dtype],
        )  # fmt: skip
        self._call("pack", self._pack, job, rows, matrix)

    def rows(self, matrix: PackedMatrix, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See `PackedMatrix.rows`."""
        return self._gathered(matrix.panels, matrix.shape, index, dtype)

    def gather(self, table: torch.Tensor, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows `index` [n] of a contiguous `table` [m, k], as [n, k] in its dtype or in float32. Raises
        `KernelError` for what is no such table and for an index that is no row's.
        """
        if table.ndim != 2 or not table.is_contiguous() or not table.is_cpu:
            raise KernelError(f"no contiguous table on a CPU: {list(table.shape)} on {table.device}")
        return self._gathered(table[:, :, None, None], (len(table), table.shape[1]), index, dtype)

    def _gathered(
        self, panels: torch.Tensor, shape: tuple[int, int], index: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        if panels.dtype not in _TYPES or dtype not in (panels.dtype, torch.float32):
            raise KernelError(f"rows of {panels.dtype} are read as such or as float32, not as {dtype}")
        if index.ndim != 1 or not index.is_cpu or index.is_floating_point():
            raise KernelError(f"rows are read at integers [n], not at {index.dtype} {list(index.shape)}")
        index = index if index.dtype == torch.int64 and index.is_contiguous() else index.long().contiguous()
        y = panels.new_empty((len(index), shape[1]), dtype=dtype)
        job = _Gather(
            panels.data_ptr(), index.data_ptr(), y.data_ptr(), len(index), *shape, *panels.shape[2:],
            _TYPES[panels.dtype], _TYPES[dtype],
        )  # fmt: skip
        self._call("gather", self._gather, job, panels, index, y)
        return y

    def _computed(
        self, x: torch.Tensor, matrix: PackedMatrix, bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        outputs, inputs = matrix.shape
        y = x.new_empty(len(x), outputs) if out is None else out
        job = _Job(
            x.data_ptr(), matrix.panels.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(),
            len(x), outputs, inputs, x.stride(0), outputs, _TYPES[x.dtype], _TYPES[matrix.panels.dtype],
            _TYPES[y.dtype],
        )  # fmt: skip
        self._call(self.name, self._run, job, x, matrix, bias, y)
        return y

    def _obstacle(
        self, x: torch.Tensor, matrix: PackedMatrix, bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> str:  # fmt: skip
        """What stands in the way; empty where nothing does."""
        if matrix.dtype not in self._weight_dtypes.get(x.dtype, ()):
            return f"linear has no kernel for {x.dtype} times {matrix.dtype}"
        if not x.is_cpu:
            return f"linear runs on a CPU; x is on {x.device}"
        if x.ndim != 2 or x.shape[1] != matrix.shape[1]:
            return f"shapes {list(x.shape)} and {list(matrix.shape)} make no linear layer"
        if x.stride(1) != 1 and x.shape[1] > 1:
            return "the rows of x are not contiguous"
        if bias is not None and (
            bias.dtype != x.dtype or bias.shape != matrix.shape[:1] or not bias.is_contiguous()
        ):
            return f"the bias is not {matrix.shape[0]} contiguous values of {x.dtype}"
        if out is not None and not _takes(out, x, matrix):
            return f"out is no contiguous [{len(x)}, {matrix.shape[0]}] of {x.dtype} or float32"
        if x.requires_grad and torch.is_grad_enabled():
            return "linear has no gradient"
        return ""


def _takes(out: torch.Tensor, x: torch.Tensor, matrix: PackedMatrix) -> bool:
    fits = out.shape == (len(x), matrix.shape[0]) and out.is_contiguous() and out.is_cpu
    return fits and out.dtype in (x.dtype, torch.float32)


def _reference(
    x: torch.Tensor, matrix: PackedMatrix, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    weight = matrix.rows(torch.arange(matrix.shape[0]))
    if out is None:
        return torch.nn.functional.linear(x, weight.to(x.dtype), bias)
    bias = None if bias is None else bias.to(out.dtype)
    return out.copy_(torch.nn.functional.linear(x.to(out.dtype), weight.to(out.dtype), bias))


def linear_kernel(path: Path, level: CpuLevel, caller: Caller) -> CpuLinear:
    """The kernel of the library at `path`, which was compiled for `level`; raises `KernelError` if it cannot
    be loaded.
    """
    library = loaded(path)
    functions = (library.sagellm_linear, library.sagellm_pack, library.sagellm_gather)
    for function in functions:
        function.argtypes = (ctypes.c_void_p, ctypes.c_int32)
        function.restype = ctypes.c_int32
    library.sagellm_panel.restype = ctypes.c_int64
    pairs = {torch.bfloat16: frozenset({torch.bfloat16})} if level.name == "avx512_bf16" else {}
    weight_dtypes = {torch.float32: frozenset(_TYPES), **pairs}
    return CpuLinear(*functions, library.sagellm_panel(), weight_dtypes, caller)
