"""`sagellm bench micro prefix_cache`: look up, insert, evict; memory per cached block.

Sections: a, full hits and the work before and after them; b, misses and half hits; c, a new prompt enters; f,
metadata per cached block.
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


def _full_hit(cell: MicroBenchCell, calls: int) -> Operation:
    index, tokens = cached_prompt(cell)
    return _lookup(index, tokens, cell.size)


def _full_hit_of_path(cell: MicroBenchCell, calls: int) -> Operation:
    index, tokens = cached_prompt(cell, step=_EDGE_TOKENS)
    return _lookup(index, tokens, cell.size)


def _gather(cell: MicroBenchCell, calls: int) -> Operation:
    index, tokens = cached_prompt(cell)
    hit = index.lookup(tokens)
    return Operation(run=lambda _: index.block_ids(hit))


def _to_bytes(cell: MicroBenchCell, calls: int) -> Operation:
    """Each call converts tokens that have grown by one since their last call."""
    prompts = Prompts(cell.plan.seed)
    ring = itertools.cycle([prompts.draw(cell.size) for _ in range(calls)])

    def grown() -> Tokens:
        tokens = next(ring)
        tokens.append(0)
        return tokens

    return Operation(run=Tokens.tobytes, setup=grown)


def _from_list(cell: MicroBenchCell, calls: int) -> Operation:
    ids = Prompts(cell.plan.seed).draw(cell.size).tolist()
    return Operation(run=lambda _: Tokens(ids))


def _miss(cell: MicroBenchCell, calls: int) -> Operation:
    index, _ = cached_prompt(cell)
    return _lookup(index, _unseen(cell), 0)


def _half_hit(cell: MicroBenchCell, calls: int) -> Operation:
    index, tokens = cached_prompt(cell)
    return _lookup(index, _half_seen(cell, tokens), cell.size // 2)


def _gather_half(cell: MicroBenchCell, calls: int) -> Operation:
    index, tokens = cached_prompt(cell)
    hit = index.lookup(_half_seen(cell, tokens))
    return Operation(run=lambda _: index.block_ids(hit))


def _insert(cell: MicroBenchCell, calls: int) -> Operation:
    """A new prompt: allocate, insert, hand over. It is evicted after the sample."""
    prompts = Prompts(cell.plan.seed)
    kv = pool_and_index(cell.plan, 2 * calls * cell.num_blocks, index=cell.variant)
    for _ in range(calls):  # the index is as full for the first sample as for later ones
        kv.cache(prompts.draw(cell.size))

    def forget(tokens: Tokens, allocation: Allocation) -> None:
        kv.pool.free(allocation)
        kv.evict(cell.num_blocks)

    return Operation(run=kv.store, setup=lambda: prompts.draw(cell.size), teardown=forget)


def _insert_evicting(cell: MicroBenchCell, calls: int) -> Operation:
    """The same, in a pool that is full of cached prompts of this length."""
    prompts = Prompts(cell.plan.seed)
    kv = pool_and_index(cell.plan, _PROMPTS_IN_FULL_POOL * cell.num_blocks, index=cell.variant)
    for _ in range(_PROMPTS_IN_FULL_POOL):
        kv.cache(prompts.draw(cell.size))
    return Operation(
        run=kv.store,
        setup=lambda: prompts.draw(cell.size),
        teardown=lambda tokens, allocation: kv.pool.free(allocation),
    )


def _lookup(index: PrefixReuseIndex, tokens: Tokens, expected_tokens: int) -> Operation:
    """Raises `BookkeepingError` if the index finds something else than the row's name says."""
    found = index.lookup(tokens).num_tokens  # which also makes their bytes: a row of its own
    if found != expected_tokens:
        raise BookkeepingError(f"the look-up found {found} tokens where {expected_tokens} are resident")
    return Operation(run=lambda _: index.lookup(tokens))


def _unseen(cell: MicroBenchCell) -> Tokens:
    return Prompts(cell.plan.seed + 1).draw(cell.size)


def _half_seen(cell: MicroBenchCell, tokens: Tokens) -> Tokens:
    half = Tokens(tokens.slice(0, cell.size // 2))
    half.extend(_unseen(cell).slice(cell.size // 2))
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
