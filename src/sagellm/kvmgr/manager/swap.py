"""`SwapSpace`: KV of preempted requests in host memory, until they run again.

A preemption frees the end of a request's block table: its own blocks, and those of its pinned prefix that no
other request uses. The plan that preempts copies that part to host blocks, before anything in it writes. The
plan that admits the request again copies back what the index does not have, if the index still has what comes
before it. (Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
2023, swap whole tables.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sagellm.core.blocks import Tier, cdiv
from sagellm.core.errors import BookkeepingError, CapacityError
from sagellm.core.plan import BlockCopy
from sagellm.core.protocols.kv_pool import Allocation, KVPool
from sagellm.core.protocols.prefix_cache import PrefixHit
from sagellm.core.types import Tokens


@dataclass(slots=True)
class SavedKV:
    """Host blocks with KV of a request, from block `first` of its table.

    They end with its first `num_tokens` tokens, the first of `tokens`. `is_copied`: the step that copies the
    blocks has been executed.
    """

    tokens: Tokens
    blocks: Allocation
    first: int
    num_tokens: int
    is_copied: bool = False


class SwapSpace:
    """Owns the host blocks of `pool`, all free at first. `block_s`: seconds to copy a block, one way.

    `num_changes` counts what was saved and dropped.
    """

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
        """The copies that save KV from block `first` up to token `num_tokens`.

        Their step may still fail, until `copied`. Raises `CapacityError` if the blocks do not fit.
        """
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

    def copied(self, request_ids: Iterable[str]) -> None:
        """The step with the copies of these requests has been executed."""
        for request_id in request_ids:
            if request_id in self._saved:
                self._saved[request_id].is_copied = True

    def drop_uncopied(self, request_ids: Iterable[str]) -> None:
        """The step with the copies of these requests has failed or was not executed."""
        for request_id in request_ids:
            saved = self._saved.get(request_id)
            if saved is not None and not saved.is_copied:
                self.drop(request_id)

    def drop(self, request_id: str) -> None:
        """The request runs again or has ended. Its host blocks are free at once: later copies come later."""
        saved = self._saved.pop(request_id, None)
        if saved is not None:
            self._pool.free(saved.blocks)
            self.num_changes += 1

    def extend_hit(self, hit: PrefixHit, request_id: str) -> PrefixHit:
        """Extend a hit by what is saved of this request, not of a namesake."""
        saved = self._saved.get(request_id)
        if saved is None or saved.tokens is not hit.tokens or saved.first > hit.num_blocks:
            return hit
        num_swapped = saved.num_tokens - hit.num_tokens
        if num_swapped <= 0:
            return hit
        return replace(hit, num_tokens=saved.num_tokens, num_swapped=num_swapped)

    def copies_back(self, hit: PrefixHit, request_id: str, table: Sequence[int]) -> list[BlockCopy]:
        """The copies that fill the table behind the blocks that the index has."""
        saved = self._saved.get(request_id)
        if saved is None:
            raise BookkeepingError(f"{request_id} counts on {hit.num_swapped} tokens that are not saved")
        first, stop = hit.num_blocks, cdiv(hit.num_tokens, self._block_size)
        sources = saved.blocks.block_ids[first - saved.first : stop - saved.first]
        pairs = zip(sources, table[first:stop], strict=True)
        return [BlockCopy(Tier.DRAM, source, Tier.HBM, target) for source, target in pairs]

    def check(self) -> None:
        """Raise `BookkeepingError` where records and host blocks disagree."""
        self._pool.check({})
        held = sum(len(saved.blocks.block_ids) for saved in self._saved.values())
        if held != self.num_used:
            raise BookkeepingError(f"{self.num_used} host blocks are in use, requests have saved {held}")
