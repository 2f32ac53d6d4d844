"""Length prediction with a small Transformer over the last tokens, learning online."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from sagellm.kvmgr.lifetime._neural import NUM_BUCKETS, NeuralLifetimePredictor
from sagellm.kvmgr.lifetime.lstm import QuantileHead, TorchNetwork, last_and_sum

WIDTH, NUM_HEADS, NUM_BLOCKS = 32, 2, 1
LEARNING_RATE = 2e-3
UNSEEN = -1e9


class _Block(nn.Module):
    """Bidirectional attention and a network per token, each after a norm.

    Xiong et al. 2020."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_network = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.merge = nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Map `x` [b, n, width] to the same shape.

        `mask` [b, 1, 1, n] is added to the scores."""
        b, n, _ = x.shape
        heads = self.project(self.before_attention(x)).view(b, n, 3, NUM_HEADS, WIDTH // NUM_HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind()
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.merge(seen.transpose(1, 2).reshape(b, n, WIDTH))
        corrections: torch.Tensor = x + self.narrow(torch.relu(self.widen(self.before_network(x))))
        return corrections


class TransformerNet(nn.Module):
    """Tokens with learned positions counted from the prompt's end.

    Reads the last state, and the sum of all states, which can count."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_BUCKETS, WIDTH, padding_idx=0)
        self.place = nn.Embedding(window, WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(NUM_BLOCKS))
        self.head = QuantileHead(2 * WIDTH)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Corrections [b, quantiles] for a batch.

        `tokens` [b, n] buckets, padded with 0 at the end; `lengths` [b]; `numbers` [b, f]."""
        b, n = tokens.shape
        from_end = lengths[:, None] - 1 - torch.arange(n)
        x = self.embed(tokens) + self.place(from_end.clamp(min=0))
        mask = None if b == 1 else torch.where((from_end >= 0).view(b, 1, 1, n), 0.0, UNSEEN)
        for block in self.blocks:
            x = block(x, mask)
        corrections: torch.Tensor = self.head(last_and_sum(x, lengths), numbers)
        return corrections


class TransformerLifetimePredictor(NeuralLifetimePredictor):
    """Corrects the statistical predictor with a Transformer over the prompt's last tokens.

    One block (Vaswani et al. 2017), `window` tokens. Uses one CPU thread."""

    def _make_network(self, window: int, seed: int) -> TorchNetwork:
        return TorchNetwork(lambda: TransformerNet(window), seed, LEARNING_RATE)


PLUGIN = TransformerLifetimePredictor
