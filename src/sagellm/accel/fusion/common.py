"""What the inputs of paged attention have to be for a kernel on a CPU as on a GPU."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from sagellm.core.protocols.fusion import Tolerance

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def obstacle(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None = None,
    spans: torch.Tensor | None = None, tables: torch.Tensor | None = None, window: int | None = None,
) -> str:  # fmt: skip
    """What stands in the way of any kernel; empty where nothing does. Devices are not looked at."""
    if values is None or spans is None or tables is None:
        return "paged attention takes query, keys, values, spans, tables and maybe a window"
    if query.dtype not in DTYPES or keys.dtype not in DTYPES or values.dtype != keys.dtype:
        return f"paged attention has no kernel for {query.dtype} over {keys.dtype} and {values.dtype}"
    if query.ndim != 3 or keys.ndim != 4 or values.shape != keys.shape or query.shape[2] != keys.shape[3]:
        return f"shapes {[list(t.shape) for t in (query, keys, values)]} are no query and pools"
    if not keys.shape[2] or query.shape[1] % keys.shape[2] or not keys.shape[1] or not keys.shape[3]:
        return (
            f"{query.shape[1]} heads of {keys.shape[3]} over blocks of {list(keys.shape[1:3])} make no groups"
        )
    if not keys.stride(3) == values.stride(3) == query.stride(2) == 1:
        return "the dims of a head are not contiguous"
    if spans.dtype != torch.int64 or spans.shape != (len(spans), 4) or not spans.is_contiguous():
        return f"spans are contiguous int64 [n, 4], not {spans.dtype} {list(spans.shape)}"
    if tables.dtype != torch.int32 or tables.ndim != 1 or not tables.is_contiguous():
        return f"tables are contiguous int32 [n], not {tables.dtype} {list(tables.shape)}"
    if window is not None and window < 1:
        return f"a window of {window} shows nothing: use at least 1, or None"
    return ""


TOLERANCES: tuple[Tolerance, ...] = (
    Tolerance("float32", 2e-5, 2e-5),
    Tolerance("bfloat16", 1.6e-2, 1.6e-2),
    Tolerance("float16", 2e-3, 2e-3),
)
"""For values of about unit size: torch rounds some results between its operators, a kernel rounds once."""


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """X [T, n] becomes x + delta; the RMSNorm of that, [T, n]."""
    if delta is not None:
        x.add_(delta)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def rope_to_cache(
    heads: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None,
    query_weight: torch.Tensor | None, key_weight: torch.Tensor | None, eps: float, slots: torch.Tensor,
    keys: torch.Tensor, values: torch.Tensor,
) -> None:  # fmt: skip
    """Queries and keys of `heads` [T, heads, dim], normed and rotated in place; keys and values at their
    slots in the pools. Computed in float64.
    """
    kv_heads, half = keys.shape[2], heads.shape[2] // 2
    query, key, value = torch.split(heads, [heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    for part, weight in ((query, query_weight), (key, key_weight)):
        turned = part.double()
        if weight is not None:
            turned = F.rms_norm(turned, turned.shape[-1:], weight.double(), eps)
        if cos is not None and sin is not None:
            c, s = cos.double()[:, None], sin.double()[:, None]
            first, second = turned[..., :half], turned[..., half:]
            turned = torch.cat([first * c - second * s, second * c + first * s], dim=-1)
        part.copy_(turned)
    keys[slots // keys.shape[1], slots % keys.shape[1]] = key.to(keys.dtype)
    values[slots // keys.shape[1], slots % keys.shape[1]] = value.to(values.dtype)


def silu_and_mul(wide: torch.Tensor) -> torch.Tensor:
    """silu(gate) x up, [T, n], of gate beside up, [T, 2 n]."""
    gate, up = wide.chunk(2, dim=-1)
    return F.silu(gate) * up
