"""Shared parts of the neural length predictors: features, learning, and when they abstain.

A network corrects the statistical predictor: for each quantile it gives what to add to the logarithm of the
tables' answer. So it begins as good as they are, and only has to learn what they cannot see, above all the
prompt's content. While its recent answers are no better than the tables', theirs are given.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import expm1, log1p
from typing import Protocol

from sagellm.core.protocols.lifetime import Prediction, PredictionRequest
from sagellm.kvmgr.lifetime._quantiles import (
    LEVELS,
    Bounded,
    answer,
    pinball,
    prompt_length,
    room_of,
)
from sagellm.kvmgr.lifetime.statistical import StatisticalLifetimePredictor

NUM_BUCKETS = 1024
"""Token ids modulo `NUM_BUCKETS - 1`, plus 1; bucket 0 is padding."""
NUM_NUMBERS = 4 + len(LEVELS)
NUM_OUTPUTS = len(LEVELS)
LARGEST_LOG = 14.0
"""Over a million tokens: no correction makes a length overflow."""
FADE = 0.99
MEMORY, BATCH_SIZE = 8192, 32


@dataclass(frozen=True, slots=True)
class Example:
    """The features of a sequence at one moment, and the outcome.

    `tokens`: buckets of the prompt's end, at least one; `numbers`: `NUM_NUMBERS` figures around 0 to 2;
    `base`: the tables' log(1 + remaining tokens) by quantile; `target`: the same of the actual number."""

    tokens: list[int]
    numbers: list[float]
    base: list[float]
    target: float = 0.0


class Network(Protocol):
    """The learned part."""

    def infer(self, example: Example) -> list[float]:
        """log(1 + remaining tokens) at each of `LEVELS`, in any order."""
        ...

    def learn(self, batch: Sequence[Example]) -> None:
        """One step down the quantile loss."""
        ...


@dataclass(slots=True)
class _Look:
    """An open prediction: the features, and the answers of the tables and the network."""

    example: Example
    length: int
    of_tables: list[float]
    of_network: list[float]


class NeuralLifetimePredictor(ABC):
    """A network over the statistical predictor.

    A sequence that ends gives an example; `examples_per_step` of them make one step on `BATCH_SIZE` examples
    drawn from the last `MEMORY`, so an update costs a step at most. Abstains until `warmup` sequences have
    ended, and below `min_confidence`. `max_open` bounds what is remembered of open sequences.
    """

    def __init__(
        self,
        window: int = 64,
        warmup: int = 32,
        seed: int = 0,
        max_open: int = 65536,
        min_confidence: float = 0.1,
        examples_per_step: int = 2,
    ) -> None:
        self._network = self._make_network(window, seed)
        self._window, self._warmup, self._min_confidence = window, warmup, min_confidence
        self._per_step = examples_per_step
        self._tables = StatisticalLifetimePredictor(max_open=max_open)
        self._open: Bounded[str, _Look] = Bounded(max_open)
        self._random = random.Random(seed)
        self._examples: list[Example] = []
        self._num_seen = 0
        self._loss_of_tables = self._loss_of_network = 0.0

    @abstractmethod
    def _make_network(self, window: int, seed: int) -> Network:
        """The network for prompts of which the last `window` tokens are read."""

    def predict(self, request: PredictionRequest) -> Prediction:
        room = float(room_of(request))
        of_tables, _ = self._tables.remaining(request)
        example = self._example(request, of_tables)
        logs = sorted(min(LARGEST_LOG, max(0.0, value)) for value in self._network.infer(example))
        of_network = [min(room, expm1(value)) for value in logs]
        self._open[request.sequence_id] = _Look(example, request.current_length, of_tables, of_network)
        trusted = self._loss_of_network < self._loss_of_tables
        remaining = of_network if trusted else of_tables
        known = self._num_seen >= self._warmup
        return answer(remaining, self._tables.seconds_per_token, self._min_confidence, known=known)

    def update(self, sequence_id: str, actual_length: int, actual_time: float) -> None:
        self._tables.update(sequence_id, actual_length, actual_time)
        look = self._open.pop(sequence_id, None)
        if look is None:
            return
        remaining = max(0, actual_length - look.length)
        self._loss_of_tables = FADE * self._loss_of_tables + pinball(look.of_tables, remaining)
        self._loss_of_network = FADE * self._loss_of_network + pinball(look.of_network, remaining)
        self._keep(replace(look.example, target=log1p(remaining)))
        self._num_seen += 1
        if self._num_seen % self._per_step == 0:
            chosen = [self._random.randrange(len(self._examples)) for _ in range(BATCH_SIZE)]
            self._network.learn([self._examples[place] for place in chosen])

    def _keep(self, example: Example) -> None:
        if len(self._examples) < MEMORY:
            self._examples.append(example)
        else:
            self._examples[self._num_seen % MEMORY] = example

    def _example(self, request: PredictionRequest, of_tables: Sequence[float]) -> Example:
        prompt = prompt_length(request)
        base = [log1p(value) for value in of_tables]
        previous = self._tables.previous_output(request.session_id)
        numbers = [
            log1p(prompt) / 8,
            log1p(max(0, request.current_length - prompt)) / 8,
            0.0 if previous is None else log1p(previous) / 8,
            1.0 if previous is None else 0.0,
            *(value / 8 for value in base),
        ]
        recent = request.token_ids[-self._window :]
        tokens = [1 + token % (NUM_BUCKETS - 1) for token in recent] or [0]
        return Example(tokens, numbers, base)
