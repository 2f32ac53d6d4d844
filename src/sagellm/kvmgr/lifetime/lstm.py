"""Length prediction with a small LSTM over the last tokens, learning online from what ended."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from sagellm.core.protocols.lifetime import Prediction, PredictionRequest
from sagellm.kvmgr.lifetime._pace import Pace

QUANTILES = (0.1, 0.5, 0.9)
NUM_BUCKETS = 256
WIDTH = 16


class _Net(nn.Module):
    """Hashed tokens -> LSTM -> the three quantiles of log(1 + remaining tokens)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_BUCKETS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH + 2, len(QUANTILES))

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """`tokens` [1, n] bucket ids, `lengths` [1, 2] -> [1, 3]."""
        _, (hidden, _) = self.lstm(self.embed(tokens))
        out: torch.Tensor = self.head(torch.cat((hidden[-1], lengths), dim=-1))
        return out


class LSTMLifetimePredictor:
    """Quantile (pinball) regression, one step of Adam per sequence that ends.

    Looks at the last `window` tokens and at current and maximal length. Abstains until `warmup` sequences
    have ended. Seeded; runs on one CPU thread's worth of work. `max_open` bounds what is remembered of open
    sequences.
    """

    def __init__(self, window: int = 32, warmup: int = 32, seed: int = 0, max_open: int = 65536) -> None:
        self._window, self._warmup, self._max_open = window, warmup, max_open
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._net = _Net()
        self._optimizer = torch.optim.Adam(self._net.parameters(), lr=3e-3)
        self._open: dict[str, tuple[torch.Tensor, torch.Tensor, int]] = {}
        self._num_seen = 0
        self._pace = Pace()

    def predict(self, request: PredictionRequest) -> Prediction:
        tokens, lengths = self._features(request)
        if request.sequence_id not in self._open and len(self._open) >= self._max_open:
            del self._open[next(iter(self._open))]
        self._open[request.sequence_id] = (tokens, lengths, request.current_length)
        with torch.inference_mode():
            logs = self._net(tokens, lengths)[0].sort().values
        room = max(0, request.max_length - request.current_length)
        remaining = [min(float(room), max(0.0, value)) for value in logs.expm1().tolist()]
        quantiles = dict(zip(QUANTILES, remaining, strict=True))
        median = quantiles[0.5]
        confidence = 1 / (1 + (remaining[-1] - remaining[0]) / max(1.0, median))
        abstained = self._num_seen < self._warmup
        seconds = median * self._pace.seconds_per_token
        return Prediction(median, seconds, 0.0 if abstained else confidence, quantiles, abstained)

    def update(self, sequence_id: str, actual_length: int, actual_time: float) -> None:
        known = self._open.pop(sequence_id, None)
        if known is None:
            return
        tokens, lengths, length_then = known
        remaining = max(0, actual_length - length_then)
        self._pace.observe(remaining, actual_time)
        target = torch.tensor(float(remaining)).log1p()
        loss = _pinball(self._net(tokens, lengths)[0], target)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._num_seen += 1

    def _features(self, request: PredictionRequest) -> tuple[torch.Tensor, torch.Tensor]:
        recent: Sequence[int] = list(request.token_ids[-self._window :]) or [0]
        tokens = torch.tensor([[token % NUM_BUCKETS for token in recent]])
        lengths = torch.tensor([[float(request.current_length), float(request.max_length)]]).log1p() / 10
        return tokens, lengths


def _pinball(predicted: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Koenker and Bassett's quantile loss, summed over `QUANTILES`."""
    error = target - predicted
    levels = torch.tensor(QUANTILES)
    return torch.maximum(levels * error, (levels - 1) * error).sum()


PLUGIN = LSTMLifetimePredictor
