"""The glue kernels in C++: one pass for each operation between a decoder's matrices.

At batch 1 torch's operators take 14 us (residual add and RMSNorm), 23 us (RoPE and KV write) and 5 us (gated
activation), little of which is work. A call of a kernel takes 6 to 8 us, most of it Python. The result of a
row depends neither on the number of threads nor on other rows.
"""

from __future__ import annotations

import torch

from sagellm.accel.fusion.checked_kernels import (
    AddRmsNorm,
    ClampedSwiglu,
    GeluAndMul,
    RopeToCache,
    SiluAndMul,
)
from sagellm.accel.fusion.cpu.calls import DTYPE_CODES, CpuKernel, floats, int32s, int64s, pointers, structure
from sagellm.accel.fusion.draw_next import DrawNext

_AddNorm = structure(
    "AddNorm",
    pointers("x", "delta", "delta_weight", "weight", "y"),
    int64s("rows", "columns", "x_stride", "delta_stride", "y_stride"),
    floats("eps"),
    int32s("type"),
)

# The fields of `struct Slots` stand in it one by one: that is quicker to fill in than a nested structure.
_Rotate = structure(
    "Rotate",
    pointers("heads", "cos", "sin", "query_weight", "key_weight", "slots", "keys"),
    int64s("key_block_stride", "key_token_stride", "key_head_stride"),
    pointers("values"),
    int64s("value_block_stride", "value_token_stride", "value_head_stride"),
    int64s("rows", "query_heads", "kv_heads", "dim", "row_stride"),
    int64s("angle_stride", "num_blocks", "block_size"),
    floats("eps", "value_eps"),
    int32s("type", "pool_type", "whole", "norm_values"),
)

_DrawNext = structure(
    "DrawNext",
    pointers("logits", "hidden", "given", "tokens", "positions", "spans", "slots", "tables"),
    pointers("drawn", "chances", "state"),
    int64s("rows", "vocab", "logit_stride", "hidden_bytes", "block_size", "entries", "most"),
)

_Gated = structure(
    "Gated",
    pointers("gate", "y"),
    int64s("rows", "columns", "gate_stride", "y_stride"),
    floats("limit", "alpha"),
    int32s("type", "activation"),
)


class CpuAddRmsNorm(CpuKernel, AddRmsNorm):
    """`AddRmsNorm` on a CPU."""

    c_name = "sagellm_add_norm"

    def _compute(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor | None, eps: float,
        delta_weight: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        rows, columns = x.shape
        if delta is not None and delta.stride(1) != 1:  # as a projection may return it
            delta = delta.contiguous()
        y = x if weight is None else x.new_empty((rows, columns))
        address, stride = (None, 0) if delta is None else (delta.data_ptr(), delta.stride(0))
        job = _AddNorm(
            x.data_ptr(), address, None if delta_weight is None else delta_weight.data_ptr(),
            None if weight is None else weight.data_ptr(), y.data_ptr(), rows, columns, x.stride(0), stride,
            columns, eps, DTYPE_CODES[x.dtype],
        )  # fmt: skip
        self._call(self.name, self._function, job, x, delta, weight, delta_weight, y)
        return y


class CpuRopeToCache(CpuKernel, RopeToCache):
    """`RopeToCache` on a CPU. A slot outside the pools is a `KernelError`; nothing changes then."""

    c_name = "sagellm_rotate"

    def _compute(
        self, heads: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None,
        query_weight: torch.Tensor | None, key_weight: torch.Tensor | None, eps: float,
        slots: torch.Tensor | None, keys: torch.Tensor | None, values: torch.Tensor | None,
        value_eps: float | None = None,
    ) -> None:  # fmt: skip
        rows, num_heads, dim = heads.shape
        given = [None if t is None else t.data_ptr() for t in (cos, sin, query_weight, key_weight, slots)]
        num_blocks, block_size, kv_heads, pool_type = 0, 1, 0, heads.dtype
        pools: list[int | None] = [None, 0, 0, 0] * 2
        if keys is not None and values is not None:
            num_blocks, block_size, kv_heads, _ = keys.shape
            pools, pool_type = [keys.data_ptr(), *keys.stride()[:3]], keys.dtype
            pools += [values.data_ptr(), *values.stride()[:3]]
        job = _Rotate(
            heads.data_ptr(), *given, *pools, rows, num_heads - 2 * kv_heads, kv_heads, dim,
            heads.stride(0), 0 if cos is None else cos.stride(0), num_blocks, block_size, eps,
            value_eps or 0.0, DTYPE_CODES[heads.dtype], DTYPE_CODES[pool_type],
            query_weight is not None and len(query_weight) > dim, value_eps is not None,
        )  # fmt: skip
        self._call(
            self.name, self._function, job, heads, cos, sin, query_weight, key_weight, slots, keys, values
        )


class _CpuGated(CpuKernel):
    """Gated activations. The result is a view of an [n, T] tensor where the input is one of [2 n, T]."""

    c_name = "sagellm_gated"
    activation = 0

    def _layout_obstacle(self, wide: torch.Tensor) -> str:
        if wide.stride(1) != 1 and not wide.t().is_contiguous():
            return "neither the rows are contiguous nor the tensor as a whole, transposed"
        return ""

    def _gated(self, wide: torch.Tensor, limit: float = 0.0, alpha: float = 0.0) -> torch.Tensor:
        rows, columns = wide.shape[0], wide.shape[1] // 2
        if wide.stride(1) == 1:
            y = result = wide.new_empty((rows, columns))
            sizes = (rows, columns, wide.stride(0), columns)
        else:  # all gates, then all ups: one row
            y = wide.new_empty((columns, rows))
            result = y.t()
            sizes = (1, columns * rows, 0, 0)
        code = DTYPE_CODES[wide.dtype]
        job = _Gated(wide.data_ptr(), y.data_ptr(), *sizes, limit, alpha, code, self.activation)
        self._call(self.name, self._function, job, wide, y)
        return result


class CpuSiluAndMul(_CpuGated, SiluAndMul):
    """`SiluAndMul` on a CPU."""

    def _obstacle(self, wide: torch.Tensor) -> str:
        return SiluAndMul._obstacle(self, wide) or self._layout_obstacle(wide)

    def _compute(self, wide: torch.Tensor) -> torch.Tensor:
        return self._gated(wide)


class CpuGeluAndMul(CpuSiluAndMul, GeluAndMul):
    """`GeluAndMul` on a CPU."""

    activation = 1


class CpuClampedSwiglu(_CpuGated, ClampedSwiglu):
    """`ClampedSwiglu` on a CPU."""

    activation = 2

    def _obstacle(self, wide: torch.Tensor, limit: float, alpha: float) -> str:
        return ClampedSwiglu._obstacle(self, wide, limit, alpha) or self._layout_obstacle(wide)

    def _compute(self, wide: torch.Tensor, limit: float, alpha: float) -> torch.Tensor:
        return self._gated(wide, limit, alpha)


class CpuDrawNext(CpuKernel, DrawNext):
    """`DrawNext` on a CPU, for recorded steps."""

    c_name = "sagellm_draw_next"

    def _compute(
        self, logits: torch.Tensor, hidden: torch.Tensor, given: torch.Tensor, tokens: torch.Tensor,
        positions: torch.Tensor, spans: torch.Tensor, slots: torch.Tensor, tables: torch.Tensor,
        drawn: torch.Tensor, chances: torch.Tensor, state: torch.Tensor, block_size: int,
    ) -> None:  # fmt: skip
        pointed = (
            logits, hidden, given, tokens, positions, spans, slots, tables, drawn, chances, state
        )  # fmt: skip
        job = _DrawNext(
            *(tensor.data_ptr() for tensor in pointed), *logits.shape, logits.stride(0),
            hidden.shape[1] * hidden.element_size(), block_size, len(tables), len(drawn),
        )  # fmt: skip
        self._call(self.name, self._function, job, *pointed)
