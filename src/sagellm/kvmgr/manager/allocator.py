"""`BlockAllocator` gives running requests their blocks, and evicts where too few are free.

Blocks behind a sliding window go first, then cached blocks.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from sagellm.core.blocks import cdiv
from sagellm.core.errors import CapacityError
from sagellm.core.protocols.kv_pool import BlockQuota, KVPool
from sagellm.core.protocols.prefix_cache import EvictedPath, Evictor, PrefixReuseIndex
from sagellm.core.types import NO_ACCOUNT, Account, BlockIds, append_each
from sagellm.kvmgr.manager.page_groups import BEHIND_WINDOW, PageGroups
from sagellm.kvmgr.manager.prefix_sharing import SharedTails
from sagellm.kvmgr.manager.tables import INDEX_OWNER, BlockTables, RequestBlocks, free_leading

MAX_EXTRA, BLOCKS_PER_EXTRA = 32, 1024
"""Blocks evicted together: one per 1,024 of the pool, at most 32; so 0.1 % of the cache may go early."""
MAX_PATH_BLOCKS = 1 << 14
"""In the paths that `evict_paths` returns, or some more: the step looks up each path in every tier."""


class BlockStates(NamedTuple):
    """Blocks by state; they sum to the pool's total."""

    active: int
    cached: int
    free: int


class Fragmentation(NamedTuple):
    """Shares of memory that hold no token, 0 to 1.

    `internal`: of the slots in blocks of running requests, those behind the last token. `external`: 1 minus
    the longest run of free blocks over all free blocks.
    """

    internal: float
    external: float


class SlidingWindows:
    """Blocks of running requests that no later token attends to.

    `width`: no token of any layer attends further back than this many tokens; None: some layer attends to
    all before it. With several KV `groups`, those behind the first have windows of their own.
    """

    def __init__(
        self,
        width: int | None,
        tables: BlockTables,
        tails: SharedTails,
        pool: KVPool,
        groups: PageGroups | None = None,
    ) -> None:
        self.width = width
        self._groups = groups
        self._tables = tables
        self._tails = tails
        self._pool = pool

    def num_behind(self, blocks: RequestBlocks) -> int:
        """Own blocks of a request that can be freed.

        A hit may count on the block that others of its group copy. In a single KV group, that block holds
        all behind it.
        """
        is_donor, groups = blocks in self._tails, self._groups
        if groups is not None:
            return groups.num_passed_of(blocks) - (groups.num_passed_of_tail(blocks) if is_donor else 0)
        if self.width is None or is_donor:
            return 0
        behind = (blocks.state.num_computed - self.width + 1) // self._pool.block_size
        return max(0, min(behind - blocks.num_shared, len(blocks.own.block_ids)))

    def total_behind(self) -> int:
        if self.width is not None:
            return sum(map(self.num_behind, self._tables))
        if self._groups is None:
            return 0
        return self._groups.num_passed - sum(map(self._groups.num_passed_of_tail, self._tails.donors()))

    def behind_by_account(self) -> Iterator[tuple[Account, int]]:
        """The same for each request, with the account that pays for its blocks."""
        for blocks in self._tables if self.width is not None else ():
            yield blocks.own.account, self.num_behind(blocks)

    def free_blocks(self, num_blocks: int, account: Account, quota: BlockQuota | None) -> None:
        """Free blocks until the account has room for so many.

        A request that loses blocks of the only group leaves nothing in the index.
        """
        if self._groups is not None:
            self._groups.free_passed(num_blocks, self._tails.donors())
            return
        for blocks in self._tables if self.width is not None else ():
            if (quota is None or quota.headroom(account) >= num_blocks) and self._pool.num_free >= num_blocks:
                return
            behind = self.num_behind(blocks)
            if behind:
                free_leading(self._pool, blocks.own, behind, BEHIND_WINDOW)
                blocks.num_shared += behind
                blocks.is_windowed = True


class BlockAllocator:
    """Appends blocks to block tables, and evicts where too few are free.

    Without a quota the eviction policy chooses the blocks; with a quota, the quota names the accounts that
    lose blocks, and the policy chooses among the blocks of each. `num_evicted`: evicted blocks by cause.
    `num_leaving`: evicted blocks that are read before they are free; `num_given_back`: how often such became
    free. `num_changes` counts the times that cached blocks may have gone.
    """

    def __init__(
        self,
        index: PrefixReuseIndex,
        pool: KVPool,
        quota: BlockQuota | None = None,
        windows: SlidingWindows | None = None,
        groups: PageGroups | None = None,
    ) -> None:
        self.index = index
        self.pool = pool
        self.quota = quota
        self.num_evicted: dict[str, int] = {}
        self.num_changes = 0
        self._in_need: RequestBlocks | None = None
        self._windows = windows
        if groups is not None and groups.checkpoints is not None:
            groups.checkpoints.make_room = self.drop_checkpoints
        self._groups = groups
        self._num_together = min(MAX_EXTRA, pool.total_blocks // BLOCKS_PER_EXTRA)
        self._unreturned: list[tuple[BlockIds, Account]] = []  # out of the index, not yet back in the pool
        self._leaving: dict[int, list[tuple[BlockIds, Account]]] = {}
        """The same, by round of `evict_paths`, until they have been read."""
        self.num_leaving = self.num_given_back = 0

    @property
    def evictor(self) -> Evictor:
        """The call of the last request that needed room."""
        if self._in_need is None:
            return Evictor()
        request = self._in_need.state.request
        call = request.client[-1] if request.client else request.request_id
        return Evictor(call, request.namespace.tenant)

    def append_blocks(self, blocks: RequestBlocks, num_blocks: int) -> BlockIds:
        """Append so many blocks to the table of a request, in each KV group.

        Returns them, in the order of `RequestBlocks.table`. Raises `CapacityError`.
        """
        own, groups = blocks.own, self._groups
        wanted = num_blocks if groups is None else num_blocks * groups.per_block
        if self.pool.num_free < wanted or self.quota is not None:
            self._in_need = blocks
            self.make_room(wanted, own.account)
        taken = self.pool.append_blocks(own, num_blocks) if self.pool.num_free >= wanted else None
        if taken is None:
            raise CapacityError(
                f"{own.owner}: {wanted} blocks asked for, {self.pool.num_free} could be made free",
                own.owner,
                wanted,
            )
        blocks.block_ids += taken
        if groups is None:
            return taken
        try:
            groups.append(blocks, num_blocks)
        except Exception:
            self.pool.shrink(blocks.own, num_blocks)
            del blocks.block_ids[len(blocks.block_ids) - num_blocks :]
            raise
        return blocks.table(len(blocks.block_ids) - num_blocks)

    def take_last(self, blocks: RequestBlocks, num_blocks: int) -> None:
        """Undo `append_blocks`."""
        self.pool.shrink(blocks.own, num_blocks)
        del blocks.block_ids[len(blocks.block_ids) - num_blocks :]
        if self._groups is not None:
            self._groups.shrink(blocks, num_blocks)

    def append_block_to_each(self, requests: Sequence[RequestBlocks]) -> BlockIds:
        """Append one block to the table of each request; returns them in that order.

        Raises `CapacityError`; then nothing but evictions has happened.
        """
        if self.quota is not None or self._groups is not None:  # each is charged for its own blocks
            return self._append_one_by_one(requests)
        if self.pool.num_free < len(requests):
            self._in_need = requests[-1]
            self.make_room(len(requests), NO_ACCOUNT)
        taken = self.pool.append_block_to_each([blocks.own for blocks in requests])
        if taken is None:
            raise CapacityError(
                f"{len(requests)} requests need a block each, {self.pool.num_free} could be made free",
                requests[-1].own.owner,
            )
        append_each([blocks.block_ids for blocks in requests], taken)
        return taken

    def make_room(self, num_blocks: int, account: Account) -> None:
        """Have `num_blocks` free for the account, if that is possible.

        In a pool of many thousand blocks a few more are evicted at once, up to 32, so that a decode step that
        needs a single block seldom asks the policy (`sagellm bench micro eviction`). Pools below 2,048 blocks
        evict exactly the missing ones.
        """
        self.num_changes += 1
        if self._windows is not None:
            self._windows.free_blocks(num_blocks, account, self.quota)
        if self.quota is not None:
            self._reclaim(self.quota, num_blocks, account)
            return
        if self._groups is not None:
            self._make_room_in_groups(self._groups, num_blocks)
            return
        missing = num_blocks - self.pool.num_free
        if missing > 0:
            evicted = self.index.evict(max(missing, min(self._num_together, self.index.num_evictable)))
            if evicted is not None:
                self._return(evicted, NO_ACCOUNT, "capacity")

    def evict_paths(self, num_blocks: int) -> tuple[list[EvictedPath], Callable[[], None]]:
        """Evict blocks that are read before they are free.

        Returns their paths, and what gives them back to the pool. At most `num_blocks`, and fewer where their
        paths are long; with a quota, of the accounts that would lose them if a newcomer asked.
        """
        self.num_changes += 1
        number, paths = self.num_changes, list[EvictedPath]()
        self._in_need, parts = None, self._leaving.setdefault(number, [])
        asked: list[tuple[Account | None, int]] = [(None, num_blocks)]
        if self.quota is not None:
            evictable, given = self._evictable(), None
            while num_blocks and not given:  # where guarantees spare some, fewer
                given = self.quota.reclaim(NO_ACCOUNT, num_blocks, evictable)
                num_blocks //= 2
            asked = [*(given or {}).items()]
        left = MAX_PATH_BLOCKS
        try:
            for account, count in asked:
                if left <= 0:
                    break
                evicted, found = self.index.evict_paths(count, account, max_path_blocks=left)
                left -= sum(len(path.block_ids) for path in found)
                parts.append((evicted, account or NO_ACCOUNT))
                self._count_evicted(len(evicted), "ahead")
                self.num_leaving += len(evicted)
                paths += found
        except Exception:
            self._give_back(number)
            raise
        return paths, partial(self._give_back, number)

    def _give_back(self, number: int) -> None:
        self.num_changes += 1
        self.num_given_back += 1
        for block_ids, account in self._leaving.pop(number):
            self.num_leaving -= len(block_ids)
            self.pool.take_back(INDEX_OWNER, block_ids, account)

    def make_room_below_ceilings(self, num_blocks: int, account: Account) -> bool:
        """Evict cached blocks under the account's ceilings, even guaranteed ones; returns whether any went.

        For a request that could not run otherwise though nothing else runs. What is guaranteed stays
        available, as free blocks.
        """
        quota, num_evicted = self.quota, 0
        if quota is None:
            return False
        self.num_changes += 1
        for giver, count in sorted(self._evictable().items(), key=lambda item: (item[0] == account, item)):
            left = quota.headrooms(account)
            shared = left.keys() & quota.headrooms(giver).keys()
            missing = max((num_blocks - left[name] for name in shared), default=0)
            if missing > 0:
                evicted = self._evict_from(giver, min(count, missing), "quota")
                num_evicted += evicted or self._evict_guaranteed(missing)
        return num_evicted > 0

    def clear(self) -> int:
        """Evict every cached block that no request uses; returns how many."""
        self.num_changes += 1
        self._in_need, num_free = None, self.pool.num_free
        if self._groups is not None:
            for kept in (False, True):
                self._groups.free_detached(self._groups.shed(self.pool.total_blocks, kept=kept))
            if self._groups.checkpoints is not None:
                pages = self._groups.checkpoints.clear()
                self._count_evicted(len(pages), "cleared")
                self._groups.free_detached(pages)
                self._groups.checkpoints.drop_pending(self.pool.total_blocks)
                while gone := self._groups.checkpoints.evict_unneeded():
                    self._return(gone, NO_ACCOUNT, "cleared")
        if self.quota is not None:
            while sum(self._evict_from(*item, "cleared") for item in self._evictable().items()):
                pass
        self._return(self.index.clear(), NO_ACCOUNT, "cleared")
        return self.pool.num_free - num_free

    def blocks_of_index(self) -> BlockIds:
        """Every block that the pool counts as held by the index."""
        ids = self.index.all_block_ids()
        if self._groups is not None:
            ids += self._groups.all_pages()
        for block_ids, _ in itertools.chain(self._unreturned, *self._leaving.values()):
            ids += block_ids
        return ids

    # -- inside

    def _append_one_by_one(self, requests: Sequence[RequestBlocks]) -> BlockIds:
        taken, num_done = array("i"), 0
        try:
            for blocks in requests:
                taken += self.append_blocks(blocks, 1)
                num_done += 1
        except Exception:
            for blocks in requests[:num_done]:
                self.take_last(blocks, 1)
            raise
        return taken

    def _make_room_in_groups(self, groups: PageGroups, num_pages: int) -> None:
        """Have so many pages free. What no prefix needs goes first, then whole blocks, then kept windows."""
        pool, index = self.pool, self.index
        groups.free_detached(groups.shed(num_pages - pool.num_free))
        self.drop_checkpoints(num_pages)
        while (missing := num_pages - pool.num_free) > 0 and index.num_evictable:
            wanted = max(cdiv(missing, groups.per_block), self._num_together)
            evicted = index.evict(min(wanted, index.num_evictable))
            self._return(evicted or array("i"), NO_ACCOUNT, "capacity")
        groups.free_detached(groups.shed(num_pages - pool.num_free, kept=True))
        if groups.checkpoints is not None:
            groups.checkpoints.drop_pending(num_pages - pool.num_free)

    def drop_checkpoints(self, num_pages: int) -> None:
        """Drop checkpoints, and the blocks that only they needed, until so many are free."""
        groups = self._groups
        if groups is None or groups.checkpoints is None:
            return
        while self.pool.num_free < num_pages:
            self.num_changes += 1
            unneeded = groups.checkpoints.evict_unneeded()
            if unneeded:
                self._return(unneeded, NO_ACCOUNT, "capacity")
            elif groups.checkpoints.num_droppable:
                pages = groups.checkpoints.drop_least()
                self._count_evicted(len(pages), "capacity")
                groups.free_detached(pages)
            else:
                return

    def _reclaim(self, quota: BlockQuota, num_blocks: int, account: Account) -> None:
        while (missing := num_blocks - min(self.pool.num_free, quota.headroom(account))) > 0:
            given = quota.reclaim(account, num_blocks, self._evictable(), self.pool.num_free)
            if not given:
                return
            for giver, count in given.items():
                missing -= self._evict_from(giver, count, "quota" if giver != account else "capacity")
            if missing > 0 and not self._evict_guaranteed(missing):
                return

    def _evict_guaranteed(self, num_blocks: int) -> int:
        """Evict blocks that the quota spares but others depend on; returns how many.

        Blocks that the quota named lead to cached blocks of other accounts, and only the end of a branch can
        be evicted. The account with most evictable blocks comes first.
        """
        freed = 0
        for account, _ in sorted(self._evictable().items(), key=lambda item: (-item[1], item[0])):
            freed += self._evict_from(account, num_blocks - freed, "quota")
        return freed

    def _evictable(self) -> dict[Account, int]:
        return {account: count for account, count in self.index.evictable_by_account().items() if count}

    def _evict_from(self, account: Account, num_blocks: int, cause: str) -> int:
        evicted = self.index.evict_from(account, num_blocks, cause)
        self._return(evicted, account, cause)
        return len(evicted)

    def _count_evicted(self, num_blocks: int, cause: str) -> None:
        self.num_evicted[cause] = self.num_evicted.get(cause, 0) + num_blocks

    def _return(self, block_ids: BlockIds, account: Account, cause: str) -> None:
        """Return evicted blocks to the pool, and those that an exception kept back."""
        if self._groups is not None:
            block_ids = block_ids + self._groups.evicted(block_ids)
        if block_ids:
            self._count_evicted(len(block_ids), cause)
            self._unreturned.append((block_ids, account))
        while self._unreturned:
            self.pool.take_back(INDEX_OWNER, *self._unreturned[-1])
            self._unreturned.pop()
