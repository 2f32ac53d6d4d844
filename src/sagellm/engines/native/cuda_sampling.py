"""Drawing the tokens of a step by one kernel, whose parameters go to the device in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sagellm.core.protocols.fusion import FusedKernel
from sagellm.core.types import SamplingParams
from sagellm.engines.native.host_copies import moved


class KernelDraw:
    """`Draw` of the sampler by `kernel`."""

    def __init__(self, kernel: FusedKernel) -> None:
        self._kernel = kernel

    def __call__(
        self, logits: torch.Tensor, best: torch.Tensor, params: Sequence[SamplingParams],
        points: Sequence[float],
    ) -> torch.Tensor:  # fmt: skip
        rows = [
            (row.temperature, max(0, row.top_k), row.top_p, row.min_p, point)
            for row, point in zip(params, points, strict=True)
        ]
        table = torch.tensor(rows, dtype=torch.float64)
        tokens: torch.Tensor = self._kernel.apply(logits, moved(table, logits.device))
        return tokens
