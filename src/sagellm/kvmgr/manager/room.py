"""Making room: which cached blocks go so that an account can have what it needs."""

from __future__ import annotations

from sagellm.core.protocols.kv_pool import BlockQuota, KVPool
from sagellm.core.protocols.prefix_cache import PrefixReuseIndex
from sagellm.core.types import NO_ACCOUNT, Account, BlockIds

INDEX_OWNER = "prefix index"


class Room:
    """Moves blocks from the index back to the pool. Without a quota, whatever the policy chooses; with one,
    from the accounts that the quota names."""

    def __init__(self, index: PrefixReuseIndex, pool: KVPool, quota: BlockQuota | None) -> None:
        self.index = index
        self.pool = pool
        self.quota = quota
        self._on_the_way: list[tuple[BlockIds, Account]] = []  # out of the index, not yet back in the pool

    def make(self, num_blocks: int, account: Account) -> None:
        """Have `num_blocks` free for the account, evicting exactly what is missing, if that can be."""
        if self.quota is not None:
            self._reclaim(self.quota, num_blocks, account)
            return
        short = num_blocks - self.pool.num_free
        evicted = self.index.evict(short) if short > 0 else None
        if evicted is not None:
            self._give_back(evicted, NO_ACCOUNT)

    def clear(self) -> int:
        """Free every block that nobody uses; returns how many."""
        freed = given = 0
        if self.quota is not None:
            while given := sum(self._evict_from(*one, "cleared") for one in self._evictable().items()):
                freed += given
        rest = self.index.clear()
        self._give_back(rest, NO_ACCOUNT)
        return freed + len(rest)

    def held(self) -> BlockIds:
        """Every block that the pool has lent to the index."""
        ids = self.index.all_block_ids()
        for block_ids, _ in self._on_the_way:
            ids += block_ids
        return ids

    def most_for(self, account: Account, available: int) -> int:
        """The most blocks that the account could be given now, of `available` in all."""
        assert self.quota is not None
        evictable, free = self.index.evictable_by_account(), self.pool.num_free
        if self.quota.reclaim(account, available, evictable, free) is not None:
            return available
        low, high = 0, available - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self.quota.reclaim(account, middle, evictable, free) is None:
                high = middle - 1
            else:
                low = middle
        return low

    def _reclaim(self, quota: BlockQuota, num_blocks: int, account: Account) -> None:
        evictable = self._evictable()
        while num_blocks > min(self.pool.num_free, quota.headroom(account)):
            gifts = quota.reclaim(account, num_blocks, evictable, self.pool.num_free)
            if not gifts:
                return
            for giver, count in gifts.items():
                given = self._evict_from(giver, count, "quota")
                # What does not come now leads to blocks of others or in use: it is not asked for again.
                evictable[giver] = evictable[giver] - given if given == count else 0

    def _evictable(self) -> dict[Account, int]:
        return dict(self.index.evictable_by_account())

    def _evict_from(self, account: Account, num_blocks: int, cause: str) -> int:
        evicted = self.index.evict_from(account, num_blocks, cause)
        self._give_back(evicted, account)
        return len(evicted)

    def _give_back(self, block_ids: BlockIds, account: Account) -> None:
        """To the pool, with what an exception kept from getting there the last time."""
        if block_ids:
            self._on_the_way.append((block_ids, account))
        while self._on_the_way:
            self.pool.take_back(INDEX_OWNER, *self._on_the_way[-1])
            self._on_the_way.pop()
