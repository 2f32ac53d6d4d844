"""`sagellm bench micro prefix_cache`: look up, insert, evict; memory per cached block.

Sections: a, full hits and the work before and after them; b, misses and half hits; c, a new prompt enters; f,
metadata per cached block.
"""

from __future__ import annotations

import itertools
from functools import partial

from sagellm.benchmarks.micro._kv import Prompts, cached_prompt, pool_and_index
from sagellm.benchmarks.micro.cases import MicroBenchCell, MicroBenchmark, Recipe, TimedOperation, timed
from sagellm.benchmarks.micro.memory import metadata
from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.kv_pool import Allocation
from sagellm.core.protocols.prefix_cache import PrefixHit, PrefixReuseIndex
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


def _hit(
    cell: MicroBenchCell, calls: int, *, share: float = 1.0, step: int | None = None, gather: bool = False
) -> TimedOperation:
    """Looks up a prompt of which a `share` is cached. With `gather`, the operation collects the block ids of
    that hit."""
    index, tokens = cached_prompt(cell, step=step)
    expected = int(share * cell.size)
    if share < 1:
        tokens = Tokens(tokens.slice(0, expected))
        tokens.extend(Prompts(cell.plan.seed + 1).draw(cell.size).slice(expected))
    hit = _lookup(index, tokens, expected)  # also caches the tokens' bytes: to make them is a row of its own
    if gather:
        return TimedOperation(run=lambda _: index.block_ids(hit))
    return TimedOperation(run=lambda _: index.lookup(tokens))


def _lookup(index: PrefixReuseIndex, tokens: Tokens, expected_tokens: int) -> PrefixHit:
    """Raises `BookkeepingError` if the index finds something else than the row's name says."""
    hit = index.lookup(tokens)
    if hit.num_tokens != expected_tokens:
        raise BookkeepingError(
            f"the look-up found {hit.num_tokens} tokens where {expected_tokens} are resident"
        )
    return hit


def _to_bytes(cell: MicroBenchCell, calls: int) -> TimedOperation:
    """Each call converts tokens that have grown by one since their last call."""
    prompts = Prompts(cell.plan.seed)
    ring = itertools.cycle([prompts.draw(cell.size) for _ in range(calls)])

    def grown() -> Tokens:
        tokens = next(ring)
        tokens.append(0)
        return tokens

    return TimedOperation(run=Tokens.tobytes, setup=grown)


def _from_list(cell: MicroBenchCell, calls: int) -> TimedOperation:
    ids = Prompts(cell.plan.seed).draw(cell.size).tolist()
    return TimedOperation(run=lambda _: Tokens(ids))


def _insert(cell: MicroBenchCell, calls: int) -> TimedOperation:
    """A new prompt: allocate, insert, hand over. It is evicted after the sample."""
    prompts = Prompts(cell.plan.seed)
    kv = pool_and_index(cell.plan, 2 * calls * cell.num_blocks, index=cell.variant)
    for _ in range(calls):  # the index is as full for the first sample as for later ones
        kv.cache(prompts.draw(cell.size))

    def forget(tokens: Tokens, allocation: Allocation) -> None:
        kv.pool.free(allocation)
        kv.evict(cell.num_blocks)

    return TimedOperation(run=kv.store, setup=lambda: prompts.draw(cell.size), teardown=forget)


def _insert_evicting(cell: MicroBenchCell, calls: int) -> TimedOperation:
    """The same, in a pool that is full of cached prompts of this length."""
    prompts = Prompts(cell.plan.seed)
    kv = pool_and_index(cell.plan, _PROMPTS_IN_FULL_POOL * cell.num_blocks, index=cell.variant)
    for _ in range(_PROMPTS_IN_FULL_POOL):
        kv.cache(prompts.draw(cell.size))
    return TimedOperation(
        run=kv.store,
        setup=lambda: prompts.draw(cell.size),
        teardown=lambda tokens, allocation: kv.pool.free(allocation),
    )


BENCHMARK = MicroBenchmark(
    "prefix_cache",
    registry("index").names,
    registry("index").get,
    {
        "a": timed(
            "a",
            Recipe(ONE_EDGE, _hit),
            Recipe(PATH, partial(_hit, step=_EDGE_TOKENS)),
            Recipe(GATHER, partial(_hit, gather=True)),
            Recipe(TO_BYTES, _to_bytes),
            Recipe(FROM_LIST, _from_list),
        ),
        "b": timed(
            "b",
            Recipe(MISS, partial(_hit, share=0.0)),
            Recipe(HALF, partial(_hit, share=0.5)),
            Recipe(GATHER_HALF, partial(_hit, share=0.5, gather=True)),
        ),
        "c": timed("c", Recipe(INSERT, _insert), Recipe(INSERT_EVICTING, _insert_evicting)),
        "f": metadata,
    },
)
