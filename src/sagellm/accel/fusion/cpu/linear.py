"""A linear layer whose weights stay in half precision: `x W^T + bias` by the C++ kernels of this folder.

Two kernels with the same result: one for few rows, which reads the weight from memory once and does little
else, and one for many, which widens it in cache. Which of them, or torch, is faster for how many rows is the
caller's to measure (`engines/native/projection.py`).

They are called through ctypes and not as torch operators, which nothing here would trace. Measured: a call
costs 15 us, through `torch.library` with a Python implementation 17 to 24. An operator in C++ costs 5, which
is 1 % of a decode step of 61 calls and 50 ms, but 15 s of compiling against torch's headers instead of 2.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sagellm.accel.fusion.cpu.cpu_level import CpuLevel
from sagellm.accel.fusion.cpu.library import loaded
from sagellm.core.errors import KernelError
from sagellm.core.protocols.fusion import KernelSupport, Tolerance

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ERRORS = {1: "no memory for its buffers", 2: "it has no kernel for these dtypes"}
_USABLE = KernelSupport(usable=True)
_FLOATS = frozenset({torch.float32})
_HALVES = frozenset({torch.bfloat16, torch.float16})


class _Job(ctypes.Structure):
    """`struct Linear` of form.h."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("x_row_stride", ctypes.c_int64),
        ("x_column_stride", ctypes.c_int64),
        ("weight_stride", ctypes.c_int64),
        ("y_row_stride", ctypes.c_int64),
        ("y_column_stride", ctypes.c_int64),
        ("x_type", ctypes.c_int32),
        ("weight_type", ctypes.c_int32),
    )


_Function = Callable[[object, int], int]


class CpuLinear:
    """One of the two kernels. Implements `FusedKernel`; inputs are `x` [T, in], `weight` [out, in] and
    `bias` [out] or None, the result is [T, out] in x's dtype.

    `weight_dtypes` says for each dtype of x which ones a weight may have. Where `transposed`, the result is
    the view of an [out, T] tensor. It runs on as many threads as torch does.
    """

    tolerances: tuple[Tolerance, ...] = (
        Tolerance("float32", 2e-5, 2e-5),
        Tolerance("bfloat16", 1e-2, 1.6e-2),
    )
    """For sums of about unit size. Sums are float32 in another order than torch's."""

    def __init__(
        self,
        name: str,
        function: _Function,
        weight_dtypes: Mapping[torch.dtype, frozenset[torch.dtype]],
        *,
        transposed: bool,
    ) -> None:
        self.name = name
        self._function = function
        self._weight_dtypes = weight_dtypes
        self._transposed = transposed

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

    def _computed(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows, inputs = x.shape
        outputs = weight.shape[0]
        shape = (outputs, rows) if self._transposed else (rows, outputs)
        y = x.new_empty(shape)
        strides = (1, rows) if self._transposed else (outputs, 1)
        job = _Job(
            x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(),
            rows, outputs, inputs, *x.stride(), weight.stride(0), *strides, _TYPES[x.dtype],
            _TYPES[weight.dtype],
        )  # fmt: skip
        code = self._function(ctypes.byref(job), torch.get_num_threads())
        if code:
            raise KernelError(f"{self.name}: {_ERRORS[code]}")
        return y.t() if self._transposed else y

    def _obstacle(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> str:
        """What stands in the way; empty where nothing does."""
        if weight.dtype not in self._weight_dtypes.get(x.dtype, ()):
            return f"{self.name} has no kernel for {x.dtype} times {weight.dtype}"
        if not (x.is_cpu and weight.is_cpu):
            return f"{self.name} runs on a CPU; x is on {x.device}, the weight on {weight.device}"
        if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
            return f"shapes {list(x.shape)} and {list(weight.shape)} make no linear layer"
        if weight.stride(1) != 1:
            return "the rows of the weight are not contiguous"
        if bias is not None and (
            bias.dtype != x.dtype or bias.shape != weight.shape[:1] or not bias.is_contiguous()
        ):
            return f"the bias is not {weight.shape[0]} contiguous values of {x.dtype}"
        if (x.requires_grad or weight.requires_grad) and torch.is_grad_enabled():
            return f"{self.name} has no gradient"
        return ""


def _reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight.to(x.dtype), bias)


def linear_kernels(path: Path, level: CpuLevel) -> Sequence[CpuLinear]:
    """The kernels of the library at `path`, which was compiled for `level`; raises `KernelError` if it cannot
    be loaded.
    """
    library = loaded(path)
    few, many = library.sagellm_linear_few, library.sagellm_linear_many
    for function in (few, many):
        function.argtypes = (ctypes.c_void_p, ctypes.c_int32)
        function.restype = ctypes.c_int32
    pairs = {torch.bfloat16: frozenset({torch.bfloat16})} if level.name == "avx512_bf16" else {}
    return (
        CpuLinear("linear_few", few, {torch.float32: _FLOATS | _HALVES, **pairs}, transposed=False),
        CpuLinear("linear_many", many, {torch.float32: _HALVES}, transposed=True),
    )
