"""`AttentionModel`: a model whose MLPs and experts are on other ranks.

In each layer the hidden states go to the FFN ranks and come back. Of two micro-batches one attends while the
other one's MLP is computed (MegaScale-Infer: Zhu et al. 2025, arXiv:2504.02263; Step-3: Wang et al. 2025,
arXiv:2507.19427).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from sagellm.core.plan import ExecutionPlan
from sagellm.core.protocols.collectives import Work
from sagellm.core.protocols.fusion import KernelSet
from sagellm.core.protocols.fusion import Work as Action
from sagellm.core.types import KVGroup
from sagellm.engines.native.kv_cache import PagedKV
from sagellm.engines.native.loading import ModelWeights
from sagellm.engines.native.model import DecoderModel, StepInputs
from sagellm.engines.native.model_spec import ModelSpec
from sagellm.engines.native.parallel.tensor_ranks import at_once

if TYPE_CHECKING:
    from sagellm.engines.native.parallel.ranks import Ranks

ALL_ROWS = -1
"""In place of a number of sampled rows: all of them, of a decode step that may be recorded."""


class AttentionModel(DecoderModel):
    """The part of the first rank."""

    def __init__(
        self, spec: ModelSpec, weights: ModelWeights, dtype: torch.dtype, device: torch.device,
        kernels: KernelSet, groups: Sequence[KVGroup], ranks: Ranks,
    ) -> None:  # fmt: skip
        super().__init__(spec, weights, dtype, device, kernels, groups)
        self._ffn = FfnLink(ranks, kernels.between or at_once, sends_stream=spec.has_experts_beside)

    def hidden(self, step: StepInputs, kv: PagedKV) -> torch.Tensor:
        return self.hidden_of([step], kv)

    def hidden_of(self, steps: Sequence[StepInputs], kv: PagedKV) -> torch.Tensor:
        """The head's input for the sampled rows of micro-batches, which take turns.

        Those of one batch follow those of another.
        """
        self._ffn.begin(steps)
        batches = [self._batch(self._embedded(step), step, kv) for step in steps]
        deltas: dict[int, torch.Tensor] = {}
        for i in range(len(self._layers) + 1):
            for number, batch in enumerate(batches):
                if i > 0:
                    self._ffn.receive()
                    self._add(i - 1, batch, deltas[number])
                if i < len(self._layers):
                    deltas[number] = self._ffn.send(self._attended(i, batch), batch.stream[0])
        hidden = [self._normed(batch.stream) for batch in batches]
        return hidden[0] if len(hidden) == 1 else torch.cat(hidden)


class _Exchange(NamedTuple):
    """What is under way to the FFN ranks and back. Each of them gives a part of `delta`."""

    works: list[Work]
    parts: torch.Tensor
    delta: torch.Tensor


class FfnLink:
    """The FFN ranks, as the first rank sees them. They answer in the order of `send`.

    `between` does work that lies between kernels, so that a recorded step repeats it. With `sends_stream`
    the FFN ranks get the residual stream, too.
    """

    def __init__(self, ranks: Ranks, between: Callable[[Action], object], *, sends_stream: bool) -> None:
        self._ranks, self._between, self._sends_stream = ranks, between, sends_stream
        self._under_way: deque[_Exchange] = deque()

    def begin(self, steps: Sequence[StepInputs]) -> None:
        """Announce a step, of these micro-batches."""
        sizes = array("q")
        for step in steps:
            sizes.append(len(step.tokens))
            sizes.append(ALL_ROWS if step.sampled is None else len(step.sampled))
        self._between(partial(self._ranks.announce, sizes.tobytes()))

    def send(self, seen: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Send the input of an MLP, which is the norm of the stream `x`.

        The result has the output once `receive` has returned.
        """
        delta = seen.new_empty(seen.shape)
        inputs = (seen, x) if self._sends_stream else (seen,)
        self._between(partial(self._submit, inputs, delta))
        return delta

    def receive(self) -> None:
        """Wait for the output of what was sent first."""
        self._between(self._wait)

    def _submit(self, inputs: Sequence[torch.Tensor], delta: torch.Tensor) -> None:
        ffn_ranks = range(1, self._ranks.split.num_ranks)
        with torch.inference_mode():  # a recorded step is replayed outside of it
            parts = delta[None] if len(ffn_ranks) == 1 else delta.new_empty(len(ffn_ranks), *delta.shape)
            works: list[Work] = []
            if len(delta):  # in the last layer there may be none
                for rank in ffn_ranks:
                    works += self._ranks.exchange(inputs, parts[rank - 1], rank)
        self._under_way.append(_Exchange(works, parts, delta))

    def _wait(self) -> None:
        works, parts, delta = self._under_way.popleft()
        with torch.inference_mode():
            self._ranks.finish(works)
            if len(parts) > 1:  # in order of rank, so that the bits are the same in any batch
                delta.copy_(parts[0])
                for part in parts[1:]:
                    delta.add_(part)


def micro_batches(plan: ExecutionPlan, fewest: int) -> list[ExecutionPlan]:
    """Two parts of a plan with at least `fewest` tokens, or the plan alone.

    They have its rows, in its order. A chunk or a chain is not cut.
    """
    longer = {row: len(token_ids) for row, token_ids in plan.proposed.items()}
    sizes = [1 + longer.get(row, 0) for row in plan.decode_rows] + [op.num_tokens for op in plan.prefills]
    total, best, count, before = sum(sizes), 0, 0, 0
    for i, size in enumerate(sizes):
        if min(before, total - before) > best:
            best, count = min(before, total - before), i
        before += size
    if best < max(1, fewest):
        return [plan]
    num_rows, num_chunks = min(count, len(plan.decode_rows)), max(0, count - len(plan.decode_rows))
    parts = []
    for rows, chunks in (
        (slice(num_rows), slice(num_chunks)),
        (slice(num_rows, None), slice(num_chunks, None)),
    ):
        own = plan.decode_rows[rows]
        chains = tuple(chain for chain in plan.chains if chain.row in own)
        parts.append(
            replace(
                plan, decode_rows=own, decode_positions=plan.decode_positions[rows],
                prefills=plan.prefills[chunks], chains=chains,
            )
        )  # fmt: skip
    return parts
