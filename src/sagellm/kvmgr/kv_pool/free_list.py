"""`FreeListPool`: free blocks in one array, taken and given back as slices."""

from __future__ import annotations

from array import array

from sagellm.core.clock import Clock
from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.kv_pool import BlockQuota
from sagellm.core.types import BlockIds
from sagellm.kvmgr.kv_pool.pool_base import PoolBase


class FreeListPool(PoolBase):
    """Implements `KVPool`. The bytes may live on any device.

    A fresh pool gives consecutive blocks, low ids first; later the blocks that were freed last go first.
    Threads and counters: see `PoolBase`.
    """

    def __init__(
        self,
        total_blocks: int,
        block_size: int = 16,
        clock: Clock | None = None,
        quota: BlockQuota | None = None,
    ) -> None:
        super().__init__(total_blocks, block_size, clock, quota)
        # The ids from index `_used` on are free. The array keeps its length: a change would reallocate it,
        # and slice assignment only copies memory.
        self._free = array("i", range(total_blocks))

    def _take(self, num_blocks: int) -> BlockIds:
        used = self._used
        return self._free[used : used + num_blocks]

    def _put(self, block_ids: BlockIds) -> None:
        used = self._used
        self._free[used - len(block_ids) : used] = block_ids

    def _free_ids(self) -> BlockIds:
        return self._free[self._used :]

    def _set_free(self, block_ids: BlockIds) -> None:
        self._free[self._used :] = block_ids

    def _check_free(self) -> None:
        if len(self._free) != self.total_blocks:
            raise BookkeepingError(
                f"the free list has {len(self._free)} places for {self.total_blocks} blocks"
            )


PLUGIN = FreeListPool
