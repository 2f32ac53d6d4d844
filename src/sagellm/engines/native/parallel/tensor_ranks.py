"""`TensorRanks`: sums and logits over the ranks that share each layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from sagellm.core.protocols.fusion import KernelSet, Matrix, Work

if TYPE_CHECKING:
    from sagellm.engines.native.parallel.ranks import Ranks


class TensorRanks:
    """What a divided layer does with the other ranks, between the kernels."""

    def __init__(self, ranks: Ranks, kernels: KernelSet, vocab_size: int) -> None:
        self._ranks, self._vocab_size = ranks, vocab_size
        self._between: Callable[[Work], object] = kernels.between or at_once

    def summed(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' parts."""
        whole = part.contiguous()
        self._between(partial(self._ranks.sum, whole))
        return whole

    def logits(self, head: Matrix, hidden: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Logits [S, vocab] in `output`, by the `head` of each rank."""
        own = head.multiply(hidden, None, output.new_empty(len(hidden), head.shape[0]))
        self._between(partial(self._gather, own, output))
        return output

    def _gather(self, own: torch.Tensor, output: torch.Tensor) -> None:
        first, stop = self._ranks.split.with_rank(0).vocabulary(self._vocab_size)
        part = own
        if own.shape[1] < stop - first:  # the last rank has fewer
            part = own.new_zeros(len(own), stop - first)
            part[:, : own.shape[1]] = own
        whole = self._ranks.gather(part.contiguous()).transpose(0, 1).flatten(1)
        output.copy_(whole[:, : self._vocab_size])


def at_once(work: Work) -> None:
    """Do work that no recording repeats."""
    work()
