"""`FfnRank`: computes MLPs and experts, or a part of them, for another rank.

It knows no requests and no KV. A step is announced by the numbers of rows of its micro-batches; then their
hidden states come and go, layer by layer.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from sagellm.core.errors import UnsupportedModelError
from sagellm.core.protocols.fusion import KernelSource, Work
from sagellm.core.protocols.quantization import FormatSource, WeightQuantizer
from sagellm.engines.native.backend import choose, memory_errors
from sagellm.engines.native.feed_forward import FeedForward, FeedForwardCompute
from sagellm.engines.native.loading import CheckedModel
from sagellm.engines.native.model_spec import ModelSpec
from sagellm.engines.native.parallel.attention_model import ALL_ROWS
from sagellm.engines.native.parallel.ranks import Ranks
from sagellm.engines.native.parallel.tensor_ranks import at_once
from sagellm.engines.native.usable_kernels import usable_glue


class FfnRank:
    """Holds weights from its start on, and nothing else between steps. Options as of `NativeBackend`.

    With `records` decode steps of few rows are recorded when they first come, as those of the first rank are.
    """

    def __init__(
        self, model: str | Path, *, ranks: Ranks, device: str = "cpu", dtype: str = "auto",
        compute_dtype: str = "auto", max_model_len: int | None = None, threads: int | None = None,
        kernels: KernelSource | None = None, quantizer: WeightQuantizer | None = None,
        formats: FormatSource | None = None, implementation: str = "auto", records: bool = False,
    ) -> None:  # fmt: skip
        self._ranks = ranks
        source = CheckedModel.of(
            model, device, max_model_len, quantizer, formats, implementation, ranks.split
        )
        spec = source.spec
        if not isinstance(spec, ModelSpec):
            raise UnsupportedModelError("a model that runs through transformers cannot be divided")
        self._spec, self._device = spec, source.device
        with memory_errors(self._device):
            _, kernel_set, _, loader = choose(source, threads, kernels, None, dtype, compute_dtype, ranks)
            weights = loader.weights(source.plan)
            self._dtype = loader.compute_dtype
            self._layers = [
                FeedForward.of(spec, weights, self._device, None, i) for i in range(spec.num_layers)
            ]
        source.checkpoint.close()
        ranks.barrier()
        if loader.linear is not None:
            torch.set_num_threads(1)
        self._compute = FeedForwardCompute(
            spec, usable_glue(kernel_set, spec, self._dtype, self._device), self._dtype
        )
        self._between = kernel_set.between or at_once
        self._record = kernel_set.record if records and loader.linear is not None else None
        self._replays: dict[int, Work | None] = {}

    @torch.inference_mode()
    def follow(self, message: bytes) -> None:
        """Compute the step of a message of `FfnLink.begin`. Raises what ends this rank."""
        sizes = array("q")
        sizes.frombytes(message)
        with memory_errors(self._device):
            if sizes[1] == ALL_ROWS:
                self._repeat(sizes[0])
            else:
                self._through_layers(list(zip(sizes[::2], sizes[1::2], strict=True)))

    def _repeat(self, num_rows: int) -> None:
        """Compute a decode step of so many rows. Its kernels are recorded when it first comes."""
        replay, work = self._replays.get(num_rows), partial(self._through_layers, [(num_rows, num_rows)])
        if replay is not None:
            replay()
        elif self._record is None or num_rows in self._replays:
            work()
        else:
            self._replays[num_rows] = self._record(work)

    def _through_layers(self, batches: Sequence[tuple[int, int]]) -> None:
        """Answer for each layer and micro-batch, of (rows, sampled rows)."""
        last = len(self._layers) - 1
        for i, layer in enumerate(self._layers):
            for num_rows, num_sampled in batches:
                if rows := num_sampled if i == last else num_rows:
                    self._answer(layer, rows)

    def _answer(self, layer: FeedForward, num_rows: int) -> None:
        seen = self._received(num_rows)
        x = self._received(num_rows) if self._spec.has_experts_beside else seen
        delta = self._compute(layer, seen, x).contiguous()
        self._between(partial(self._ranks.send, delta, 0))

    def _received(self, num_rows: int) -> torch.Tensor:
        buffer = torch.empty(num_rows, self._spec.hidden_size, dtype=self._dtype, device=self._device)
        self._between(partial(self._ranks.receive, buffer, 0))
        return buffer
