"""Paged attention by the C++ kernel of this folder.

One call computes all sequences of a step, decode rows and prefill chunks. K and V are read where they lie.
"""

from __future__ import annotations

import ctypes

import torch

from sagellm.accel.fusion.checked_kernels import PagedAttention, attention_weights
from sagellm.accel.fusion.cpu.calls import (
    DTYPE_CODES,
    CpuKernel,
    fields,
    floats,
    int32s,
    int64s,
    pointers,
    structure,
)
from sagellm.core.protocols.fusion import Scores

_Pool = structure("Pool", pointers("data"), fields(ctypes.c_int64 * 3, "strides"))

_Job = structure(
    "Attention",
    pointers("query", "output"),
    fields(_Pool, "keys", "values"),
    pointers("tables", "spans"),
    int64s("num_rows", "num_blocks", "num_entries", "num_spans"),
    int64s("heads", "kv_heads", "head_dim", "value_dim", "block_size", "window", "decode_rows"),
    fields(ctypes.c_int64 * 2, "query_strides", "output_strides"),
    pointers("sinks"),
    floats("scale", "softcap"),
    int32s("query_type", "pool_type"),
)


class CpuPagedAttention(CpuKernel, PagedAttention):
    """`PagedAttention` on a CPU. The result of a span depends neither on the number of threads nor on other
    spans. `apply` raises `KernelError` also for spans or tables that lead outside of query or pool, and
    `CapacityError` where memory runs out. Tolerances hold for scores of up to about 30: weights are rounded
    to bfloat16 where query and pool are bfloat16 and the CPU multiplies pairs of it.
    """

    c_name = "sagellm_paged_attention"

    def reference(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spans: torch.Tensor,
        tables: torch.Tensor, window: int | None = None, scores: Scores | None = None, decode_rows: int = 0,
    ) -> torch.Tensor:  # fmt: skip
        """The slow twin, token by token, in the wider of both dtypes. Rows outside every span are NaN."""
        output = query.new_full((*query.shape[:2], values.shape[3]), torch.nan)
        dtype = torch.promote_types(query.dtype, keys.dtype)
        block_size, group = keys.shape[1], query.shape[1] // keys.shape[2]
        for first_row, num_tokens, start, first_entry in spans.tolist():
            for i in range(num_tokens):
                position = start + i
                seen = torch.arange(max(0, position + 1 - window) if window else 0, position + 1)
                slots = (tables[first_entry + seen // block_size].long(), seen % block_size)
                k = keys[slots].to(dtype).repeat_interleave(group, dim=1)
                v = values[slots].to(dtype).repeat_interleave(group, dim=1)
                products = torch.einsum("hd,lhd->hl", query[first_row + i].to(dtype), k)
                weights = attention_weights(products, query.shape[2], scores)
                output[first_row + i] = torch.einsum("hl,lhd->hd", weights, v).to(query.dtype)
        return output

    def _compute(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spans: torch.Tensor,
        tables: torch.Tensor, window: int | None = None, scores: Scores | None = None, decode_rows: int = 0,
    ) -> torch.Tensor:  # fmt: skip
        num_rows, heads, head_dim = query.shape
        value_dim = values.shape[3]
        output = query.new_empty(num_rows, heads, value_dim)
        scale, softcap, sinks = head_dim**-0.5, 0.0, None
        if scores is not None:
            scale, softcap, sinks = scores.scale, scores.softcap or 0.0, scores.sinks
        num_blocks, block_size, kv_heads, _ = keys.shape
        job = _Job(
            query.data_ptr(), output.data_ptr(), (keys.data_ptr(), keys.stride()[:3]),
            (values.data_ptr(), values.stride()[:3]), tables.data_ptr(), spans.data_ptr(), num_rows,
            num_blocks, len(tables), len(spans), heads, kv_heads, head_dim, value_dim, block_size,
            window or 0, decode_rows, query.stride()[:2], output.stride()[:2],
            None if sinks is None else sinks.data_ptr(), scale, softcap, DTYPE_CODES[query.dtype],
            DTYPE_CODES[keys.dtype],
        )  # fmt: skip
        self._call(self.name, self._function, job, query, keys, values, spans, tables, output, sinks)
        return output
