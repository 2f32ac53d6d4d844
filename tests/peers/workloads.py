"""What both schedulers are given: requests, when they arrive, and the tokens that are drawn for them.

A workload is plain data, so that it travels to another engine's environment as JSON.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field
from typing import Any

VOCABULARY = range(3, 32000)


@dataclass(frozen=True)
class Settings:
    """Sizes that both sides share. `num_blocks` are those that requests can have."""

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 8
    max_batched_tokens: int = 128
    long_prefill_tokens: int = 0
    max_model_len: int = 4096
    prefix_caching: bool = True


@dataclass(frozen=True)
class Arrival:
    """A request of `prompt`, for which `answer` is drawn. It arrives before step `step` or, where `after`
    names another request, so many steps after the one in which that ended."""

    id: str
    prompt: list[int]
    answer: list[int]
    step: int
    after: str | None = None


@dataclass(frozen=True)
class Workload:
    name: str
    settings: Settings
    requests: list[Arrival] = field(default_factory=list)
    max_steps: int = 5000

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Author:
    """Draws workloads by seed."""

    seed: int
    chance: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    def tokens(self, low: int, high: int) -> list[int]:
        return self.chance.choices(VOCABULARY, k=self.chance.randint(low, high))

    def talk(self, name: str, opening: list[int], turns: int, step: int, sizes: Sizes) -> list[Arrival]:
        """A conversation: each turn repeats all that was said before."""
        said, made = opening, []
        for turn in range(turns):
            prompt = said + self.tokens(*sizes.question)
            answer = self.tokens(*sizes.answer)
            before = f"{name}.{turn - 1}" if turn else None
            when = self.chance.randint(0, sizes.think) if turn else step
            made.append(Arrival(f"{name}.{turn}", prompt, answer, when, before))
            said = prompt + answer
        return made


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens, from and to; `think` in steps."""

    question: tuple[int, int]
    answer: tuple[int, int]
    think: int = 0


def arrivals() -> Workload:
    """Mixed lengths in chunks, more requests than rows, arriving over time."""
    author = Author(1)
    lengths = [(1, 40), (1, 40), (60, 200), (300, 900)]
    requests = [
        Arrival(f"r{i}", author.tokens(*author.chance.choice(lengths)), author.tokens(1, 40), 2 * i)
        for i in range(40)
    ]
    return Workload("arrivals", Settings(num_blocks=600), requests)


def pressure() -> Workload:
    """More text than blocks: preemptions and resumptions, with prefixes that come back from the cache."""
    author = Author(2)
    requests = [Arrival(f"r{i}", author.tokens(10, 220), author.tokens(20, 120), i // 2) for i in range(30)]
    return Workload("pressure", Settings(num_blocks=56, max_num_seqs=10, max_batched_tokens=160), requests)


def conversations() -> Workload:
    """Turns of conversations that begin with few system prompts, in a pool that cannot keep them all."""
    author = Author(3)
    openings = [author.tokens(60, 200) for _ in range(3)]
    sizes = Sizes(question=(5, 60), answer=(5, 60), think=25)
    requests = [
        one
        for i in range(14)
        for one in author.talk(
            f"c{i}", author.chance.choice(openings), author.chance.randint(2, 5), 6 * i, sizes
        )
    ]
    return Workload("conversations", Settings(num_blocks=110, max_num_seqs=6), requests)


SCRIPTED = (arrivals, pressure, conversations)


def drawn(seed: int) -> Workload:
    """Any sizes, by seed: small pools and budgets, chats and single requests, bursts and pauses."""
    author = Author(seed)
    chance = author.chance
    size = chance.choice([4, 8, 16])
    longest = 24 * size
    openings = [author.tokens(1, longest // 3) for _ in range(3)] + [[]] * chance.randint(0, 3)
    sizes = Sizes(question=(1, longest // 8), answer=(1, longest // 6), think=chance.randint(0, 30))
    requests: list[Arrival] = []
    step = 0
    for i in range(chance.randint(4, 16)):
        step += chance.choice([0, 0, 1, chance.randint(0, 20)])
        turns = chance.choice([1, 1, 2, 3])
        requests += author.talk(f"c{i}", chance.choice(openings), turns, step, sizes)
    needed = max(len(one.prompt) + len(one.answer) for one in requests) // size + 1
    rows = chance.randint(2, 12)
    settings = Settings(
        num_blocks=int(needed * chance.choice([1.0, 1.5, 2.0, 3.0, 6.0])),
        block_size=size,
        max_num_seqs=rows,
        max_batched_tokens=chance.randint(max(rows, 8), 160),
        long_prefill_tokens=chance.choice([0, 0, 0, chance.randint(4, 40)]),
        max_model_len=max(longest, needed * size),
        prefix_caching=chance.random() < 0.9,
    )
    return Workload(f"drawn {seed}", settings, requests)
