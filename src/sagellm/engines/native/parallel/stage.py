"""`StageModel`: the layers of one rank of a pipeline.

The residual stream goes from rank to rank. What the head reads goes from the last rank to the first, which
has embedding and head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from sagellm.core.protocols.fusion import KernelSet
from sagellm.core.types import KVGroup
from sagellm.engines.native.kv_cache import PagedKV
from sagellm.engines.native.loading import ModelWeights
from sagellm.engines.native.model import DecoderModel, StepInputs, Stream
from sagellm.engines.native.model_spec import ModelSpec

if TYPE_CHECKING:
    from sagellm.engines.native.parallel.ranks import Ranks


class StageModel(DecoderModel):
    """The layers of this rank. On all ranks but the first `hidden` returns what this rank has sent on."""

    def __init__(
        self, spec: ModelSpec, weights: ModelWeights, dtype: torch.dtype, device: torch.device,
        kernels: KernelSet, groups: Sequence[KVGroup], stages: Ranks,
    ) -> None:  # fmt: skip
        super().__init__(spec, weights, dtype, device, kernels, groups)
        self._stages = stages

    def hidden(self, step: StepInputs, kv: PagedKV) -> torch.Tensor:
        rank, last = self._stages.split.rank, self._stages.split.pipeline - 1
        if rank == last:
            normed = self._normed(self._through_layers(self._received(step), step, kv))
            self._stages.send(normed.contiguous(), 0)
            return normed
        x = self._summed(self._through_layers(self._received(step), replace(step, sampled=None), kv))
        self._stages.send(x, rank + 1)
        if rank > 0:
            return x
        num_rows = len(x) if step.sampled is None else len(step.sampled)
        return self._stages.receive(x.new_empty(num_rows, self.spec.embed_dim), last)

    def _summed(self, stream: Stream) -> torch.Tensor:
        """The stream with all that was to be added.

        The kernel adds nothing that it does not norm.
        """
        x, delta, out_norm = stream
        if delta is not None and out_norm is None:
            return x.add_(delta).contiguous()
        return self._add_norm(stream, None).contiguous()

    def head(self, hidden: torch.Tensor, output: torch.Tensor | None = None) -> torch.Tensor:
        """Only the first rank has a head; elsewhere the result is empty."""
        if self._stages.is_first:
            return super().head(hidden, output)
        return hidden.new_empty(0, self.spec.vocab_size)

    def _received(self, step: StepInputs) -> torch.Tensor:
        """The stream [T, hidden] in front of this rank's layers."""
        rank = self._stages.split.rank
        if rank == 0:
            return self._embedded(step)
        empty = torch.empty(
            len(step.tokens), self.spec.hidden_size, dtype=self._dtype, device=step.tokens.device
        )
        return self._stages.receive(empty, rank - 1)
