"""`sagellm bench micro eviction`: cost per hit, new prompt and evicted block. The prefix index drives the
policy, as in the engine. Every prompt has 512 tokens. `sagellm replay` measures how well policies choose."""

from __future__ import annotations

import dataclasses

from sagellm.benchmarks.micro._kv import PROMPT_BLOCKS, PROMPT_TOKENS, PoolAndIndex, Prompts, pool_and_index
from sagellm.benchmarks.micro.cases import (
    MicroBenchCell,
    MicroBenchmark,
    Recipe,
    TimedOperation,
    timed,
)
from sagellm.core.blocks import cdiv
from sagellm.core.registry import registry
from sagellm.core.types import NO_ACCOUNT, Namespace, Tokens

USE = "a cached prompt is used: look-up, pin, unpin"
ENTER = "a prompt enters a full cache: evict, insert"
EVICT = "evict from a large cache"


def _full_cache(cell: MicroBenchCell, num_blocks: int) -> tuple[PoolAndIndex, list[Tokens], Prompts]:
    """Returns a cache without a free block, and its prompts in order of arrival."""
    prompts = Prompts(cell.plan.seed)
    plan = dataclasses.replace(cell.plan, policy=cell.variant)
    kv = pool_and_index(plan, cdiv(num_blocks, PROMPT_BLOCKS) * PROMPT_BLOCKS)
    return kv, kv.fill(prompts), prompts


def _use(cell: MicroBenchCell, calls: int) -> TimedOperation:
    kv, cached, _ = _full_cache(cell, cell.size)
    index, turn = kv.index, 0

    def next_prompt() -> Tokens:
        nonlocal turn
        turn += 1
        return cached[turn % len(cached)]

    def run(tokens: Tokens) -> None:
        index.unpin(index.pin(index.lookup(tokens, Namespace(), PROMPT_TOKENS)))

    return TimedOperation(run=run, setup=next_prompt)


def _enter(cell: MicroBenchCell, calls: int) -> TimedOperation:
    kv, _, prompts = _full_cache(cell, cell.size)
    return TimedOperation(run=kv.cache, setup=lambda: prompts.draw(PROMPT_TOKENS))


def _evict(cell: MicroBenchCell, calls: int) -> TimedOperation:
    kv, _, prompts = _full_cache(cell, max(cell.plan.large_pool, 2 * cell.size * calls))
    return TimedOperation(
        run=lambda _: kv.allocator.make_room(kv.pool.num_free + cell.size, NO_ACCOUNT),
        setup=lambda: kv.fill(prompts),
    )


BENCHMARK = MicroBenchmark(
    "eviction",
    registry("policy").names,
    registry("policy").get,
    {
        "u": timed("u", Recipe(USE, _use, "caches")),
        "n": timed("n", Recipe(ENTER, _enter, "caches")),
        "e": timed("e", Recipe(EVICT, _evict, "evictions")),
    },
)
