"""Prompts, and a pool with a prefix index, for the micro benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sagellm.benchmarks.micro.cases import BLOCK_SIZE, MicroBenchCell, MicroBenchPlan
from sagellm.core.errors import CapacityError
from sagellm.core.protocols.kv_pool import Allocation, KVPool
from sagellm.core.protocols.prefix_cache import PrefixReuseIndex
from sagellm.core.registry import registry
from sagellm.core.types import NO_ACCOUNT, Account, Tokens
from sagellm.kvmgr.manager import BlockAllocator

HOLDER = "prefix index"
OWNER = "benchmark"
FIRST_TOKEN, VOCAB_SIZE = 3, 32_000
NEIGHBOURS, NEIGHBOUR_BLOCKS = 8, 4
PROMPT_TOKENS = 512
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_SIZE


class Prompts:
    """A seeded stream of prompts of random tokens."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def draw(self, num_tokens: int) -> Tokens:
        """Returns a prompt whose bytes are cached, as a look-up leaves it."""
        ids = self._random.integers(FIRST_TOKEN, VOCAB_SIZE, num_tokens, dtype=np.int32)
        tokens = Tokens.frombytes(ids.tobytes())
        tokens.tobytes()
        return tokens


def allocate(pool: KVPool, num_blocks: int, account: Account = NO_ACCOUNT) -> Allocation:
    """Raises `CapacityError` if too few blocks are free."""
    allocation = pool.allocate(num_blocks, OWNER, account)
    if allocation is None:
        raise CapacityError(f"the pool has {pool.num_free} free blocks, not {num_blocks}")
    return allocation


@dataclass(frozen=True, slots=True)
class PoolAndIndex:
    """A pool, and the prefix index that holds blocks of it."""

    pool: KVPool
    index: PrefixReuseIndex
    allocator: BlockAllocator

    def evict(self, num_blocks: int) -> None:
        """Evicts that many blocks from the index; they are free afterwards."""
        evicted = self.index.evict(num_blocks)
        if evicted is None:
            raise CapacityError(f"{num_blocks} blocks to evict, {self.index.num_evictable} evictable")
        self.pool.take_back(HOLDER, evicted)

    def exchange(self, num_blocks: int) -> Allocation:
        """Allocates from a full pool; evicts as the manager does."""
        self.allocator.make_room(num_blocks, NO_ACCOUNT)
        return allocate(self.pool, num_blocks)

    def take(self, num_blocks: int) -> Allocation:
        """Allocates, after evicting what is missing."""
        short = num_blocks - self.pool.num_free
        if short > 0:
            self.evict(short)
        return allocate(self.pool, num_blocks)

    def store(self, tokens: Tokens) -> Allocation:
        """Allocates the blocks of a prompt and hands them to the index. The allocation keeps none."""
        allocation = self.take(len(tokens) // BLOCK_SIZE)
        result = self.index.insert(tokens, allocation.block_ids)
        self.pool.hand_over(allocation, result.num_existing, len(allocation.block_ids), HOLDER)
        return allocation

    def cache(self, tokens: Tokens) -> None:
        """Stores a prompt that no request uses."""
        self.pool.free(self.store(tokens))

    def fill(self, prompts: Prompts) -> list[Tokens]:
        """Caches prompts of `PROMPT_TOKENS` while they fit without eviction; returns them in order."""
        cached = []
        while self.pool.num_free >= PROMPT_BLOCKS:
            cached.append(prompts.draw(PROMPT_TOKENS))
            self.cache(cached[-1])
        return cached

    def cache_in_steps(self, tokens: Tokens, step: int) -> None:
        """Caches a prompt as a conversation does, longer by `step` tokens each time."""
        allocation = self.take(len(tokens) // BLOCK_SIZE)
        for end in [*range(step, len(tokens), step), len(tokens)]:
            self.index.insert(Tokens(tokens.slice(0, end)), allocation.block_ids[: end // BLOCK_SIZE])
        self.pool.hand_over(allocation, 0, len(allocation.block_ids), HOLDER)
        self.pool.free(allocation)


def pool_and_index(
    plan: MicroBenchPlan, num_blocks: int, *, index: str = "radix", pool: str = "free_list"
) -> PoolAndIndex:
    """Returns an empty pool and an empty index with the plan's policy."""
    policy = registry("policy").create(plan.policy)
    made_pool = registry("pool").create(pool, total_blocks=num_blocks, block_size=BLOCK_SIZE)
    made_index = registry("index").create(index, block_size=BLOCK_SIZE, policy=policy)
    return PoolAndIndex(made_pool, made_index, BlockAllocator(made_index, made_pool))


def cached_prompt(cell: MicroBenchCell, *, step: int | None = None) -> tuple[PrefixReuseIndex, Tokens]:
    """Returns an index that holds one prompt, and the prompt. The prompt is cached at once, or `step`
    tokens at a time. Eight short prompts beside it give the root several children."""
    prompts = Prompts(cell.plan.seed)
    num_blocks = cell.num_blocks + NEIGHBOURS * NEIGHBOUR_BLOCKS
    kv = pool_and_index(cell.plan, num_blocks, index=cell.variant)
    tokens = prompts.draw(cell.size)
    kv.cache_in_steps(tokens, step or cell.size)
    for _ in range(NEIGHBOURS):
        kv.cache(prompts.draw(NEIGHBOUR_BLOCKS * BLOCK_SIZE))
    return kv.index, tokens
