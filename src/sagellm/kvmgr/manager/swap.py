"""KV of preempted requests in host memory: saved when they leave, brought back when they come again.

What a preemption frees is the end of the request's table: blocks of its own, and those of its pinned prefix
that nobody else uses. That part is copied to host blocks by the plan that preempts, before anything in it
writes. It is copied back by the plan that admits the request again, if the index still has what comes before
it; what of it the index has too is not. (Kwon et al., "Efficient Memory Management for Large Language Model
Serving with PagedAttention", 2023, swap whole tables.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sagellm.core.blocks import Tier, cdiv
from sagellm.core.errors import BookkeepingError, CapacityError
from sagellm.core.plan import BlockCopy
from sagellm.core.protocols.kv_pool import Allocation, KVPool
from sagellm.core.protocols.prefix_cache import PrefixHit
from sagellm.core.types import Tokens


@dataclass(slots=True)
class SavedKV:
    """`blocks` hold the KV of a request from block `first` of its table on, up to its first `num_tokens`
    tokens, which are the first of `tokens`. `is_written`: the step that copies them has been executed."""

    tokens: Tokens
    blocks: Allocation
    first: int
    num_tokens: int
    is_written: bool = False


class SwapSpace:
    """`pool`: the host blocks, all free. `block_s`: seconds to copy one of them, one way."""

    def __init__(self, pool: KVPool, block_s: float = 0.0) -> None:
        self.block_s = block_s
        self._block_size = pool.block_size
        self._pool = pool
        self._saved: dict[str, SavedKV] = {}
        self.num_changes = 0

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_used(self) -> int:
        return self._pool.total_blocks - self._pool.num_free

    def save(
        self, request_id: str, tokens: Tokens, table: Sequence[int], first: int, num_tokens: int
    ) -> list[BlockCopy]:
        """The copies that save the KV of the first `num_tokens` tokens from block `first` on. Until `written`
        it counts on a step that may still fail. Raises `CapacityError` where there is no room."""
        stop = cdiv(num_tokens, self._block_size)
        blocks = self._pool.allocate(stop - first, request_id)
        if blocks is None:
            raise CapacityError(
                f"{request_id}: {stop - first} host blocks asked for, {self.num_free} are free"
            )
        self._saved[request_id] = SavedKV(tokens, blocks, first, num_tokens)
        self.num_changes += 1
        pairs = zip(table[first:stop], blocks.block_ids, strict=True)
        return [BlockCopy(Tier.HBM, source, Tier.DRAM, target) for source, target in pairs]

    def written(self, request_ids: Iterable[str]) -> None:
        """The copies of these have been made."""
        for name in request_ids:
            if name in self._saved:
                self._saved[name].is_written = True

    def failed(self, request_ids: Iterable[str]) -> None:
        """The copies of these have not been made, or nobody knows."""
        for name in request_ids:
            saved = self._saved.get(name)
            if saved is not None and not saved.is_written:
                self.drop(name)

    def drop(self, request_id: str) -> None:
        """The request runs again with what it found, or has ended. No copy that is planned later can come
        before those that are planned: the blocks are free at once."""
        saved = self._saved.pop(request_id, None)
        if saved is not None:
            self._pool.free(saved.blocks)
            self.num_changes += 1

    def lengthen(self, hit: PrefixHit, request_id: str) -> PrefixHit:
        """The hit, and what more is saved of the request, not of another of that name."""
        saved = self._saved.get(request_id)
        if saved is None or saved.tokens is not hit.tokens or saved.first > hit.num_blocks:
            return hit
        num_swapped = saved.num_tokens - hit.num_tokens
        return hit._replace(num_tokens=saved.num_tokens, num_swapped=num_swapped) if num_swapped > 0 else hit

    def copies_back(self, hit: PrefixHit, request_id: str, table: Sequence[int]) -> list[BlockCopy]:
        """What fills the table behind the blocks that the index has."""
        saved = self._saved.get(request_id)
        if saved is None:
            raise BookkeepingError(f"{request_id} counts on {hit.num_swapped} tokens that nobody has saved")
        first, stop = hit.num_blocks, cdiv(hit.num_tokens, self._block_size)
        sources = saved.blocks.block_ids[first - saved.first : stop - saved.first]
        pairs = zip(sources, table[first:stop], strict=True)
        return [BlockCopy(Tier.DRAM, source, Tier.HBM, target) for source, target in pairs]

    def check(self) -> None:
        """Raise `BookkeepingError` where records and host blocks disagree."""
        self._pool.check({})
        held = sum(len(one.blocks.block_ids) for one in self._saved.values())
        if held != self.num_used:
            raise BookkeepingError(f"{self.num_used} host blocks are in use, requests have saved {held}")
