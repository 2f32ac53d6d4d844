"""`sagellm bench micro prefix_cache`: look up, insert, evict; and what a cached block costs in memory.

Sections: a, full hits and what stands before and after them; b, misses and half hits; c, a new prompt enters;
f, metadata per cached block.
"""

from __future__ import annotations

import itertools

from sagellm.benchmarks.micro._kv import Prompts, cached_prompt, pool_and_index
from sagellm.benchmarks.micro.cases import MicroBenchCell, MicroBenchmark, Operation, Recipe, timed
from sagellm.benchmarks.micro.memory import metadata
from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.kv_pool import Allocation
from sagellm.core.protocols.prefix_cache import PrefixReuseIndex
from sagellm.core.registry import registry
from sagellm.core.types import Tokens

ONE_EDGE = "full hit, one edge"
PATH = "full hit, path of 256-token edges"
GATHER = "block ids of a full hit"
TO_BYTES = "bytes of changed tokens"
FROM_LIST = "list to tokens"
MISS = "miss"
HALF = "half hit"
GATHER_HALF = "block ids of a half hit"
INSERT = "insert, no eviction"
INSERT_EVICTING = "insert, every block evicted first"

_EDGE_TOKENS = 256
_PROMPTS_IN_FULL_POOL = 4


def _full_hit(setting: MicroBenchCell, calls: int) -> Operation:
    index, tokens = cached_prompt(setting)
    return _lookup(index, tokens, setting.size)


def _full_hit_of_path(setting: MicroBenchCell, calls: int) -> Operation:
    index, tokens = cached_prompt(setting, step=_EDGE_TOKENS)
    return _lookup(index, tokens, setting.size)


def _gather(setting: MicroBenchCell, calls: int) -> Operation:
    index, tokens = cached_prompt(setting)
    hit = index.lookup(tokens)
    return Operation(run=lambda _: index.block_ids(hit))


def _to_bytes(setting: MicroBenchCell, calls: int) -> Operation:
    """Every call meets tokens of its own that have grown by one since the last time."""
    prompts = Prompts(setting.plan.seed)
    ring = itertools.cycle([prompts.draw(setting.size) for _ in range(calls)])

    def grown() -> Tokens:
        tokens = next(ring)
        tokens.append(0)
        return tokens

    return Operation(run=Tokens.tobytes, setup=grown)


def _from_list(setting: MicroBenchCell, calls: int) -> Operation:
    ids = Prompts(setting.plan.seed).draw(setting.size).tolist()
    return Operation(run=lambda _: Tokens(ids))


def _miss(setting: MicroBenchCell, calls: int) -> Operation:
    index, _ = cached_prompt(setting)
    return _lookup(index, _unseen(setting), 0)


def _half_hit(setting: MicroBenchCell, calls: int) -> Operation:
    index, tokens = cached_prompt(setting)
    return _lookup(index, _half_seen(setting, tokens), setting.size // 2)


def _gather_half(setting: MicroBenchCell, calls: int) -> Operation:
    index, tokens = cached_prompt(setting)
    hit = index.lookup(_half_seen(setting, tokens))
    return Operation(run=lambda _: index.block_ids(hit))


def _insert(setting: MicroBenchCell, calls: int) -> Operation:
    """A new prompt: allocate, insert, hand over. What a sample inserts is evicted after it."""
    prompts = Prompts(setting.plan.seed)
    kv = pool_and_index(setting.plan, 2 * calls * setting.num_blocks, index=setting.variant)
    for _ in range(calls):  # so that from the first sample on the index is as full as later
        kv.cache(prompts.draw(setting.size))

    def forget(tokens: Tokens, allocation: Allocation) -> None:
        kv.pool.free(allocation)
        kv.evict(setting.num_blocks)

    return Operation(run=kv.store, setup=lambda: prompts.draw(setting.size), teardown=forget)


def _insert_evicting(setting: MicroBenchCell, calls: int) -> Operation:
    """The same in a pool that is full of cached prompts of the same length."""
    prompts = Prompts(setting.plan.seed)
    kv = pool_and_index(setting.plan, _PROMPTS_IN_FULL_POOL * setting.num_blocks, index=setting.variant)
    for _ in range(_PROMPTS_IN_FULL_POOL):
        kv.cache(prompts.draw(setting.size))
    return Operation(
        run=kv.store,
        setup=lambda: prompts.draw(setting.size),
        teardown=lambda tokens, allocation: kv.pool.free(allocation),
    )


def _lookup(index: PrefixReuseIndex, tokens: Tokens, expected_tokens: int) -> Operation:
    """Raises `BookkeepingError` where the index finds something else than what the row is called."""
    found = index.lookup(tokens).num_tokens  # which also makes their bytes: a row of its own
    if found != expected_tokens:
        raise BookkeepingError(f"the look-up found {found} tokens where {expected_tokens} are resident")
    return Operation(run=lambda _: index.lookup(tokens))


def _unseen(setting: MicroBenchCell) -> Tokens:
    return Prompts(setting.plan.seed + 1).draw(setting.size)


def _half_seen(setting: MicroBenchCell, tokens: Tokens) -> Tokens:
    half = Tokens(tokens.slice(0, setting.size // 2))
    half.extend(_unseen(setting).slice(setting.size // 2))
    return half


BENCHMARK = MicroBenchmark(
    "prefix_cache",
    registry("index"),
    {
        "a": timed(
            "a",
            Recipe(ONE_EDGE, _full_hit),
            Recipe(PATH, _full_hit_of_path),
            Recipe(GATHER, _gather),
            Recipe(TO_BYTES, _to_bytes),
            Recipe(FROM_LIST, _from_list),
        ),
        "b": timed("b", Recipe(MISS, _miss), Recipe(HALF, _half_hit), Recipe(GATHER_HALF, _gather_half)),
        "c": timed("c", Recipe(INSERT, _insert), Recipe(INSERT_EVICTING, _insert_evicting)),
        "f": metadata,
    },
)
