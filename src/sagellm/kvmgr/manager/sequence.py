"""What one running request holds, and the figures over all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sagellm.core.errors import BookkeepingError
from sagellm.core.plan import RequestState
from sagellm.core.protocols.kv_pool import Allocation
from sagellm.core.protocols.prefix_cache import PrefixHit
from sagellm.core.types import BlockIds


class BlockStates(NamedTuple):
    """Blocks by state; they sum to the pool's total."""

    active: int
    cached: int
    free: int


class Fragmentation(NamedTuple):
    """`internal`: share of the slots in running requests' blocks that hold no token (their last blocks);
    `external`: 1 - longest run of free blocks / free blocks. Both 0 to 1."""

    internal: float
    external: float


@dataclass(slots=True, eq=False)
class SequenceKV:
    """The KV of one running request.

    `block_ids[:num_shared]` belong to the index, where `hit` pins them; the blocks behind them are `own`, one
    for one. Where a sliding window has left blocks behind, `block_ids[:num_shared]` are void (`is_windowed`).
    `num_reused_blocks`: what it found in the index when it was admitted. `changed_from`: the backend's table
    is out of date from this index on, for a change that came after bind `changed_at`.
    """

    state: RequestState
    hit: PrefixHit
    block_ids: BlockIds
    own: Allocation
    num_shared: int
    num_reused_blocks: int
    is_windowed: bool = False
    changed_from: int | None = None
    changed_at: int = 0

    def behind_window(self, window: int, block_size: int) -> int:
        """Own blocks of the request that no token to come attends to."""
        dead = (self.state.num_computed - window + 1) // block_size
        return max(0, min(dead - self.num_shared, len(self.own.block_ids)))

    def check(self, indexed: BlockIds) -> None:
        """Raise `BookkeepingError` unless the table is the pinned prefix's blocks and then its own."""
        table, shared, name = self.block_ids, self.num_shared, self.state.request_id
        if table[shared:] != self.own.block_ids:
            raise BookkeepingError(f"{name}: the table and the request's own blocks differ")
        if not self.is_windowed and (self.hit.num_blocks != shared or table[:shared] != indexed):
            raise BookkeepingError(f"{name}: the table and the blocks of its pinned prefix differ")
