"""Pool, prefix index and eviction policies with lists of ids in and out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, overload

from sagellm.core.protocols.eviction import EvictionPolicy, SimpleExtent
from sagellm.core.protocols.kv_pool import Allocation, KVPool
from sagellm.core.protocols.prefix_cache import Branch, PrefixReuseIndex
from sagellm.core.types import NO_ACCOUNT, Account, KVCacheSchema, Namespace, Tokens
from sagellm.kvmgr.eviction.lru import LRUPolicy
from sagellm.kvmgr.kv_pool.free_list import FreeListPool
from sagellm.kvmgr.prefix_cache.radix import RadixIndex

# -- pool


@dataclass(frozen=True, slots=True)
class BlockAllocationRequest:
    """Blocks for one sequence. `priority` is recorded and has no effect."""

    num_blocks: int
    sequence_id: str
    priority: int = 0


def allocate_blocks(pool: KVPool, request: BlockAllocationRequest) -> list[int]:
    """Block ids for a request, from any pool. Raises `MemoryError` if too few are free."""
    allocation = pool.allocate(request.num_blocks, request.sequence_id)
    if allocation is None:
        raise MemoryError(
            f"{request.num_blocks} blocks asked for, {pool.num_free} of {pool.total_blocks} free"
        )
    return allocation.block_ids.tolist()


class GPUKVPool(FreeListPool):
    """A `FreeListPool` that also takes a `BlockAllocationRequest`."""

    @overload
    def allocate(self, num_blocks: BlockAllocationRequest) -> list[int]: ...

    @overload
    def allocate(self, num_blocks: int, owner: str, account: Account = ...) -> Allocation | None: ...

    def allocate(
        self, num_blocks: int | BlockAllocationRequest, owner: str = "", account: Account = NO_ACCOUNT
    ) -> Allocation | list[int] | None:
        """As `allocate_blocks` for a request, as `KVPool.allocate` for a number."""
        if isinstance(num_blocks, int):
            return super().allocate(num_blocks, owner, account)
        return allocate_blocks(self, num_blocks)

    def get_free_blocks(self) -> int:
        """The number of free blocks."""
        return self.num_free


@dataclass(frozen=True, slots=True)
class KVChunk:
    """A run of blocks of one request, for a transfer or a tier."""

    request_id: str
    block_ids: tuple[int, ...]
    first_token: int
    num_tokens: int
    token_hash: bytes = b""
    checksum: int = 0


@dataclass(frozen=True, slots=True)
class TransportPlan:
    """Chunks to move between two instances, in order, in messages of `chunk_bytes` at most."""

    source: str
    target: str
    chunks: tuple[KVChunk, ...]
    schema: KVCacheSchema
    chunk_bytes: int = 1 << 20
    options: Mapping[str, Any] = field(default_factory=dict)


class KVBackendProtocol(KVPool, Protocol):
    """A host engine's KV memory: a pool that also migrates blocks, in two halves."""

    def migrate(self, plan: TransportPlan) -> str:
        """Start to move blocks; returns a ticket for `poll`."""
        ...

    def poll(self) -> Sequence[str]:
        """Tickets of the moves that have ended since the last call."""
        ...


# -- prefix index


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A prefix hit: `match_length` leading tokens are in `block_ids`."""

    match_length: int
    block_ids: list[int]


class PrefixMatcher:
    """Read-only queries of one prefix index.

    They pin nothing, split nothing and update no time of last use. A router keeps one per instance and sends
    a request to the instance with the longest match.
    """

    def __init__(self, index: PrefixReuseIndex) -> None:
        self._index = index

    def match(
        self,
        tokens: Tokens | Sequence[int],
        namespace: Namespace = Namespace(),
        max_tokens: int | None = None,
    ) -> PrefixMatch:
        """The longest resident prefix. It is not pinned: the next `evict` may remove its blocks."""
        hit = self._index.lookup(_as_tokens(tokens), namespace, max_tokens)
        return PrefixMatch(hit.num_tokens, self._index.block_ids(hit).tolist())

    def best(
        self, tokens: Tokens | Sequence[int], namespace: Namespace = Namespace(), k: int = 1
    ) -> list[Branch]:
        """At most `k` resident branches that share a prefix with the tokens.

        The longest match is first, then the last used. Each of several answers to one prompt (`n > 1`) is a
        branch.
        """
        return self._index.branches(_as_tokens(tokens), k, namespace)


class RadixPrefixCache(RadixIndex):
    """A `RadixIndex` with `match_prefix` and `insert_prefix`, in the default namespace.

    `insert_prefix` keeps at most `max_blocks` blocks (None: any number). Other options: `RadixIndex`.
    """

    def __init__(self, max_blocks: int | None = None, block_size: int = 16, **options: Any) -> None:
        super().__init__(block_size, **options)
        self.max_blocks = max_blocks

    def match_prefix(self, token_ids: Sequence[int]) -> PrefixMatch:
        """The longest resident prefix of a sequence."""
        return PrefixMatcher(self).match(token_ids)

    def insert_prefix(self, token_ids: Sequence[int], block_ids: Sequence[int]) -> list[int]:
        """Insert the whole blocks of a sequence. Returns the blocks that the caller has to free.

        These are duplicates of resident blocks, and blocks evicted to keep `max_blocks`.
        """
        return insert_prefix(self, token_ids, block_ids, self.max_blocks)


def insert_prefix(
    index: PrefixReuseIndex,
    token_ids: Sequence[int],
    block_ids: Sequence[int],
    max_blocks: int | None = None,
) -> list[int]:
    """`RadixPrefixCache.insert_prefix` for any index."""
    tokens = Tokens(token_ids)
    result = index.insert(tokens, block_ids[: len(tokens) // index.block_size])
    resident = index.block_ids(result.hit)[: result.num_existing]
    duplicates = [new for new, old in zip(block_ids, resident, strict=False) if new != old]
    excess = 0 if max_blocks is None else max(0, index.num_cached - max_blocks)
    return duplicates + list(index.evict(min(excess, index.num_evictable)) or ())


def _as_tokens(tokens: Tokens | Sequence[int]) -> Tokens:
    return tokens if isinstance(tokens, Tokens) else Tokens(tokens)


# -- eviction


@dataclass(slots=True)
class EvictionCandidate:
    """A sequence that may be evicted whole. Times in seconds; `estimated_lifetime` is a predictor's."""

    sequence_id: str
    block_ids: list[int]
    last_access_time: float
    access_count: int = 1
    priority: int = 0
    is_pinned: bool = False
    estimated_lifetime: float | None = None


def select_victims(
    fresh_policy: Callable[[], EvictionPolicy], candidates: Sequence[EvictionCandidate], required_blocks: int
) -> list[str]:
    """Ids of sequences to evict, in the policy's order.

    Together they have at least `required_blocks` blocks; empty if all unpinned candidates have fewer.
    `fresh_policy` makes an empty policy. The candidates are inserted in order of access time, so the answer
    is what that policy would do, and no other policy is changed.
    """
    policy = fresh_policy()
    ordered = sorted((c for c in candidates if not c.is_pinned), key=lambda c: c.last_access_time)
    if sum(len(c.block_ids) for c in ordered) < required_blocks:
        return []
    for index, candidate in enumerate(ordered):
        policy.insert(
            SimpleExtent(
                index,
                len(candidate.block_ids),
                last_use=index,
                num_uses=candidate.access_count,
                used_s=candidate.last_access_time,
                priority=candidate.priority,
                meta={
                    "access_count": candidate.access_count,
                    "estimated_lifetime": candidate.estimated_lifetime,
                },
            )
        )
    victims: dict[str, None] = {}

    def give_up(run: SimpleExtent, num_blocks: int) -> None:
        run.num_blocks -= num_blocks
        victims[ordered[run.key].sequence_id] = None

    policy.evict(required_blocks, give_up)
    return list(victims)


class LRUEvictionPolicy(LRUPolicy):
    """An `LRUPolicy` with `select_victims`."""

    def select_victims(self, candidates: Sequence[EvictionCandidate], required_blocks: int) -> list[str]:
        """The least recently used candidates: see `select_victims` of this module."""
        return select_victims(LRUPolicy, candidates, required_blocks)
