"""Attention over the paged KV cache by the C++ kernel of this folder; K and V are read where they lie.

One call does all sequences of a step, decode rows and prefill chunks. `paged_attention` is the slow twin.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch

from sagellm.accel.fusion.common import obstacle
from sagellm.accel.fusion.cpu.calls import Caller, Function
from sagellm.accel.fusion.cpu.library import loaded
from sagellm.core.errors import KernelError
from sagellm.core.protocols.fusion import KernelSupport, Tolerance

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_USABLE = KernelSupport(usable=True)
SPAN_FIELDS = ("first_row", "num_tokens", "start", "first_entry")


class _Pool(ctypes.Structure):
    """`struct Pool` of attention.h."""

    _fields_ = (("data", ctypes.c_void_p), ("strides", ctypes.c_int64 * 3))


class _Job(ctypes.Structure):
    """`struct Attention` of attention.h."""

    _fields_ = (
        ("query", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("keys", _Pool),
        ("values", _Pool),
        ("tables", ctypes.c_void_p),
        ("spans", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("num_blocks", ctypes.c_int64),
        ("num_entries", ctypes.c_int64),
        ("num_spans", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("query_strides", ctypes.c_int64 * 2),
        ("out_strides", ctypes.c_int64 * 2),
        ("scale", ctypes.c_float),
        ("query_type", ctypes.c_int32),
        ("pool_type", ctypes.c_int32),
    )


class CpuPagedAttention:
    """Implements `FusedKernel`. Inputs, in this order:

    `query` [T, heads, head_dim]; `keys` and `values`, pools [num_blocks, block_size, kv_heads, head_dim];
    `spans`, int64 [n, 4], each the first row, number of tokens, position of the first and first table entry
    of a sequence's tokens in the query; `tables`, int32, block ids of all sequences; and maybe `window`.

    A token attends to the last `window` positions of its sequence up to its own, or to all of them, scaled by
    1/sqrt(head_dim). The result is [T, heads, head_dim] in the query's dtype; rows of no span are undefined.
    A span's result depends neither on the number of threads nor on other spans, and nothing behind a
    sequence's last position is read.
    """

    name = "paged_attention"
    tolerances: tuple[Tolerance, ...] = (
        Tolerance("float32", 2e-5, 2e-5),
        Tolerance("bfloat16", 1e-2, 1.6e-2),
        Tolerance("float16", 2e-3, 2e-3),
    )
    """For values of about unit size, and scores of up to about 30. Sums are float32, in another order;
    weights are rounded to bfloat16 where query and pool are bfloat16 and the CPU multiplies pairs of it.
    """

    def __init__(self, function: Function, caller: Caller) -> None:
        self._function, self._call = function, caller

    def supports(self, *inputs: Any) -> KernelSupport:
        reason = _obstacle(*inputs)
        return KernelSupport(usable=False, reason=reason) if reason else _USABLE

    def apply(self, *inputs: Any) -> torch.Tensor:
        """Raises `KernelError` where `supports` says no, for spans or tables that lead outside of query or
        pool, and where memory runs out.
        """
        reason = _obstacle(*inputs)
        if reason:
            raise KernelError(reason)
        return self._computed(*inputs)

    def reference(self, *inputs: Any) -> torch.Tensor:
        return paged_attention(*inputs)

    def _computed(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spans: torch.Tensor,
        tables: torch.Tensor, window: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        out = query.new_empty(query.shape)
        num_rows, heads, head_dim = query.shape
        num_blocks, block_size, kv_heads, _ = keys.shape
        job = _Job(
            query.data_ptr(), out.data_ptr(), (keys.data_ptr(), keys.stride()[:3]),
            (values.data_ptr(), values.stride()[:3]), tables.data_ptr(), spans.data_ptr(), num_rows,
            num_blocks, len(tables), len(spans), heads, kv_heads, head_dim, block_size, window or 0,
            query.stride()[:2], out.stride()[:2], head_dim**-0.5, _TYPES[query.dtype], _TYPES[keys.dtype],
        )  # fmt: skip
        self._call(self.name, self._function, job, query, keys, values, spans, tables, out)
        return out


def _obstacle(*inputs: Any) -> str:
    """What stands in the way; empty where nothing does."""
    return obstacle(*inputs) or _elsewhere(*inputs[:5])


def _elsewhere(query: torch.Tensor, keys: torch.Tensor, *others: torch.Tensor) -> str:
    tensors = (query, keys, *others)
    if not all(tensor.is_cpu for tensor in tensors):
        return f"paged attention runs on a CPU; the query is on {query.device}, the pool on {keys.device}"
    if any(tensor.requires_grad for tensor in tensors) and torch.is_grad_enabled():
        return "paged attention has no gradient"
    return ""


def paged_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spans: torch.Tensor, tables: torch.Tensor,
    window: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """The same from plain operators, token by token, in the wider of both dtypes; rows of no span are NaN."""
    out = torch.full_like(query, torch.nan)
    dtype = torch.promote_types(query.dtype, keys.dtype)
    block_size, group = keys.shape[1], query.shape[1] // keys.shape[2]
    for first_row, num_tokens, start, first_entry in spans.tolist():
        for i in range(num_tokens):
            position = start + i
            seen = torch.arange(max(0, position + 1 - window) if window else 0, position + 1)
            places = (tables[first_entry + seen // block_size].long(), seen % block_size)
            k = keys[places].to(dtype).repeat_interleave(group, dim=1)
            v = values[places].to(dtype).repeat_interleave(group, dim=1)
            scores = torch.einsum("hd,lhd->hl", query[first_row + i].to(dtype), k) * query.shape[2] ** -0.5
            out[first_row + i] = torch.einsum("hl,lhd->hd", scores.softmax(-1), v).to(query.dtype)
    return out


def attention_kernel(path: Path, caller: Caller, *, threads_of: Path) -> CpuPagedAttention:
    """The kernel of the library at `path`, on the threads of the one at `threads_of`; raises
    `KernelError` if one of them cannot be loaded.
    """
    library = loaded(path, threads_of=threads_of)
    function = library.sagellm_paged_attention
    function.argtypes = (ctypes.c_void_p, ctypes.c_int32)
    function.restype = ctypes.c_int32
    return CpuPagedAttention(function, caller)
