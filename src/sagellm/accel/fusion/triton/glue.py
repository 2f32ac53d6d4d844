"""What a decoder does between its matrices, on a GPU: one launch each. The inputs are those of the CPU's
kernels of the same names.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from sagellm.accel.fusion._glue_twins import TOLERANCES, add_rms_norm, rope_to_cache, silu_and_mul
from sagellm.accel.fusion.triton._launch import DTYPES, device_obstacle, refuse
from sagellm.accel.fusion.triton.glue_kernels import (
    add_rms_norm_kernel,
    rope_to_cache_kernel,
    silu_and_mul_kernel,
)
from sagellm.core.protocols.fusion import KernelSupport

WIDEST_ROW, HEADS_AT_ONCE, COLUMNS_AT_ONCE = 16_384, 16, 1024


class TritonAddRmsNorm:
    """Implements `FusedKernel`. Inputs: `x` [T, n], which becomes x + delta; `delta` [T, n] or None; `weight`
    [n]; `eps`. The result is the RMSNorm of the new x, [T, n] contiguous.
    """

    name = "add_rms_norm"
    tolerances = TOLERANCES

    def supports(self, *inputs: Any) -> KernelSupport:
        reason = self._obstacle(*inputs)
        return KernelSupport(not reason, reason)

    def apply(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Raises `KernelError` where `supports` says no."""
        refuse(self._obstacle(x, delta, weight, eps))
        rows, columns = x.shape
        if delta is not None and delta.stride(1) != 1:  # as a projection may return it
            delta = delta.contiguous()
        out = x.new_empty(rows, columns)
        padded = triton.next_power_of_2(columns)
        if rows:
            add_rms_norm_kernel[(rows,)](
                x, x if delta is None else delta, weight, out, x.stride(0),
                0 if delta is None else delta.stride(0), eps, COLUMNS=columns, PADDED=padded,
                ADDS=delta is not None, num_warps=max(1, min(16, padded // 512)),
            )  # fmt: skip
        return out

    def reference(self, *inputs: Any) -> torch.Tensor:
        return add_rms_norm(*inputs)

    def _obstacle(self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> str:
        if x.dtype not in DTYPES or weight.dtype is not x.dtype:
            return f"no kernel for {x.dtype} with a weight of {weight.dtype}"
        if x.ndim != 2 or weight.shape != x.shape[1:] or not 0 < x.shape[1] <= WIDEST_ROW:
            return f"no rows of at most {WIDEST_ROW} and weight: {list(x.shape)}, {list(weight.shape)}"
        if x.stride(1) != 1 or not weight.is_contiguous():
            return "rows of x and the weight must be contiguous"
        if delta is None:
            return device_obstacle(x, weight)
        if delta.dtype is not x.dtype or delta.shape != x.shape:
            return f"delta is {delta.dtype} {list(delta.shape)}, x {x.dtype} {list(x.shape)}"
        return device_obstacle(x, weight, delta)


class TritonRopeToCache:
    """Implements `FusedKernel`. Inputs: `heads` [T, heads, dim], of a row its query, key and value heads;
    `cos` and `sin` [T, dim / 2] or None; `query_weight` and `key_weight` [dim] or None; `eps`; `slots` int64
    [T], each block x block size + token; `keys` and `values`, pools [num_blocks, block_size, kv_heads, dim].

    Queries and keys get their RMSNorm, if they have one, and are rotated, all in place; keys and values are
    stored at the slots in the pools' dtype. There is no result. Slots are not checked.
    """

    name = "rope_to_cache"
    tolerances = TOLERANCES

    def supports(self, *inputs: Any) -> KernelSupport:
        reason = self._obstacle(*inputs)
        return KernelSupport(not reason, reason)

    def apply(
        self, heads: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None,
        query_weight: torch.Tensor | None, key_weight: torch.Tensor | None, eps: float, slots: torch.Tensor,
        keys: torch.Tensor, values: torch.Tensor,
    ) -> None:  # fmt: skip
        """Raises `KernelError` where `supports` says no."""
        refuse(self._obstacle(heads, cos, sin, query_weight, key_weight, eps, slots, keys, values))
        rows, num_heads, dim = heads.shape
        kv_heads = keys.shape[2]
        if not rows:
            return

        def or_heads(tensor: torch.Tensor | None) -> torch.Tensor:
            return heads if tensor is None else tensor  # some address; it is not read

        rope_to_cache_kernel[rows, triton.cdiv(num_heads, HEADS_AT_ONCE)](
            heads, or_heads(cos), or_heads(sin), or_heads(query_weight), or_heads(key_weight), slots, keys,
            values, heads.stride(0), 0 if cos is None else cos.stride(0), *keys.stride()[:3],
            *values.stride()[:3], eps, QUERY_HEADS=num_heads - 2 * kv_heads, KV_HEADS=kv_heads, DIM=dim,
            HALF=triton.next_power_of_2(dim // 2), BLOCK_SIZE=keys.shape[1], HEADS=HEADS_AT_ONCE,
            TURNS=cos is not None, NORMS_QUERY=query_weight is not None, NORMS_KEY=key_weight is not None,
        )  # fmt: skip

    def reference(self, *inputs: Any) -> None:
        rope_to_cache(*inputs)

    def _obstacle(self, *inputs: Any) -> str:
        heads, cos, sin, query_weight, key_weight, _, slots, keys, values = inputs
        if heads.dtype not in DTYPES or keys.dtype not in DTYPES or values.dtype is not keys.dtype:
            return f"no kernel for {heads.dtype} into {keys.dtype} and {values.dtype}"
        if heads.ndim != 3 or keys.ndim != 4 or values.shape != keys.shape:
            return f"no heads and pools: {[list(t.shape) for t in (heads, keys, values)]}"
        rows, num_heads, dim = heads.shape
        if dim % 2 or keys.shape[3] != dim or not 0 < 2 * keys.shape[2] < num_heads or not keys.shape[1]:
            return f"{num_heads} heads of {dim} do not fit blocks of {list(keys.shape[1:])}"
        if heads.stride(2) != 1 or heads.stride(1) != dim or keys.stride(3) != 1 or values.stride(3) != 1:
            return "the heads of a row, and the dims of a head in the pools, must be contiguous"
        if slots.dtype is not torch.int64 or slots.shape != (rows,) or not slots.is_contiguous():
            return f"slots are contiguous int64 [{rows}], not {slots.dtype} {list(slots.shape)}"
        weights = [weight for weight in (query_weight, key_weight) if weight is not None]
        if any(weight.shape != (dim,) or not weight.is_contiguous() for weight in weights):
            return f"weights of norms are {dim} contiguous values, or None"
        return _wrong_angles(cos, sin, rows, dim) or device_obstacle(
            heads, slots, keys, values, *weights, *(angle for angle in (cos, sin) if angle is not None)
        )


class TritonSiluAndMul:
    """Implements `FusedKernel`. The input is [T, 2 n], of a row its gate and up; the result silu(gate) x up
    is [T, n], contiguous.
    """

    name = "silu_and_mul"
    tolerances = TOLERANCES

    def supports(self, *inputs: Any) -> KernelSupport:
        reason = self._obstacle(*inputs)
        return KernelSupport(not reason, reason)

    def apply(self, wide: torch.Tensor) -> torch.Tensor:
        """Raises `KernelError` where `supports` says no."""
        refuse(self._obstacle(wide))
        if wide.stride(1) != 1:  # as a projection may return it
            wide = wide.contiguous()
        rows, columns = wide.shape[0], wide.shape[1] // 2
        out = wide.new_empty(rows, columns)
        if out.numel():
            grid = rows, triton.cdiv(columns, COLUMNS_AT_ONCE)
            silu_and_mul_kernel[grid](wide, out, wide.stride(0), columns, TILE=COLUMNS_AT_ONCE)
        return out

    def reference(self, *inputs: Any) -> torch.Tensor:
        return silu_and_mul(*inputs)

    def _obstacle(self, wide: torch.Tensor) -> str:
        if wide.dtype not in DTYPES:
            return f"no kernel for {wide.dtype}"
        if wide.ndim != 2 or wide.shape[1] % 2:
            return f"{list(wide.shape)} are no rows of gate and up"
        return device_obstacle(wide)


def _wrong_angles(cos: torch.Tensor | None, sin: torch.Tensor | None, rows: int, dim: int) -> str:
    if cos is None and sin is None:
        return ""
    if cos is None or sin is None or not cos.shape == sin.shape == (rows, dim // 2):
        return f"cos and sin must be [{rows}, {dim} / 2], or both None"
    if cos.stride(1) != 1 or cos.stride() != sin.stride():
        return "cos and sin must have contiguous rows, and the same strides"
    return ""
