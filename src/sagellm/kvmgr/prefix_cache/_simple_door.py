"""The simple door of the design documents, the same for every index: lists of token ids in, block ids out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from sagellm.core.protocols.prefix_cache import InsertResult, PrefixHit
from sagellm.core.types import BlockIds, Tokens


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The design documents' form of a hit: `match_length` tokens, in `block_ids`."""

    match_length: int
    block_ids: list[int]


class SimpleDoor(ABC):
    """`match_prefix` and `insert_prefix` over the contract's calls, in the default namespace."""

    block_size: int
    max_blocks: int | None

    @property
    @abstractmethod
    def num_cached(self) -> int: ...

    @property
    @abstractmethod
    def num_evictable(self) -> int: ...

    @abstractmethod
    def lookup(self, tokens: Tokens) -> PrefixHit: ...

    @abstractmethod
    def block_ids(self, hit: PrefixHit) -> BlockIds: ...

    @abstractmethod
    def insert(self, tokens: Tokens, block_ids: Sequence[int]) -> InsertResult: ...

    @abstractmethod
    def evict(self, num_blocks: int) -> BlockIds | None: ...

    def match_prefix(self, token_ids: Sequence[int]) -> PrefixMatch:
        hit = self.lookup(Tokens(token_ids))
        return PrefixMatch(hit.num_tokens, self.block_ids(hit).tolist())

    def insert_prefix(self, token_ids: Sequence[int], block_ids: Sequence[int]) -> list[int]:
        """Register the whole blocks of a sequence; returns the blocks that the caller has to free: duplicates
        of what was there, and what `max_blocks` pushed out."""
        tokens = Tokens(token_ids)
        result = self.insert(tokens, block_ids[: len(tokens) // self.block_size])
        resident = self.block_ids(result.hit)[: result.num_existing]
        duplicates = [new for new, old in zip(block_ids, resident, strict=False) if new != old]
        excess = max(0, self.num_cached - self.max_blocks) if self.max_blocks is not None else 0
        return duplicates + list(self.evict(min(excess, self.num_evictable)) or ())
