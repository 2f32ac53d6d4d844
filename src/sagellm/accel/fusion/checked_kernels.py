"""The inputs of the kernels for CPU and GPU: their checks and slow twins."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch.nn import functional as F

from sagellm.core.errors import KernelError
from sagellm.core.protocols.fusion import KernelSupport, Scores, Tolerance

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class CheckedKernel(ABC):
    """A `FusedKernel` that checks its inputs before it computes. The default tolerances are for values of
    about unit size: sums are float32, in another order than in torch.
    """

    name: str
    tolerances: tuple[Tolerance, ...] = (
        Tolerance("float32", 2e-5, 2e-5),
        Tolerance("bfloat16", 1e-2, 1.6e-2),
        Tolerance("float16", 2e-3, 2e-3),
    )

    def supports(self, *inputs: Any) -> KernelSupport:
        reason = self._obstacle(*inputs)
        return KernelSupport(not reason, reason)

    def apply(self, *inputs: Any) -> Any:
        """Raises `KernelError` where `supports` says no."""
        reason = self._obstacle(*inputs)
        if reason:
            raise KernelError(f"{self.name}: {reason}")
        return self._compute(*inputs)

    @abstractmethod
    def reference(self, *inputs: Any, **_: Any) -> Any:
        """The slow twin."""

    @abstractmethod
    def _obstacle(self, *inputs: Any, **_: Any) -> str:
        """Why the kernel cannot take these inputs; empty if it can."""

    @abstractmethod
    def _device_obstacle(self, *tensors: torch.Tensor) -> str:
        """Why the kernel cannot run where these tensors are; empty if it can."""

    @abstractmethod
    def _compute(self, *inputs: Any, **_: Any) -> Any:
        """The result for inputs without an obstacle."""


class PagedAttention(CheckedKernel):
    """Causal attention over the paged KV cache. Inputs, in this order:

    `query` [T, heads, head_dim]; `keys`, a pool [num_blocks, block_size, kv_heads, head_dim], and `values`,
    one of value_dim dims, which may be a part of the keys; `spans`, int64 [n, 4], for each sequence the first
    row, number of tokens, position of the first token and first table entry; `tables`, int32, the block ids
    of all sequences; and optionally `window`, `scores` and `decode_rows`: so many first rows are in decode,
    and a kernel may compute the few tokens of a chain in another way than a prompt.

    A token attends to the last `window` positions of its sequence up to its own, or to all of them. Scores
    are scaled by 1/sqrt(head_dim), or made as `scores` says. The result is [T, heads, value_dim] in the
    query's dtype. Rows outside every span are undefined. The kernel reads nothing behind a sequence's last
    position.
    """

    name = "paged_attention"

    def _obstacle(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None = None,
        spans: torch.Tensor | None = None, tables: torch.Tensor | None = None, window: int | None = None,
        scores: Scores | None = None, decode_rows: int = 0,
    ) -> str:  # fmt: skip
        if values is None or spans is None or tables is None:
            return "it takes query, keys, values, spans, tables and optionally a window and scores"
        if query.dtype not in DTYPES or keys.dtype not in DTYPES or values.dtype != keys.dtype:
            return f"no kernel for {query.dtype} over {keys.dtype} and {values.dtype}"
        if query.ndim != 3 or keys.ndim != 4 or query.shape[2] != keys.shape[3]:
            return f"shapes {[list(t.shape) for t in (query, keys, values)]} are no query and pools"
        if values.ndim != 4 or values.shape[:3] != keys.shape[:3] or not values.shape[3]:
            return f"shapes {[list(t.shape) for t in (query, keys, values)]} are no query and pools"
        if not keys.shape[2] or query.shape[1] % keys.shape[2] or not keys.shape[1] or not keys.shape[3]:
            blocks = list(keys.shape[1:3])
            return f"{query.shape[1]} heads of {keys.shape[3]} over blocks of {blocks} make no groups"
        if not keys.stride(3) == values.stride(3) == query.stride(2) == 1:
            return "the dims of a head are not contiguous"
        if spans.dtype != torch.int64 or spans.shape != (len(spans), 4) or not spans.is_contiguous():
            return f"spans are contiguous int64 [n, 4], not {spans.dtype} {list(spans.shape)}"
        if tables.dtype != torch.int32 or tables.ndim != 1 or not tables.is_contiguous():
            return f"tables are contiguous int32 [n], not {tables.dtype} {list(tables.shape)}"
        if window is not None and window < 1:
            return f"a window of {window} shows nothing: use at least 1, or None"
        if scores is not None and (reason := _wrong_scores(scores, query.shape[1])):
            return reason
        sinks = () if scores is None or scores.sinks is None else (scores.sinks,)
        return self._device_obstacle(query, keys, values, spans, tables, *sinks)


def _wrong_scores(scores: Scores, num_heads: int) -> str:
    if scores.softcap is not None and not 0 < scores.softcap < float("inf"):
        return f"scores are limited to a positive number, not {scores.softcap}"
    sinks = scores.sinks
    if sinks is None:
        return ""
    if sinks.dtype is not torch.float32 or sinks.shape != (num_heads,) or not sinks.is_contiguous():
        return f"sinks are contiguous float32 [{num_heads}], not {sinks.dtype} {list(sinks.shape)}"
    return ""


def attention_weights(
    products: torch.Tensor, head_dim: int, scores: Scores | None, hidden: torch.Tensor | None = None
) -> torch.Tensor:
    """The weights of keys, from q k [heads, ..., keys]; 0 where `hidden`."""
    made = products * (head_dim**-0.5 if scores is None else scores.scale)
    if scores is not None and scores.softcap is not None:
        made = scores.softcap * (made / scores.softcap).tanh()
    if hidden is not None:
        made = made.masked_fill(hidden, -torch.inf)
    if scores is None or scores.sinks is None:
        return made.softmax(-1)
    sinks = scores.sinks.to(made.dtype).view(-1, *[1] * (made.ndim - 1)).expand(*made.shape[:-1], 1)
    return torch.cat([made, sinks], dim=-1).softmax(-1)[..., :-1]


class GlueKernel(CheckedKernel):
    """An operation between the matrices of a decoder layer."""

    tolerances: tuple[Tolerance, ...] = (
        Tolerance("float32", 2e-5, 2e-5),
        Tolerance("bfloat16", 1.6e-2, 1.6e-2),
        Tolerance("float16", 2e-3, 2e-3),
    )
    """For values of about unit size: torch rounds some results between its operators, a kernel rounds once.
    """


class AddRmsNorm(GlueKernel):
    """Residual add, then RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467). Inputs: `x` [T, n], which
    becomes x + delta; `delta` [T, n] or None; `weight` [n]; `eps`; and maybe `delta_weight` [n]: x becomes
    x + RMSNorm(delta). The result is the RMSNorm of the new x, [T, n] contiguous, or without a weight x.
    """

    name = "add_rms_norm"

    def reference(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor | None, eps: float,
        delta_weight: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        if delta is not None and delta_weight is not None:
            delta = F.rms_norm(delta, x.shape[-1:], delta_weight, eps)
        if delta is not None:
            x.add_(delta)
        return x if weight is None else F.rms_norm(x, x.shape[-1:], weight, eps)

    def _obstacle(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor | None, eps: float,
        delta_weight: torch.Tensor | None = None,
    ) -> str:  # fmt: skip
        dtype, shape = x.dtype, x.shape
        if weight is None or delta_weight is not None:  # seldom: asked apart, this is called at every step
            reason = self._odd_obstacle(x, delta, weight, delta_weight)
            if reason or weight is None:
                return reason
        if dtype not in DTYPES or weight.dtype is not dtype:
            return f"no kernel for {dtype} with a weight of {weight.dtype}"
        if len(shape) != 2 or weight.shape != shape[1:]:
            return f"no rows and weight: {list(shape)}, {list(weight.shape)}"
        if x.stride(1) != 1 or x.stride(0) < shape[1] or not weight.is_contiguous():
            return "the weight and each row of x must be contiguous, and rows must not overlap"
        if delta is None:
            return self._device_obstacle(x, weight)
        if delta.dtype is not dtype or delta.shape != shape:
            return f"delta is {delta.dtype} {list(delta.shape)}, x {dtype} {list(shape)}"
        return self._device_obstacle(x, weight, delta)

    def _odd_obstacle(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor | None,
        delta_weight: torch.Tensor | None,
    ) -> str:  # fmt: skip
        """What is wrong with a weight for the delta, or without the other."""
        if delta is None:
            return "neither a weight nor a delta" if delta_weight is None else "a weight of no delta"
        if delta_weight is None:
            return "a delta without its weight needs the other weight"
        return self._obstacle(x, delta, delta_weight, 0.0)


class RopeToCache(GlueKernel):
    """RMSNorm and rotation of queries and keys, in place, then the KV write.

    Inputs: `heads` [T, heads, dim], the query, key and value heads of each row; `cos` and `sin` [T, dim / 2],
    or None for no rotation; `query_weight` and `key_weight` [dim], or None for no norm, or as long as all
    query and all key heads for one norm over each; `eps`; `slots`, int64 [T], each block id x block size +
    offset in the block; `keys` and `values`, pools [num_blocks, block_size, kv_heads, dim]; and maybe
    `value_eps`: value heads get an RMSNorm without weights. Keys and values are stored in the pools' dtype.
    There is no result. A slot that is given twice holds one of both. With None for slots and pools all heads
    are queries.
    """

    name = "rope_to_cache"

    def reference(
        self, heads: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None,
        query_weight: torch.Tensor | None, key_weight: torch.Tensor | None, eps: float,
        slots: torch.Tensor | None, keys: torch.Tensor | None, values: torch.Tensor | None,
        value_eps: float | None = None,
    ) -> None:  # fmt: skip
        """The slow twin, in float64."""
        kv_heads, half = 0 if keys is None else keys.shape[2], heads.shape[2] // 2
        query, key, value = torch.split(heads, [heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
        for part, weight in ((query, query_weight), (key, key_weight)):
            rotated = part.double()
            if weight is not None:
                dims = rotated.shape[1:] if len(weight) > heads.shape[2] else rotated.shape[2:]
                rotated = F.rms_norm(rotated, dims, weight.double().view(dims), eps)
            if cos is not None and sin is not None:
                c, s = cos.double()[:, None], sin.double()[:, None]
                first, second = rotated[..., :half], rotated[..., half:]
                rotated = torch.cat([first * c - second * s, second * c + first * s], dim=-1)
            part.copy_(rotated)
        if keys is None or values is None or slots is None:
            return
        if value_eps is not None:
            value.copy_(F.rms_norm(value.double(), value.shape[2:], None, value_eps))
        keys[slots // keys.shape[1], slots % keys.shape[1]] = key.to(keys.dtype)
        values[slots // keys.shape[1], slots % keys.shape[1]] = value.to(values.dtype)

    def _obstacle(self, *inputs: Any) -> str:
        heads, cos, sin, query_weight, key_weight, _, slots, keys, values = inputs[:9]
        if slots is None:
            return self._queries_obstacle(*inputs[:5], keys, values)
        dtype, pool_dtype, shape, pool = heads.dtype, keys.dtype, heads.shape, keys.shape
        if dtype not in DTYPES or pool_dtype not in DTYPES or values.dtype is not pool_dtype:
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
        reason = _wrong_angles(cos, sin, rows, dim, dtype)
        if query_weight is not None or key_weight is not None:
            reason = reason or _wrong_weights(query_weight, key_weight, heads, pool[2])
        optional = (cos, sin, query_weight, key_weight)
        tensors = (heads, slots, keys, values, *(t for t in optional if t is not None))
        return reason or self._device_obstacle(*tensors)

    def _queries_obstacle(
        self, heads: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None,
        query_weight: torch.Tensor | None, key_weight: torch.Tensor | None, *pools: torch.Tensor | None,
    ) -> str:  # fmt: skip
        """Why the kernel cannot take these queries alone; empty if it can."""
        if any(tensor is not None for tensor in (key_weight, *pools)):
            return "pools or the weight of keys without slots"
        if heads.dtype not in DTYPES or heads.ndim != 3 or not heads.shape[1] or not heads.shape[2]:
            return f"no query heads: {heads.dtype} {list(heads.shape)}"
        rows, num_heads, dim = heads.shape
        if heads.stride()[1:] != (dim, 1) or heads.stride(0) < num_heads * dim:
            return "the heads of a row must be contiguous, and rows must not overlap"
        reason = _wrong_angles(cos, sin, rows, dim, heads.dtype)
        if query_weight is not None:
            reason = reason or _wrong_weights(query_weight, None, heads, 0)
        given = (heads, *(t for t in (cos, sin, query_weight) if t is not None))
        return reason or self._device_obstacle(*given)


def _wrong_weights(
    query: torch.Tensor | None, key: torch.Tensor | None, heads: torch.Tensor, kv_heads: int
) -> str:
    dim = heads.shape[2]
    sizes = [None if weight is None else weight.numel() for weight in (query, key)]
    of_one_head = all(size in (None, dim) for size in sizes)
    if not of_one_head and sizes != [(heads.shape[1] - 2 * kv_heads) * dim, kv_heads * dim]:
        return f"weights of norms are {dim} values, or those of all heads, or None"
    for weight in (query, key):
        if weight is not None and (weight.dtype is not heads.dtype or not weight.is_contiguous()):
            return f"weights of norms are contiguous values of {heads.dtype}"
    return ""


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
    return ""


class SiluAndMul(GlueKernel):
    """The gated activation silu(gate) x up. The input is [T, 2 n], each row gate and up; the result is [T,
    n].
    """

    name = "silu_and_mul"

    def reference(self, wide: torch.Tensor) -> torch.Tensor:
        gate, up = wide.chunk(2, dim=-1)
        return F.silu(gate) * up

    def _obstacle(self, wide: torch.Tensor) -> str:
        return _wrong_gates(wide) or self._device_obstacle(wide)


def _wrong_gates(wide: torch.Tensor) -> str:
    if wide.dtype not in DTYPES:
        return f"no kernel for {wide.dtype}"
    if wide.ndim != 2 or wide.shape[1] % 2:
        return f"{list(wide.shape)} are no rows of gate and up"
    return ""


class ClampedSwiglu(GlueKernel):
    """The gated activation of gpt-oss (OpenAI 2025, arXiv:2508.10925). Shapes as of `SiluAndMul`.

    With the gate at most `limit` and up within +-`limit`, it is gate x sigmoid(`alpha` x gate) x (up + 1).
    """

    name = "clamped_swiglu"

    def reference(self, wide: torch.Tensor, limit: float, alpha: float) -> torch.Tensor:
        gate, up = wide.chunk(2, dim=-1)
        gate = gate.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1) * gate * (gate * alpha).sigmoid()

    def _obstacle(self, wide: torch.Tensor, limit: float, alpha: float) -> str:
        if not 0 < limit < math.inf or not math.isfinite(alpha):
            return f"limit {limit} and alpha {alpha} must be finite, the limit positive"
        return _wrong_gates(wide) or self._device_obstacle(wide)


class GeluAndMul(SiluAndMul):
    """The gated activation gelu(gate) x up, by the approximation with tanh. Shapes as of `SiluAndMul`."""

    name = "gelu_and_mul"

    def reference(self, wide: torch.Tensor) -> torch.Tensor:
        gate, up = wide.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up
