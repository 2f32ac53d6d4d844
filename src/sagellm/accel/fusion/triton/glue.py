"""The glue kernels in Triton, one launch each.

Sums and products are float32 and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sagellm.accel.fusion.checked_kernels import AddRmsNorm, GeluAndMul, RopeToCache, SiluAndMul
from sagellm.accel.fusion.triton._launch import TritonKernel

WIDEST_ROW, HEADS_AT_ONCE, COLUMNS_AT_ONCE = 16_384, 16, 1024


class TritonAddRmsNorm(TritonKernel, AddRmsNorm):
    """`AddRmsNorm` on a GPU, for rows of at most `WIDEST_ROW`."""

    def _obstacle(self, *inputs: Any) -> str:
        reason = super()._obstacle(*inputs)
        if not reason and not 0 < inputs[0].shape[1] <= WIDEST_ROW:
            return f"rows of {inputs[0].shape[1]}, at most {WIDEST_ROW}"
        return reason

    def _compute(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor | None, eps: float,
        delta_weight: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        rows, columns = x.shape
        if delta is not None and delta.stride(1) != 1:  # as a projection may return it
            delta = delta.contiguous()
        output = x if weight is None else x.new_empty(rows, columns)
        padded = triton.next_power_of_2(columns)

        def or_x(tensor: torch.Tensor | None) -> torch.Tensor:
            return x if tensor is None else tensor  # some address; it is not read

        if rows:
            add_rms_norm_kernel[(rows,)](
                x, or_x(delta), or_x(delta_weight), or_x(weight), output, x.stride(0),
                0 if delta is None else delta.stride(0), eps, COLUMNS=columns, PADDED=padded,
                ADDS=delta is not None, NORMS_DELTA=delta_weight is not None, NORMS=weight is not None,
                num_warps=max(1, min(16, padded // 512)),
            )  # fmt: skip
        return output


class TritonRopeToCache(TritonKernel, RopeToCache):
    """`RopeToCache` on a GPU. It does not check slots."""

    def _obstacle(self, *inputs: Any) -> str:
        reason, heads, keys = super()._obstacle(*inputs), inputs[0], inputs[7]
        if not reason and keys is None:
            return f"odd heads of {heads.shape[2]}" if heads.shape[2] % 2 else ""
        if not reason and inputs[3] is not None and len(inputs[3]) > heads.shape[2]:
            return "norms over all heads are not one launch"
        if not reason and (heads.shape[2] % 2 or heads.shape[1] == 2 * keys.shape[2]):
            return f"{heads.shape[1]} heads of {heads.shape[2]} do not fit blocks of {list(keys.shape[1:])}"
        return reason

    def _compute(
        self, heads: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None,
        query_weight: torch.Tensor | None, key_weight: torch.Tensor | None, eps: float,
        slots: torch.Tensor | None, keys: torch.Tensor | None, values: torch.Tensor | None,
        value_eps: float | None = None,
    ) -> None:  # fmt: skip
        rows, num_heads, dim = heads.shape
        kv_heads, block_size = (0, 1) if keys is None else (keys.shape[2], keys.shape[1])
        if not rows:
            return

        def or_heads(tensor: torch.Tensor | None) -> torch.Tensor:
            return heads if tensor is None else tensor  # some address; it is not read

        rope_to_cache_kernel[rows, triton.cdiv(num_heads, HEADS_AT_ONCE)](
            *(or_heads(t) for t in (heads, cos, sin, query_weight, key_weight, slots, keys, values)),
            heads.stride(0), 0 if cos is None else cos.stride(0),
            *((0,) * 3 if keys is None else keys.stride()[:3]),
            *((0,) * 3 if values is None else values.stride()[:3]), eps, value_eps or 0.0,
            QUERY_HEADS=num_heads - 2 * kv_heads, KV_HEADS=kv_heads, DIM=dim,
            HALF=triton.next_power_of_2(dim // 2), BLOCK_SIZE=block_size, HEADS=HEADS_AT_ONCE,
            TURNS=cos is not None, NORMS_QUERY=query_weight is not None, NORMS_KEY=key_weight is not None,
            NORMS_VALUE=value_eps is not None,
        )  # fmt: skip


class TritonSiluAndMul(TritonKernel, SiluAndMul):
    """`SiluAndMul` on a GPU; the result is contiguous."""

    is_gelu = False

    def _compute(self, wide: torch.Tensor) -> torch.Tensor:
        if wide.stride(1) != 1:  # as a projection may return it
            wide = wide.contiguous()
        rows, columns = wide.shape[0], wide.shape[1] // 2
        output = wide.new_empty(rows, columns)
        if output.numel():
            grid = rows, triton.cdiv(columns, COLUMNS_AT_ONCE)
            silu_and_mul_kernel[grid](
                wide, output, wide.stride(0), columns, TILE=COLUMNS_AT_ONCE, GELU=self.is_gelu
            )
        return output


class TritonGeluAndMul(TritonSiluAndMul, GeluAndMul):
    """`GeluAndMul` on a GPU; the result is contiguous."""

    is_gelu = True


@triton.jit
def add_rms_norm_kernel(
    x: tl.tensor, delta: tl.tensor, delta_weight: tl.tensor, weight: tl.tensor, output: tl.tensor,
    x_row: tl.tensor, delta_row: tl.tensor, eps: tl.tensor, COLUMNS: tl.constexpr, PADDED: tl.constexpr,
    ADDS: tl.constexpr, NORMS_DELTA: tl.constexpr, NORMS: tl.constexpr,
) -> None:  # fmt: skip
    """Program: one whole row. With ADDS x becomes x + delta, rounded as torch does. With NORMS_DELTA it is
    the RMSNorm of delta that is added. Without NORMS there is no output.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED)
    inside = columns < COLUMNS
    value = tl.load(x + row * x_row + columns, mask=inside, other=0.0)
    if ADDS:
        added = tl.load(delta + row * delta_row + columns, mask=inside, other=0.0).to(tl.float32)
        if NORMS_DELTA:
            own = 1.0 / tl.sqrt(tl.sum(added * added, 0) / COLUMNS + eps)
            added = added * own * tl.load(delta_weight + columns, mask=inside, other=0.0).to(tl.float32)
        value = (value.to(tl.float32) + added).to(x.dtype.element_ty)
        tl.store(x + row * x_row + columns, value, mask=inside)
    if NORMS:
        wide = value.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / COLUMNS + eps)
        scaled = wide * scale * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(output + row * COLUMNS + columns, scaled.to(output.dtype.element_ty), mask=inside)


@triton.jit
def rope_to_cache_kernel(
    heads: tl.tensor, cos: tl.tensor, sin: tl.tensor, query_weight: tl.tensor, key_weight: tl.tensor,
    slots: tl.tensor, keys: tl.tensor, values: tl.tensor, heads_row: tl.tensor, angle_row: tl.tensor,
    key_block: tl.tensor, key_token: tl.tensor, key_head: tl.tensor, value_block: tl.tensor,
    value_token: tl.tensor, value_head: tl.tensor, eps: tl.tensor, value_eps: tl.tensor,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, TURNS: tl.constexpr,
    NORMS_QUERY: tl.constexpr, NORMS_KEY: tl.constexpr, NORMS_VALUE: tl.constexpr,
) -> None:  # fmt: skip
    """Program (row, HEADS of its heads): two [HEADS, HALF] whose elements rotate pairwise."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF)
    is_query, is_value = head < QUERY_HEADS, head >= QUERY_HEADS + KV_HEADS
    is_key = (head >= QUERY_HEADS) & (head < QUERY_HEADS + KV_HEADS)
    inside = (head < QUERY_HEADS + 2 * KV_HEADS)[:, None] & (pair < DIM // 2)[None, :]
    place = row * heads_row + head[:, None] * DIM + pair[None, :]
    first = tl.load(heads + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(heads + place + DIM // 2, mask=inside, other=0.0).to(tl.float32)
    if NORMS_QUERY or NORMS_KEY or NORMS_VALUE:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = (1.0 / tl.sqrt(squares / DIM + eps))[:, None]
        if NORMS_QUERY:
            first, second = _normed(first, second, is_query, scale, query_weight, pair, DIM)
        if NORMS_KEY:
            first, second = _normed(first, second, is_key, scale, key_weight, pair, DIM)
        if NORMS_VALUE:
            own = (1.0 / tl.sqrt(squares / DIM + value_eps))[:, None]
            first = tl.where(is_value[:, None], first * own, first)
            second = tl.where(is_value[:, None], second * own, second)
    if TURNS:
        angle = row * angle_row + pair
        c = tl.load(cos + angle, mask=pair < DIM // 2, other=0.0).to(tl.float32)[None, :]
        s = tl.load(sin + angle, mask=pair < DIM // 2, other=0.0).to(tl.float32)[None, :]
        turned = first * c - second * s
        second = tl.where(is_value[:, None], second, second * c + first * s)
        first = tl.where(is_value[:, None], first, turned)
    low, high = first.to(heads.dtype.element_ty), second.to(heads.dtype.element_ty)
    rewritten = inside & (is_query | is_key | (is_value & NORMS_VALUE))[:, None]
    tl.store(heads + place, low, mask=rewritten)
    tl.store(heads + place + DIM // 2, high, mask=rewritten)

    if KV_HEADS == 0:
        return
    slot = tl.load(slots + row)
    block, token = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    kept = inside & is_key[:, None]
    at = block * key_block + token * key_token + (head - QUERY_HEADS)[:, None] * key_head + pair[None, :]
    tl.store(keys + at, low.to(keys.dtype.element_ty), mask=kept)
    tl.store(keys + at + DIM // 2, high.to(keys.dtype.element_ty), mask=kept)
    kept = inside & is_value[:, None]
    own = (head - QUERY_HEADS - KV_HEADS)[:, None]
    at = block * value_block + token * value_token + own * value_head + pair[None, :]
    tl.store(values + at, low.to(values.dtype.element_ty), mask=kept)
    tl.store(values + at + DIM // 2, high.to(values.dtype.element_ty), mask=kept)


@triton.jit
def _normed(
    first: tl.tensor, second: tl.tensor, which: tl.tensor, scale: tl.tensor, weight: tl.tensor,
    pair: tl.tensor, DIM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Both halves, with heads `which` scaled and weighted."""
    there = pair < DIM // 2
    low = tl.load(weight + pair, mask=there, other=0.0).to(tl.float32)[None, :]
    high = tl.load(weight + DIM // 2 + pair, mask=there, other=0.0).to(tl.float32)[None, :]
    chosen = which[:, None]
    return tl.where(chosen, first * scale * low, first), tl.where(chosen, second * scale * high, second)


@triton.jit
def silu_and_mul_kernel(
    wide: tl.tensor, output: tl.tensor, wide_row: tl.tensor, columns: tl.tensor, TILE: tl.constexpr,
    GELU: tl.constexpr,
) -> None:  # fmt: skip
    """Program (row, TILE of its columns). With GELU, by tanh, that is the activation."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < columns
    gate = tl.load(wide + row * wide_row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(wide + row * wide_row + columns + column, mask=inside, other=0.0).to(tl.float32)
    turned = gate
    if GELU:
        turned = 1.5957691216 * gate * (1.0 + 0.044715 * gate * gate)
    answer = gate / (1.0 + tl.exp(-turned)) * up
    tl.store(output + row * columns + column, answer.to(output.dtype.element_ty), mask=inside)
