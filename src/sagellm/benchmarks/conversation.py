"""The conversation experiment: how much of 100 prompts is reused, by pool size.

The prompts go one after the other through a `KVCacheManager` (match, bind, commit, release). Nothing is
generated: the experiment counts what each prompt finds in the cache.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from sagellm.benchmarks.reporting import Environment, Table
from sagellm.core.binding import Binding
from sagellm.core.blocks import cdiv
from sagellm.core.clock import ManualClock
from sagellm.core.config import KVConfig
from sagellm.core.errors import ConfigError
from sagellm.core.plan import Chunk, Draft, RequestState, StepStart
from sagellm.core.types import Request, RequestStatus, Tokens
from sagellm.engines.build_kv import build_kv
from sagellm.kvmgr.manager import KVCacheManager

FORMAT = "sagellm.bench.conversation/2"
BLOCK_SIZE = 16
POOLS = (10_000, 1_000, 500)
FIRST_TOKEN, VOCAB_SIZE = 3, 32_000
SECONDS_BETWEEN_REQUESTS = 1.0
MATCH_LENGTHS = (1, 64, 128, 256, 512, 1024, 2048)
"""Tokens at which the ranges of match lengths begin."""
COLUMNS = (
    "prompts", "pool", "requests", "tokens", "blocks", "reused", "overall", "per request", "token hits",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Lengths in tokens, lognormally distributed and cut to a range. `mean` and `deviation` are those of
    the logarithm."""

    mean: float
    deviation: float
    shortest: int
    longest: int

    def draw(self, random: Random) -> int:
        drawn = random.lognormvariate(self.mean, self.deviation)
        return int(min(self.longest, max(self.shortest, drawn)))


FIRST_PROMPT = Lognormal(5.65, 0.6, 32, 1500)
ANSWER = Lognormal(5.0, 0.6, 16, 600)
NEXT_QUESTION = Lognormal(4.1, 0.6, 8, 300)


@dataclass(frozen=True, slots=True)
class ConversationMix:
    """One kind of traffic: `num_requests` prompts in conversations of `turns` turns. Each turn carries the
    whole history. The first `system_tokens` tokens are the same in all prompts."""

    name: str
    num_requests: int = 100
    turns: int = 5
    system_tokens: int = 0

    def __post_init__(self) -> None:
        if self.turns < 1 or self.num_requests < 1 or self.num_requests % self.turns:
            raise ConfigError(f"{self.num_requests} requests are no whole number of {self.turns}-turn talks")


VARIANTS = (
    ConversationMix("multi-turn, 20 conversations of 5 turns"),
    ConversationMix("single-turn", turns=1),
    ConversationMix("single-turn, shared 128-token system prompt", turns=1, system_tokens=128),
)


@dataclass(frozen=True, slots=True)
class PromptReuse:
    """What one prompt found: its length, and how many of its blocks were reused."""

    num_tokens: int
    num_blocks: int
    num_reused: int


@dataclass(frozen=True, slots=True)
class ConversationOutcome:
    """The outcome of one mix in one pool. Ratios are 0 to 1. `overall` is reused blocks over all blocks;
    `per_request` is the mean of the requests' own ratios; `token_hits` is reused tokens over prompt
    tokens."""

    variant: str
    pool_blocks: int
    requests: int
    tokens: int
    blocks: int
    reused: int
    overall: float
    per_request: float
    token_hits: float
    usages: tuple[PromptReuse, ...]

    def match_lengths(self) -> dict[str, int]:
        """Counts prompts by the number of tokens that they found, in ranges."""
        found = [usage.num_reused * BLOCK_SIZE for usage in self.usages]
        counts = {"0": sum(not num_tokens for num_tokens in found)}
        for low, high in itertools.pairwise(MATCH_LENGTHS):
            counts[f"{low} to {high - 1}"] = sum(low <= num_tokens < high for num_tokens in found)
        counts[f"{MATCH_LENGTHS[-1]} and more"] = sum(num_tokens >= MATCH_LENGTHS[-1] for num_tokens in found)
        return counts


def conversation_prompts(variant: ConversationMix, seed: int) -> list[list[int]]:
    """Returns the prompts in order of arrival; the same seed gives the same prompts.

    The harness that measures the peers draws from the same stream in the same order (lengths before tokens,
    answer before question, conversation after conversation, and the order of arrival at the end), so all
    managers see the same tokens. The answer and question after the last turn are drawn but not sent. A single
    prompt is a conversation without these draws.
    """
    random = Random(seed)
    system = _tokens(random, variant.system_tokens)
    num_conversations = variant.num_requests // variant.turns
    if variant.turns == 1:
        return [system + _tokens(random, FIRST_PROMPT.draw(random)) for _ in range(num_conversations)]
    conversations: list[list[list[int]]] = []
    for _ in range(num_conversations):
        history, prompts = system + _tokens(random, FIRST_PROMPT.draw(random)), []
        for _ in range(variant.turns):
            prompts.append(history)
            history = history + _tokens(random, ANSWER.draw(random))
            history += _tokens(random, NEXT_QUESTION.draw(random))
        conversations.append(prompts)
    order = []
    while any(conversations):
        chosen = random.choice([prompts for prompts in conversations if prompts])
        order.append(chosen.pop(0))
    return order


def _tokens(random: Random, count: int) -> list[int]:
    return [random.randrange(FIRST_TOKEN, VOCAB_SIZE) for _ in range(count)]


def replay(
    prompts: Iterable[Sequence[int]], manager: KVCacheManager, clock: ManualClock
) -> list[PromptReuse]:
    """Sends the prompts through the manager, one second of the clock apart."""
    usages = []
    for number, prompt in enumerate(prompts):
        num_tokens = len(prompt)
        request = Request(str(number), Tokens(prompt))
        state = RequestState(request, Tokens(prompt), RequestStatus.RUNNING, num_prefilled=num_tokens)
        hit = manager.quotes.match(state)
        chunk = Chunk(state, hit.num_tokens, num_tokens - hit.num_tokens, hit)
        manager.bind(Binding(Draft(StepStart(0, clock.now()), num_tokens, [], [], {state.request_id: chunk})))
        manager.commit(state)
        manager.release(state)
        usages.append(PromptReuse(num_tokens, cdiv(num_tokens, manager.block_size), hit.num_blocks))
        clock.advance(SECONDS_BETWEEN_REQUESTS)
    return usages


def sharing(variant: str, pool_blocks: int, usages: Sequence[PromptReuse]) -> ConversationOutcome:
    """Sums over all requests."""
    tokens = sum(usage.num_tokens for usage in usages)
    blocks = sum(usage.num_blocks for usage in usages)
    reused = sum(usage.num_reused for usage in usages)
    ratios = [usage.num_reused / usage.num_blocks for usage in usages]
    return ConversationOutcome(
        variant,
        pool_blocks,
        len(usages),
        tokens,
        blocks,
        reused,
        overall=round(reused / blocks, 4),
        per_request=round(sum(ratios) / len(ratios), 4),
        token_hits=round(reused * BLOCK_SIZE / tokens, 4),
        usages=tuple(usages),
    )


def run(
    *,
    policy: str = "lru",
    index: str = "radix",
    pools: Sequence[int] = POOLS,
    variants: Sequence[ConversationMix] = VARIANTS,
    seed: int = 0,
    prefix_caching: bool = True,
) -> list[ConversationOutcome]:
    """Runs every mix in every pool. Each pool has a new manager, which is checked at the end."""
    config = KVConfig(block_size=BLOCK_SIZE, index=index, eviction=policy, prefix_caching=prefix_caching)
    outcomes = []
    for variant in variants:
        prompts = conversation_prompts(variant, seed)
        needed = cdiv(max(map(len, prompts)), BLOCK_SIZE)
        for blocks in pools:
            if blocks < needed:
                raise ConfigError(f"a pool of {blocks} blocks does not hold the longest prompt: {needed} do")
            clock = ManualClock()
            manager = build_kv(config, blocks, clock=clock)
            outcomes.append(sharing(variant.name, blocks, replay(prompts, manager, clock)))
            manager.check()
    return outcomes


def as_json(
    outcomes: Sequence[ConversationOutcome], environment: Environment, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the outcomes as JSON values of form `FORMAT`."""
    return {
        "format": FORMAT,
        "environment": dataclasses.asdict(environment),
        "block_size": BLOCK_SIZE,
        "settings": dict(settings),
        "outcomes": [
            dataclasses.asdict(outcome) | {"match_lengths": outcome.match_lengths()} for outcome in outcomes
        ],
    }


def as_table(outcomes: Sequence[ConversationOutcome], title: str) -> Table:
    """Returns one line per mix and pool."""
    rows = []
    for outcome in outcomes:
        counts = (outcome.pool_blocks, outcome.requests, outcome.tokens, outcome.blocks, outcome.reused)
        ratios = (outcome.overall, outcome.per_request, outcome.token_hits)
        cells = [*(f"{count:,}" for count in counts), *(f"{ratio:.2%}" for ratio in ratios)]
        rows.append([outcome.variant, *cells])
    return Table(title, COLUMNS, rows, num_names=1)


def match_table(outcomes: Sequence[ConversationOutcome]) -> Table:
    """Returns the distribution of match lengths, one line per mix and pool."""
    rows = []
    for outcome in outcomes:
        counts = map(str, outcome.match_lengths().values())
        rows.append([outcome.variant, f"{outcome.pool_blocks:,}", *counts])
    columns = ("prompts", "pool", *outcomes[0].match_lengths())
    return Table("prompts by the number of tokens that they found in the cache", columns, rows, num_names=1)


def request_table(outcome: ConversationOutcome) -> Table:
    """Returns what each prompt found, in order of arrival."""
    columns = ("request", "tokens", "blocks", "reused", "new", "share")
    rows = []
    for number, usage in enumerate(outcome.usages):
        counts = number, usage.num_tokens, usage.num_blocks, usage.num_reused
        new = usage.num_blocks - usage.num_reused
        rows.append([*map(str, (*counts, new)), f"{usage.num_reused / usage.num_blocks:.2%}"])
    return Table(f"{outcome.variant}, pool of {outcome.pool_blocks:,} blocks", columns, rows, num_names=1)
