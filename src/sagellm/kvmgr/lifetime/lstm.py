"""Length prediction with a small LSTM over the last tokens, learning online."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import nn

from sagellm.kvmgr.lifetime._neural import (
    NUM_BUCKETS,
    NUM_NUMBERS,
    NUM_OUTPUTS,
    Example,
    NeuralLifetimePredictor,
)
from sagellm.kvmgr.lifetime._quantiles import LEVELS

EMBEDDING_WIDTH, WIDTH = 32, 48
HEAD_WIDTH = 64
LEARNING_RATE = 3e-3
MAX_GRADIENT = 1.0
AVERAGING = 0.995
"""Weight of the past in the average of the weights that answers: about the last 200 steps."""


class QuantileHead(nn.Module):
    """What an encoder saw, and the numbers -> what to add to each quantile. Adds nothing at first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(width + NUM_NUMBERS, HEAD_WIDTH)
        self.output = nn.Linear(HEAD_WIDTH, NUM_OUTPUTS)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, seen: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        corrections: torch.Tensor = self.output(torch.relu(self.hidden(torch.cat((seen, numbers), dim=-1))))
        return corrections


def last_and_sum(states: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The last state and the sum of `states`, as [b, 2 width].

    `states` is [b, n, width]; `lengths` [b] says how many of the n are real."""
    if len(states) == 1:
        return torch.cat((states[:, -1], states.sum(dim=1) / 16), dim=-1)
    real = (torch.arange(states.shape[1]) < lengths[:, None])[..., None]
    last = states[torch.arange(len(lengths)), lengths - 1]
    return torch.cat((last, (states * real).sum(dim=1) / 16), dim=-1)


class LSTMNet(nn.Module):
    """The last hidden state, and the sum of all, which can count."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_BUCKETS, EMBEDDING_WIDTH, padding_idx=0)
        self.lstm = nn.LSTM(EMBEDDING_WIDTH, WIDTH, batch_first=True)
        self.head = QuantileHead(2 * WIDTH)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Corrections [b, quantiles] for a batch.

        `tokens` [b, n] buckets, padded with 0 at the end; `lengths` [b]; `numbers` [b, f]."""
        states, _ = self.lstm(self.embed(tokens))
        corrections: torch.Tensor = self.head(last_and_sum(states, lengths), numbers)
        return corrections


class TorchNetwork:
    """Trains a module by quantile regression: Koenker and Bassett's (1978) loss, Adam, gradients clipped.

    A running average of its weights answers (Polyak and Juditsky 1992), since single steps online are noisy.
    Seeded apart from everything else in the process; touches no setting of torch.
    """

    def __init__(self, make: Callable[[], nn.Module], seed: int, learning_rate: float) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._net = make()
        self._averaged = copy.deepcopy(self._net)
        self._num_steps = 0
        self._optimizer = torch.optim.Adam(self._net.parameters(), lr=learning_rate)
        self._levels = torch.tensor(LEVELS)

    def infer(self, example: Example) -> list[float]:
        with torch.inference_mode():
            added: list[float] = _forward(self._averaged, [example])[0].tolist()
        return [before + more for before, more in zip(example.base, added, strict=True)]

    def learn(self, batch: Sequence[Example]) -> None:
        wanted = torch.tensor([[example.target - value for value in example.base] for example in batch])
        error = wanted - _forward(self._net, batch)
        loss = torch.maximum(self._levels * error, (self._levels - 1) * error).sum(dim=-1).mean()
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._net.parameters(), MAX_GRADIENT)
        self._optimizer.step()
        self._average()

    def _average(self) -> None:
        self._num_steps += 1
        past = min(AVERAGING, self._num_steps / (self._num_steps + 10))
        with torch.no_grad():
            for average, weight in zip(self._averaged.parameters(), self._net.parameters(), strict=True):
                average.lerp_(weight, 1 - past)


def _forward(net: nn.Module, batch: Sequence[Example]) -> torch.Tensor:
    """[b, quantiles]: what to add to each example's `base`."""
    lengths = [len(example.tokens) for example in batch]
    longest = max(lengths)
    tokens = [example.tokens + [0] * (longest - len(example.tokens)) for example in batch]
    numbers = [example.numbers for example in batch]
    corrections: torch.Tensor = net(torch.tensor(tokens), torch.tensor(lengths), torch.tensor(numbers))
    return corrections


class LSTMLifetimePredictor(NeuralLifetimePredictor):
    """Corrects the statistical predictor with an LSTM over the prompt's last tokens.

    Hochreiter and Schmidhuber 1997; `window` tokens. Uses one CPU thread."""

    def _make_network(self, window: int, seed: int) -> TorchNetwork:
        return TorchNetwork(LSTMNet, seed, LEARNING_RATE)


PLUGIN = LSTMLifetimePredictor
