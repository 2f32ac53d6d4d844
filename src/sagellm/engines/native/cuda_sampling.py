"""Drawing the tokens of a step by one kernel, whose parameters go to the device in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sagellm.core.protocols.fusion import FusedKernel
from sagellm.engines.native.host_copies import moved
from sagellm.engines.native.sampler import RowSampler, uniform


class KernelDraw:
    """`Draw` of the sampler by `kernel`."""

    def __init__(self, kernel: FusedKernel) -> None:
        self._kernel = kernel

    def __call__(self, logits: torch.Tensor, rows: Sequence[RowSampler]) -> torch.Tensor:
        params = torch.tensor([_parameters(row) for row in rows], dtype=torch.float64)
        tokens: torch.Tensor = self._kernel.apply(logits, moved(params, logits.device))
        return tokens


def _parameters(row: RowSampler) -> tuple[float, ...]:
    params = row.params
    number = uniform(row.seed, row.num_outputs)
    return params.temperature, max(0, params.top_k), params.top_p, params.min_p, number
