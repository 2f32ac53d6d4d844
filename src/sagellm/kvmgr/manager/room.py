"""Making room: which cached blocks go so that an account can have what it needs."""

from __future__ import annotations

from sagellm.core.protocols.kv_pool import BlockQuota, KVPool
from sagellm.core.protocols.prefix_cache import PrefixReuseIndex
from sagellm.core.types import NO_ACCOUNT, Account, BlockIds

INDEX_OWNER = "prefix index"
MOST_AHEAD, BLOCKS_PER_AHEAD = 32, 1024
"""Blocks evicted together: one per 1,024 of the pool, 32 at most; so 0.1 % of the cache may go early."""


class Room:
    """Moves blocks from the index back to the pool. Without a quota, whatever the policy chooses; with one,
    from the accounts that the quota names."""

    def __init__(self, index: PrefixReuseIndex, pool: KVPool, quota: BlockQuota | None) -> None:
        self.index = index
        self.pool = pool
        self.quota = quota
        self.ahead = min(MOST_AHEAD, pool.total_blocks // BLOCKS_PER_AHEAD)
        self.num_evicted: dict[str, int] = {}  # blocks by cause
        self._on_the_way: list[tuple[BlockIds, Account]] = []  # out of the index, not yet back in the pool

    def make(self, num_blocks: int, account: Account) -> None:
        """Have `num_blocks` free for the account, evicting what is missing, if that can be.

        In a pool of many thousands a few blocks more go at once (`ahead`), so that a decode step that needs a
        single one seldom asks the policy; pools below 2,048 blocks evict exactly what is missing.
        """
        if self.quota is not None:
            self._reclaim(self.quota, num_blocks, account)
            return
        short = num_blocks - self.pool.num_free
        if short > 0:
            evictable = self.index.num_evictable
            evicted = self.index.evict(max(short, min(self.ahead, evictable)))
            if evicted is not None:
                self._count(evicted, "capacity")
                self._give_back(evicted, NO_ACCOUNT)

    def make_below_ceilings(self, quota: BlockQuota, num_blocks: int, account: Account) -> bool:
        """Evict cached blocks that count on a ceiling which leaves the account less than `num_blocks`, also
        within guarantees: what is guaranteed stays available, as free blocks. For a request that could not
        run otherwise though nothing else runs. Returns whether any went."""
        num_evicted = 0
        for giver, count in sorted(self._evictable().items(), key=lambda one: (one[0] == account, one)):
            left = quota.headrooms(account)
            shared = left.keys() & quota.headrooms(giver).keys()
            short = max((num_blocks - left[name] for name in shared), default=0)
            if short > 0:
                num_evicted += self._evict_from(giver, min(count, short), "quota") or self._dig(short)
        return num_evicted > 0

    def clear(self) -> int:
        """Free every block that nobody uses; returns how many."""
        freed = given = 0
        if self.quota is not None:
            while given := sum(self._evict_from(*one, "cleared") for one in self._evictable().items()):
                freed += given
        rest = self.index.clear()
        self._count(rest, "cleared")
        self._give_back(rest, NO_ACCOUNT)
        return freed + len(rest)

    def held(self) -> BlockIds:
        """Every block that the pool has lent to the index."""
        ids = self.index.all_block_ids()
        for block_ids, _ in self._on_the_way:
            ids += block_ids
        return ids

    def _reclaim(self, quota: BlockQuota, num_blocks: int, account: Account) -> None:
        while (short := num_blocks - min(self.pool.num_free, quota.headroom(account))) > 0:
            gifts = quota.reclaim(account, num_blocks, self._evictable(), self.pool.num_free)
            if not gifts:
                return
            missing = short - sum(
                self._evict_from(giver, count, "quota" if giver != account else "capacity")
                for giver, count in gifts.items()
            )
            if missing > 0 and not self._dig(missing):
                return

    def _dig(self, num_blocks: int) -> int:
        """Blocks that the quota named lead to cached blocks of accounts that it spares: those go first, since
        no request could ever have the others otherwise. Returns how many went."""
        freed = 0
        for account, _ in sorted(self._evictable().items(), key=lambda one: (-one[1], one[0])):
            freed += self._evict_from(account, num_blocks - freed, "quota")
        return freed

    def _evictable(self) -> dict[Account, int]:
        return {one: count for one, count in self.index.evictable_by_account().items() if count}

    def _evict_from(self, account: Account, num_blocks: int, cause: str) -> int:
        evicted = self.index.evict_from(account, num_blocks, cause)
        self._count(evicted, cause)
        self._give_back(evicted, account)
        return len(evicted)

    def _count(self, block_ids: BlockIds, cause: str) -> None:
        if block_ids:
            self.num_evicted[cause] = self.num_evicted.get(cause, 0) + len(block_ids)

    def _give_back(self, block_ids: BlockIds, account: Account) -> None:
        """To the pool, with what an exception kept from getting there the last time."""
        if block_ids:
            self._on_the_way.append((block_ids, account))
        while self._on_the_way:
            self.pool.take_back(INDEX_OWNER, *self._on_the_way[-1])
            self._on_the_way.pop()
