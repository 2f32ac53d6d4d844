"""What a decoder does between its matrices in plain torch: the slow twins of the kernels of `cpu` and of
`triton`, and how far those may be from them. The inputs are those of `KernelSet`.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from sagellm.core.protocols.fusion import Tolerance

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
