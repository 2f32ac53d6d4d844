"""`MedusaHead`: a residual block for each token ahead, on the model's last hidden state.

Block k imitates the model's logits k positions further on, through the model's own head. It reads no token,
so all are proposed in one pass, and there is no KV (Medusa: Cai et al. 2024, arXiv:2401.10774).
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from sagellm.engines.native.loading import ModelWeights


class MedusaHead:
    """The `count` blocks among a model's `weights`."""

    def __init__(self, weights: ModelWeights) -> None:
        self._blocks, self._bias = weights.matrices["medusa"], weights.tensors["medusa.bias"]
        outputs, self.hidden_size = self._blocks.shape
        self.count = outputs // self.hidden_size

    def hidden(self, last: torch.Tensor, count: int) -> torch.Tensor:
        """What the model's head reads for the next tokens.

        It is [rows * count, hidden], of each row `count` tokens. `last`: the model's last hidden state of
        each row [rows, hidden]. Call it in inference mode.
        """
        blocks = F.silu(self._blocks.multiply(last, self._bias)).view(len(last), self.count, -1)
        return (blocks[:, :count] + last.unsqueeze(1)).flatten(0, 1)
