"""Drawing tokens on a GPU without sorting the vocabulary, one launch for all rows of a step."""

from __future__ import annotations

from typing import Any

import torch

from sagellm.accel.fusion.triton._launch import device_obstacle, refuse
from sagellm.accel.fusion.triton.draw_kernels import draw_kernel
from sagellm.core.protocols.fusion import KernelSupport, Tolerance

TILE = 4096
PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "uniform")


class TritonDraw:
    """Implements `FusedKernel`. Inputs: `logits` float32 [S, vocab] with contiguous rows; `params` float64
    [S, 5], of each row temperature (above 0), top_k (0: all), top_p, min_p and a uniform number in [0, 1).

    The result, int64 [S], is the inverse distribution function at that number over ids in ascending order,
    after top_k, top_p of what it leaves, and min_p; equal logits give way from the larger id on. So the same
    number gives the same token as the twin, unless it lies within the rounding of float32 weights (relative
    1e-6) of where a token begins. The result of a row whose logits are not numbers is undefined.
    """

    name = "draw"
    tolerances: tuple[Tolerance, ...] = (Tolerance("float32", 0.0, 0.0),)

    def supports(self, *inputs: Any) -> KernelSupport:
        reason = _obstacle(*inputs)
        return KernelSupport(not reason, reason)

    def apply(self, logits: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
        """Raises `KernelError` where `supports` says no."""
        refuse(_obstacle(logits, params))
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        if len(logits):
            draw_kernel[(len(logits),)](
                logits, params, tokens, logits.stride(0), logits.shape[1], TILE=TILE, num_warps=8
            )
        return tokens

    def reference(self, *inputs: Any) -> torch.Tensor:
        return draw(*inputs)


def _obstacle(logits: torch.Tensor, params: torch.Tensor) -> str:
    if logits.dtype != torch.float32 or logits.ndim != 2 or logits.stride(1) != 1 or not logits.shape[1]:
        return f"logits are float32 [S, vocab] with contiguous rows, not {logits.dtype} {list(logits.shape)}"
    wanted = (len(logits), len(PARAMETERS))
    if params.dtype != torch.float64 or params.shape != wanted or not params.is_contiguous():
        return f"params are contiguous float64 {list(wanted)}, not {params.dtype} {list(params.shape)}"
    return device_obstacle(logits, params)


def draw(logits: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
    """Slow twin of `TritonDraw`: whole rows sorted, in float64."""
    temperature, top_k, top_p, min_p, uniform = params[:, :, None].unbind(1)
    scores = logits.double()
    scores = (scores - scores.amax(-1, keepdim=True)) / temperature
    ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[1], device=scores.device)
    ordered.masked_fill_((top_k > 0) & (rank >= top_k), -torch.inf)
    mass = ordered.softmax(-1)
    cut = (mass.cumsum(-1) - mass >= top_p) & (top_p < 1.0)
    cut[:, 0] = False
    kept = ordered.masked_fill_(cut | (ordered < min_p.log()), -torch.inf)
    cumulative = torch.empty_like(scores).scatter_(-1, ids, kept).exp_().cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    last = torch.searchsorted(cumulative, total)
    return torch.minimum(torch.searchsorted(cumulative, uniform * total, right=True), last)[:, 0]
