"""Simulates an instance that generates and embeds, under a `SharedBudget`.

No engine computes embeddings yet. So this is a loop of its own over the cost model: steps of decoding rows,
chunks of prompts and chunks of texts. Requests of each service are served in order of arrival.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from sagellm.control_plane.shared_budget import ServiceDemand, SharedBudget
from sagellm.core.blocks import cdiv
from sagellm.core.errors import BookkeepingError, ConfigError
from sagellm.engines.simulator.cost_model import CostModel, StepShape

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class MixedRequest:
    """A prompt with its answer, or a text to embed (`num_answer` 0)."""

    arrival_s: float
    num_tokens: int
    num_answer: int = 0

    @property
    def is_text(self) -> bool:
        return self.num_answer == 0

    @property
    def num_blocks(self) -> int:
        return cdiv(self.num_tokens + self.num_answer, BLOCK_SIZE)


@dataclass(slots=True)
class MixedRun:
    """Seconds from arrival to the first token, per token after it, and from arrival to the embedding."""

    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    embedding_s: list[float] = field(default_factory=list)
    num_steps: int = 0
    end_s: float = 0.0


@dataclass(slots=True)
class _Running:
    request: MixedRequest
    num_computed: int = 0
    num_answered: int = 0
    first_token_s: float = 0.0

    @property
    def num_left(self) -> int:
        return self.request.num_tokens - self.num_computed


class MixedInstance:
    """One instance that serves both; `run` serves requests once, on an idle instance."""

    def __init__(self, cost: CostModel, budget: SharedBudget, *, max_num_seqs: int = 64) -> None:
        if budget.max_batched_tokens <= max_num_seqs:
            raise ConfigError("max_batched_tokens must exceed max_num_seqs: prompts need tokens of a step too")
        self._cost, self._budget, self._max_num_seqs = cost, budget, max_num_seqs
        self._now_s = 0.0
        self._waiting: dict[bool, deque[MixedRequest]] = {False: deque(), True: deque()}
        self._computing: dict[bool, deque[_Running]] = {False: deque(), True: deque()}
        self._decoding: list[_Running] = []
        self._held = {False: 0, True: 0}
        self.result = MixedRun()

    def run(self, requests: Sequence[MixedRequest]) -> MixedRun:
        """Raises `ConfigError` for a request that never fits its service's memory."""
        for request in requests:
            room = self._budget.free_blocks(0, 0, 0, is_text=request.is_text)
            if request.num_blocks > room:
                raise ConfigError(f"a request needs {request.num_blocks} blocks, and may have at most {room}")
        coming = deque(sorted(requests, key=lambda request: request.arrival_s))
        while coming or any(self._waiting.values()) or any(self._computing.values()) or self._decoding:
            while coming and coming[0].arrival_s <= self._now_s:
                request = coming.popleft()
                self._waiting[request.is_text].append(request)
            self._admit()
            if not self._step():
                self._now_s = coming[0].arrival_s
            self.check()
        self.result.end_s = self._now_s
        return self.result

    def check(self) -> None:
        """Blocks that are held are those of the requests that run, and there are so many."""
        held = sum(each.request.num_blocks for kind in self._computing.values() for each in kind)
        held += sum(each.request.num_blocks for each in self._decoding)
        if held != sum(self._held.values()) or held > self._budget.num_blocks:
            raise BookkeepingError(f"{held} blocks are in use, {self._held} are counted")

    def _admit(self) -> None:
        """Reserve blocks of whole requests, in order of arrival over both services."""
        is_stuck = {False: False, True: False}
        while True:
            heads = [queue[0] for is_text, queue in self._waiting.items() if queue and not is_stuck[is_text]]
            if not heads:
                return
            head = min(heads, key=lambda request: request.arrival_s)
            text, other = head.is_text, self._waiting[not head.is_text]
            older = other[0].num_blocks if is_stuck[not text] and other[0].arrival_s <= head.arrival_s else 0
            room = self._budget.free_blocks(self._held[text], self._held[not text], older, is_text=text)
            rows = len(self._decoding) + len(self._computing[False])
            if head.num_blocks > room or (not text and rows >= self._max_num_seqs):
                is_stuck[text] = True
                continue
            self._waiting[text].popleft()
            self._held[text] += head.num_blocks
            self._computing[text].append(_Running(head))

    def _step(self) -> bool:
        """One step; False if there is nothing to compute."""
        prompts, texts = self._demand(is_text=False), self._demand(is_text=True)
        given = self._budget.divide(len(self._decoding), prompts, texts)
        chunks = [*self._chunks(given[0], is_text=False), *self._chunks(given[1], is_text=True)]
        if not chunks and not self._decoding:
            return False
        context = sum(each.request.num_tokens + each.num_answered for each in self._decoding)
        prefills = tuple((each.num_computed, count) for each, count in chunks)
        self._now_s += self._cost.step_s(StepShape(len(self._decoding), context, prefills))
        self.result.num_steps += 1
        self._decode()
        for each, count in chunks:
            each.num_computed += count
        self._finish_chunks()
        return True

    def _demand(self, *, is_text: bool) -> ServiceDemand:
        """Of requests with memory; those that wait for it count for how long the oldest waits."""
        computing, waiting = self._computing[is_text], self._waiting[is_text]
        first = computing[0].request if computing else waiting[0] if waiting else None
        oldest_s = self._now_s - first.arrival_s if first else 0.0
        return ServiceDemand(sum(each.num_left for each in computing), oldest_s)

    def _chunks(self, num_tokens: int, *, is_text: bool) -> list[tuple[_Running, int]]:
        found = []
        for each in self._computing[is_text]:
            if num_tokens <= 0:
                break
            count = min(each.num_left, num_tokens)
            num_tokens -= count
            found.append((each, count))
        return found

    def _decode(self) -> None:
        left = []
        for each in self._decoding:
            each.num_answered += 1
            if each.num_answered < each.request.num_answer:
                left.append(each)
            else:
                self._held[False] -= each.request.num_blocks
                later = max(1, each.request.num_answer - 1)
                self.result.tpot_s.append((self._now_s - each.first_token_s) / later)
        self._decoding = left

    def _finish_chunks(self) -> None:
        for is_text, queue in self._computing.items():
            while queue and not queue[0].num_left:
                each = queue.popleft()
                waited_s = self._now_s - each.request.arrival_s
                if is_text:
                    self._held[True] -= each.request.num_blocks
                    self.result.embedding_s.append(waited_s)
                    continue
                self.result.ttft_s.append(waited_s)
                each.first_token_s, each.num_answered = self._now_s, 1
                if each.request.num_answer == 1:
                    self._held[False] -= each.request.num_blocks
                else:
                    self._decoding.append(each)


def alternating_load(
    seconds: float, *, rates: tuple[float, float], period_s: float = 60.0, seed: int = 0
) -> list[MixedRequest]:
    """Prompts at a Poisson rate, and texts at one that is three times its mean for a third of each period.

    `rates`: prompts and texts per second. Prompts have 200 to 1800 tokens and answers 20 to 180, texts 100 to
    900 tokens, all equally likely.
    """
    generator, found = random.Random(seed), []
    now_s = 0.0
    while (now_s := now_s + generator.expovariate(rates[0])) < seconds:
        found.append(MixedRequest(now_s, generator.randint(200, 1800), generator.randint(20, 180)))
    now_s = 0.0
    while (now_s := now_s + generator.expovariate(3 * rates[1])) < seconds:
        if now_s % period_s < period_s / 3:
            found.append(MixedRequest(now_s, generator.randint(100, 900)))
    return found
