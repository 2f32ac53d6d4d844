"""`SyntheticDraws`: made-up tokens in the place of drawn ones.

For benchmarks: `speculative.method: synthetic`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sagellm.accel.speculative.synthetic import synthetic_token
from sagellm.engines.native.sampler import NO_TOKEN, Draw, RowSampler, SampledTokens, sample


@dataclass(frozen=True, slots=True)
class SyntheticDraws:
    """Called as `sample`, and does all its work. Log-probabilities are of the tokens that the model drew."""

    vocab_size: int

    def __call__(
        self, logits: torch.Tensor, rows: Sequence[RowSampler], by_kernel: Draw | None = None
    ) -> SampledTokens:
        drawn = sample(logits, rows, by_kernel)
        for place, row in enumerate(rows):
            if drawn.token_ids[place] != NO_TOKEN:
                drawn.token_ids[place] = synthetic_token(row.seed, row.num_outputs, self.vocab_size)
        return drawn
