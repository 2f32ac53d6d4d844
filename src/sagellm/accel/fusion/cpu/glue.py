"""What a decoder does between its matrices, each in one pass by the C++ kernels of this folder.

Residual add and RMSNorm; rotary embedding (with the norms of queries and keys that Qwen3 has) and KV write;
gated activation. At batch 1 these take torch 14, 23 and 5 us, little of which is work; a call here is 6 to 8,
most of it Python. The slow twins: `_glue_twins`.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch

from sagellm.accel.fusion.common import TOLERANCES, add_rms_norm, rope_to_cache, silu_and_mul
from sagellm.accel.fusion.cpu.calls import Caller, Function
from sagellm.accel.fusion.cpu.library import loaded
from sagellm.core.errors import KernelError
from sagellm.core.protocols.fusion import KernelSupport, Tolerance

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_USABLE = KernelSupport(usable=True)


class _AddNorm(ctypes.Structure):
    """`struct AddNorm` of glue.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "delta", "weight", "y")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "x_stride", "delta_stride", "y_stride")),
        ("eps", ctypes.c_float),
        ("type", ctypes.c_int32),
    )


def _slots(name: str) -> list[tuple[str, type]]:
    """`struct Slots` of glue.h, field by field: quicker to fill in than a structure in a structure."""
    strides = (f"{name}_{extent}_stride" for extent in ("block", "token", "head"))
    return [(name, ctypes.c_void_p), *((stride, ctypes.c_int64) for stride in strides)]


class _Rotate(ctypes.Structure):
    """`struct Rotate` of glue.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("heads", "cos", "sin", "query_weight", "key_weight", "slots")),
        *_slots("keys"),
        *_slots("values"),
        *((name, ctypes.c_int64) for name in ("rows", "query_heads", "kv_heads", "dim", "row_stride")),
        *((name, ctypes.c_int64) for name in ("angle_stride", "num_blocks", "block_size")),
        ("eps", ctypes.c_float),
        ("type", ctypes.c_int32),
        ("pool_type", ctypes.c_int32),
    )


class _Gated(ctypes.Structure):
    """`struct Gated` of glue.h."""

    _fields_ = (
        ("gate", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "gate_stride", "y_stride")),
        ("type", ctypes.c_int32),
    )


class _GlueKernel(ABC):
    """What the kernels here have in common; what each gives a row depends neither on the number of
    threads nor on other rows.
    """

    name: str
    tolerances: tuple[Tolerance, ...] = TOLERANCES

    def __init__(self, function: Function, caller: Caller) -> None:
        self._function, self._call = function, caller

    def supports(self, *inputs: Any) -> KernelSupport:
        reason = self._obstacle(*inputs)
        return KernelSupport(usable=False, reason=reason) if reason else _USABLE

    @abstractmethod
    def _obstacle(self, *inputs: Any) -> str:
        """What stands in the way; empty where nothing does."""

    def _check(self, *inputs: Any) -> None:
        reason = self._obstacle(*inputs)
        if reason:
            raise KernelError(f"{self.name}: {reason}")

    def _run(self, job: ctypes.Structure, *kept: object) -> None:
        self._call(self.name, self._function, job, *kept)


class CpuAddRmsNorm(_GlueKernel):
    """Implements `FusedKernel`. Inputs: `x` [T, n], which becomes x + delta; `delta` [T, n] or None; `weight`
    [n]; `eps`. The result is the RMSNorm of the new x, [T, n] contiguous.
    """

    name = "add_rms_norm"

    def apply(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Raises `KernelError` where `supports` says no."""
        self._check(x, delta, weight, eps)
        rows, columns = x.shape
        if delta is not None and delta.stride(1) != 1:  # as a projection may return it
            delta = delta.contiguous()
        y = x.new_empty((rows, columns))
        at, stride = (None, 0) if delta is None else (delta.data_ptr(), delta.stride(0))
        job = _AddNorm(
            x.data_ptr(), at, weight.data_ptr(), y.data_ptr(), rows, columns, x.stride(0), stride, columns,
            eps, _TYPES[x.dtype],
        )  # fmt: skip
        self._run(job, x, delta, weight, y)
        return y

    def reference(self, *inputs: Any) -> torch.Tensor:
        return add_rms_norm(*inputs)

    def _obstacle(self, *inputs: Any) -> str:
        x, delta, weight, _ = inputs
        dtype, shape = x.dtype, x.shape
        if dtype not in _TYPES or weight.dtype is not dtype:
            return f"no kernel for {dtype} with a weight of {weight.dtype}"
        if len(shape) != 2 or weight.shape != shape[1:]:
            return f"no rows and weight: {list(shape)}, {list(weight.shape)}"
        if x.stride(1) != 1 or x.stride(0) < shape[1] or not weight.is_contiguous():
            return "the weight and each row of x must be contiguous, and rows must not overlap"
        if delta is None:
            return _elsewhere(x, weight)
        if delta.dtype is not dtype or delta.shape != shape:
            return f"delta is {delta.dtype} {list(delta.shape)}, x {dtype} {list(shape)}"
        return _elsewhere(x, weight, delta)


class CpuRopeToCache(_GlueKernel):
    """Implements `FusedKernel`. Inputs: `heads` [T, heads, dim], of a row its query, key and value heads;
    `cos` and `sin` [T, dim / 2] or None; `query_weight` and `key_weight` [dim] or None; `eps`; `slots`, int64
    [T]; `keys` and `values`, pools [num_blocks, block_size, kv_heads, dim].

    Queries and keys get their RMSNorm, if they have one, and are rotated, all in place; keys and values are
    stored, in the pools' dtype, at their slot, which is block x block size + token. There is no result. A
    slot that is given twice holds one of both.
    """

    name = "rope_to_cache"

    def apply(
        self, heads: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None,
        query_weight: torch.Tensor | None, key_weight: torch.Tensor | None, eps: float, slots: torch.Tensor,
        keys: torch.Tensor, values: torch.Tensor,
    ) -> None:  # fmt: skip
        """Raises `KernelError` where `supports` says no and for a slot outside the pools; nothing is changed
        then.
        """
        self._check(heads, cos, sin, query_weight, key_weight, eps, slots, keys, values)
        rows, num_heads, dim = heads.shape
        num_blocks, block_size, kv_heads, _ = keys.shape
        given = [None if t is None else t.data_ptr() for t in (cos, sin, query_weight, key_weight)]
        job = _Rotate(
            heads.data_ptr(), *given, slots.data_ptr(), keys.data_ptr(), *keys.stride()[:3],
            values.data_ptr(), *values.stride()[:3], rows, num_heads - 2 * kv_heads, kv_heads, dim,
            heads.stride(0), 0 if cos is None else cos.stride(0), num_blocks, block_size, eps,
            _TYPES[heads.dtype], _TYPES[keys.dtype],
        )  # fmt: skip
        self._run(job, heads, cos, sin, query_weight, key_weight, slots, keys, values)

    def reference(self, *inputs: Any) -> None:
        rope_to_cache(*inputs)

    def _obstacle(self, *inputs: Any) -> str:
        heads, cos, sin, query_weight, key_weight, _, slots, keys, values = inputs
        dtype, pool_dtype, shape, pool = heads.dtype, keys.dtype, heads.shape, keys.shape
        if dtype not in _TYPES or pool_dtype not in _TYPES or values.dtype is not pool_dtype:
            return f"no kernel for {dtype} into {pool_dtype} and {values.dtype}"
        if len(shape) != 3 or len(pool) != 4 or values.shape != pool:
            return f"no heads and pools: {[list(t.shape) for t in (heads, keys, values)]}"
        rows, num_heads, dim = shape
        if pool[3] != dim or not 0 < 2 * pool[2] <= num_heads or not pool[1] or not dim:
            return f"{num_heads} heads of {dim} do not fit blocks of {list(pool[1:])}"
        row_stride, head_stride, dim_stride = heads.stride()
        if dim_stride != 1 or head_stride != dim or row_stride < num_heads * dim:
            return "the heads of a row must be contiguous, and rows must not overlap"
        if keys.stride(3) != 1 or values.stride(3) != 1:
            return "the dims of a head in the pools must be contiguous"
        if slots.dtype is not torch.int64 or slots.shape != (rows,) or not slots.is_contiguous():
            return f"slots are contiguous int64 [{rows}], not {slots.dtype} {list(slots.shape)}"
        return (
            _wrong_angles(cos, sin, rows, dim, dtype)
            or _wrong_weight(query_weight, dim, dtype)
            or _wrong_weight(key_weight, dim, dtype)
            or _elsewhere(heads, slots, keys, values)
        )


class CpuSiluAndMul(_GlueKernel):
    """Implements `FusedKernel`. The input is [T, 2 n], of a row its gate and up; the result silu(gate) x up
    is [T, n], a view of an [n, T] tensor where the input is one of [2 n, T].
    """

    name = "silu_and_mul"

    def apply(self, wide: torch.Tensor) -> torch.Tensor:
        """Raises `KernelError` where `supports` says no."""
        self._check(wide)
        rows, columns = wide.shape[0], wide.shape[1] // 2
        if wide.stride(1) == 1:
            y = answer = wide.new_empty((rows, columns))
            job = _Gated(
                wide.data_ptr(), y.data_ptr(), rows, columns, wide.stride(0), columns, _TYPES[wide.dtype]
            )
        else:  # all gates, then all ups: one row
            y = wide.new_empty((columns, rows))
            answer = y.t()
            job = _Gated(wide.data_ptr(), y.data_ptr(), 1, columns * rows, 0, 0, _TYPES[wide.dtype])
        self._run(job, wide, y)
        return answer

    def reference(self, *inputs: Any) -> torch.Tensor:
        return silu_and_mul(*inputs)

    def _obstacle(self, *inputs: Any) -> str:
        (wide,) = inputs
        if wide.dtype not in _TYPES:
            return f"no kernel for {wide.dtype}"
        if wide.ndim != 2 or wide.shape[1] % 2:
            return f"{list(wide.shape)} are no rows of gate and up"
        if wide.stride(1) != 1 and not wide.t().is_contiguous():
            return "neither the rows are contiguous nor the tensor as a whole, transposed"
        return _elsewhere(wide)


def _wrong_angles(
    cos: torch.Tensor | None, sin: torch.Tensor | None, rows: int, dim: int, dtype: torch.dtype
) -> str:
    if cos is None and sin is None:
        return ""
    if cos is None or sin is None or dim % 2 or not cos.shape == sin.shape == (rows, dim // 2):
        return f"cos and sin must be [{rows}, {dim} / 2], or both None"
    if not cos.dtype is sin.dtype is dtype:
        return f"cos and sin must be {dtype}"
    if cos.stride(1) != 1 or cos.stride() != sin.stride():
        return "cos and sin must have contiguous rows, and the same strides"
    return _elsewhere(cos, sin)


def _wrong_weight(weight: torch.Tensor | None, dim: int, dtype: torch.dtype) -> str:
    if weight is None:
        return ""
    if weight.dtype is not dtype or weight.shape != (dim,) or not weight.is_contiguous():
        return f"weights of norms are {dim} contiguous values of {dtype}, or None"
    return _elsewhere(weight)


def _elsewhere(*tensors: torch.Tensor) -> str:
    """Why these cannot be used by their address; empty where they can."""
    for tensor in tensors:
        if not tensor.is_cpu:
            return f"it runs on a CPU, a tensor is on {tensor.device}"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return "it has no gradient"
    return ""


def glue_kernels(
    path: Path, caller: Caller, *, threads_of: Path
) -> tuple[CpuAddRmsNorm, CpuRopeToCache, CpuSiluAndMul]:
    """The kernels of the library at `path`, on the threads of the one at `threads_of`; raises
    `KernelError` if one of them cannot be loaded.
    """
    library = loaded(path, threads_of=threads_of)
    functions = (library.sagellm_add_norm, library.sagellm_rotate, library.sagellm_gated)
    for function in functions:
        function.argtypes = (ctypes.c_void_p, ctypes.c_int32)
        function.restype = ctypes.c_int32
    norm, rotate, gate = functions
    return CpuAddRmsNorm(norm, caller), CpuRopeToCache(rotate, caller), CpuSiluAndMul(gate, caller)
