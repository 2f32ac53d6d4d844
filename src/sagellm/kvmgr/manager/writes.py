"""`TierWrites`: when tiers get the KV of the device.

Write-through: as soon as it is computed. Then eviction is instant, and a crash loses little. Write-back: when
it is about to be evicted. Then a tier does not repeat what the device has, and nothing is written while the
device has room.
"""

from __future__ import annotations

from sagellm.core.blocks import cdiv
from sagellm.core.plan import RequestState
from sagellm.core.protocols.eviction import Use
from sagellm.core.protocols.kv_tiers import KVTiers
from sagellm.kvmgr.manager.allocator import BlockAllocator
from sagellm.kvmgr.manager.tables import RequestBlocks

STEPS_AHEAD = 2
"""Steps for whose new blocks there is room while evicted ones are copied."""
MAX_FREE_SHARE = 0.25
"""Of the pool, so that a small one still caches."""
HYSTERESIS = 1.5
"""Times the watermark: so many blocks are free after blocks were evicted. Decode takes a block or two in a
step, and a save of a few blocks costs as much as one of a hundred."""


class TierWrites:
    """Hands paths of the device to tiers. `advance` is called in each step, and when requests have ended.

    `free_watermark`: with write-back, the share of the pool that is kept free, by saving and evicting what
    the eviction policy chooses; None: write-through. `step_tokens`: the most that a step computes. With
    write-back, blocks that are wanted faster than they can be copied are evicted without being saved.
    """

    def __init__(
        self, tiers: KVTiers, allocator: BlockAllocator, free_watermark: float | None, step_tokens: int
    ) -> None:
        self.tiers, self._allocator, self._pool = tiers, allocator, allocator.pool
        self.is_write_back = free_watermark is not None
        total = self._pool.total_blocks
        wanted = max(
            int((free_watermark or 0.0) * total), STEPS_AHEAD * cdiv(step_tokens, self._pool.block_size)
        )
        self.fewest_free = max(1, min(wanted, int(MAX_FREE_SHARE * total)))
        """Blocks of the watermark."""

    def computed(self, blocks: RequestBlocks) -> None:
        """The prompt of a running request is whole; its path is pinned."""
        if not self.is_write_back:
            self.tiers.offer(blocks.hit, blocks.own.account)

    def leaves(self, state: RequestState, blocks: RequestBlocks, use: Use, *, ended: bool) -> None:
        """A request leaves the batch. If it has not `ended`, its KV is wanted again soon."""
        if not ended:
            self.tiers.hold(state.request_id, blocks.hit, blocks.own.account, use)
        elif not self.is_write_back:
            self.tiers.offer(blocks.hit, blocks.own.account, use)

    def advance(self) -> None:
        """Write-back: keep to the watermark, counting blocks that are on their way out."""
        if self.is_write_back and self._num_free_soon < self.fewest_free:
            self._save_and_evict(int(HYSTERESIS * self.fewest_free))

    # -- room for loads

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_given_back(self) -> int:
        """How often copies of evicted blocks have ended."""
        return self._allocator.num_given_back

    @property
    def num_leaving(self) -> int:
        """Evicted blocks that are free once they are copied."""
        return self._allocator.num_leaving

    def lacks_room(self, num_blocks: int) -> bool:
        """Whether a load of so many blocks has room only once others are saved."""
        can_have = self._num_free_soon + self._allocator.index.num_evictable
        return self.is_write_back and self._pool.num_free < num_blocks <= can_have

    def make_room(self, num_blocks: int) -> bool:
        """Save and evict until so many are free, as far as one step may.

        Returns whether more will be free: when copies have ended, or after the next call.
        """
        before = self._pool.num_free
        self._save_and_evict(num_blocks)
        return self.num_leaving > 0 or before < self._pool.num_free < num_blocks

    # -- inside

    @property
    def _num_free_soon(self) -> int:
        return self._pool.num_free + self.num_leaving

    def _save_and_evict(self, num_free: int) -> None:
        """Save and evict until so many are free, or will be.

        Fewer where tiers would drop some, or paths are long (`BlockAllocator.evict_paths`).
        """
        num_evictable = self._allocator.index.num_evictable
        num_blocks = min(num_free - self._num_free_soon, self.tiers.num_acceptable, num_evictable)
        if num_blocks > 0:
            paths, give_back = self._allocator.evict_paths(num_blocks)
            self.tiers.save_evicted(paths, give_back)
