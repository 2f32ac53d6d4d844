"""`sagellm bench micro eviction`: what a policy costs per hit, per new prompt and per evicted block.

The policy is driven by the prefix index, as in the engine. Every prompt has 512 tokens. How well policies
choose is another question: `sagellm replay`.
"""

from __future__ import annotations

import dataclasses

from sagellm.benchmarks.micro._kv import PoolAndIndex, Prompts, pool_and_index
from sagellm.benchmarks.micro.cases import (
    MicroBenchCell,
    MicroBenchmark,
    MicroBenchPlan,
    Operation,
    Recipe,
    timed,
)
from sagellm.core.blocks import cdiv
from sagellm.core.registry import registry
from sagellm.core.types import NO_ACCOUNT, Namespace, Tokens

USE = "a cached prompt is used: look-up, pin, unpin"
ENTER = "a prompt enters a full cache: evict, insert"
EVICT = "evict from a large cache"

_PROMPT_TOKENS = 512
_PROMPT_BLOCKS = 32
_FEW_PROMPTS = 64


def _full_cache(setting: MicroBenchCell, num_blocks: int) -> tuple[PoolAndIndex, list[Tokens], Prompts]:
    """A cache of prompts, which are returned in order of arrival, without a free block."""
    prompts = Prompts(setting.plan.seed)
    plan = dataclasses.replace(setting.plan, policy=setting.variant)
    kv = pool_and_index(plan, cdiv(num_blocks, _PROMPT_BLOCKS) * _PROMPT_BLOCKS)
    cached = []
    while kv.pool.num_free:
        cached.append(prompts.draw(_PROMPT_TOKENS))
        kv.cache(cached[-1])
    return kv, cached, prompts


def _use(setting: MicroBenchCell, calls: int) -> Operation:
    kv, cached, _ = _full_cache(setting, setting.size)
    index, turn = kv.index, 0

    def next_prompt() -> Tokens:
        nonlocal turn
        turn += 1
        return cached[turn % len(cached)]

    def run(tokens: Tokens) -> None:
        index.unpin(index.pin(index.lookup(tokens, Namespace(), _PROMPT_TOKENS)))

    return Operation(run=run, setup=next_prompt)


def _enter(setting: MicroBenchCell, calls: int) -> Operation:
    kv, _, prompts = _full_cache(setting, setting.size)
    return Operation(run=kv.cache, setup=lambda: prompts.draw(_PROMPT_TOKENS))


def _evict(setting: MicroBenchCell, calls: int) -> Operation:
    kv, _, prompts = _full_cache(setting, max(setting.plan.large_pool, 2 * setting.size * calls))

    def fill() -> int:
        while kv.pool.num_free >= _PROMPT_BLOCKS:
            kv.cache(prompts.draw(_PROMPT_TOKENS))
        return setting.size

    return Operation(run=lambda size: kv.room.make(kv.pool.num_free + size, NO_ACCOUNT), setup=fill)


def _few(plan: MicroBenchPlan) -> tuple[int, ...]:
    return (_FEW_PROMPTS * _PROMPT_BLOCKS, plan.large_pool)


def _evictions(plan: MicroBenchPlan) -> tuple[int, ...]:
    return plan.evictions


BENCHMARK = MicroBenchmark(
    "eviction",
    registry("policy"),
    {
        "u": timed("u", Recipe(USE, _use, _few)),
        "n": timed("n", Recipe(ENTER, _enter, _few)),
        "e": timed("e", Recipe(EVICT, _evict, _evictions)),
    },
)
