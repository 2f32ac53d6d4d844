"""`PoolBase` keeps what all pools have in common: allocations, holders, charges of the quota."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from threading import Lock

from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.kv_pool import Allocation, BlockInfo, BlockQuota
from sagellm.core.types import NO_ACCOUNT, Account, BlockIds, append_each


class PoolBase(ABC):
    """A `KVPool` without its free blocks: a subclass keeps them (five abstract methods).

    Any thread may call any method at any time: each is atomic under the pool's one lock, which also guards
    the quota's `charge` and `refund` (so a quota belongs to one pool). One `Allocation`, its `block_ids`
    included, is for one thread at a time. `num_allocated_total`, `num_freed_total` and `peak_used` count
    blocks; `num_refused` counts calls that were answered None.
    """

    def __init__(
        self,
        total_blocks: int,
        block_size: int = 16,
        clock: Clock | None = None,
        quota: BlockQuota | None = None,
    ) -> None:
        if total_blocks < 1 or block_size < 1:
            raise ValueError(
                f"a pool needs at least one block of one token, got {total_blocks} x {block_size}"
            )
        self.total_blocks = total_blocks
        self.block_size = block_size
        self.num_allocated_total = 0
        self.num_refused = 0
        self.peak_used = 0
        self._used = 0
        self._live: dict[Allocation, float] = {}
        self._held: dict[str, int] = {}
        self._readers: Counter[int] = Counter()
        self._unowned: set[int] = set()
        """Blocks that were freed, and are still read."""
        self._now = (clock or MonotonicClock()).now
        self._quota = quota
        self._lock = Lock()

    # -- counts and records

    @property
    def num_free(self) -> int:
        return self.total_blocks - self._used

    @property
    def num_freed_total(self) -> int:
        return self.num_allocated_total - self._used

    @property
    def block_info(self) -> dict[int, BlockInfo]:
        """Records of the blocks in use, by id. Built when asked: not for hot paths."""
        with self._lock:
            not_free = set(range(self.total_blocks)).difference(self._free_ids())
            records = {block: self._info_of_held(block) for block in not_free}
            for allocation, made_s in self._live.items():
                for block in allocation.block_ids:
                    records[block] = BlockInfo(block, allocation.owner, allocation.owner, made_s)
        return records

    def num_held(self, holder: str) -> int:
        return self._held.get(holder, 0)

    def get_utilization(self) -> float:
        return self._used / self.total_blocks

    def get_fragmentation(self) -> float:
        """See `KVPool`. Looks at every free block: for a metrics page, not for every step."""
        with self._lock:
            free = bytearray(self.total_blocks)
            for block in self._free_ids():
                free[block] = 1
        longest = max(map(len, free.split(b"\0")))
        return 1 - longest / free.count(1) if longest else 0.0

    def get_block_info(self, block_id: int) -> BlockInfo:
        """See `KVPool`. The owner of a held block is its holder, or all holders where there are several."""
        if not 0 <= block_id < self.total_blocks:
            raise self._unknown(block_id)
        with self._lock:
            for allocation, made_s in self._live.items():
                if block_id in allocation.block_ids:
                    return BlockInfo(block_id, allocation.owner, allocation.owner, made_s)
            return BlockInfo(block_id, None) if self._is_free(block_id) else self._info_of_held(block_id)

    # -- hot paths: no loop over blocks; `with` costs twice what acquire and release do (bench micro kv_pool)

    def allocate(self, num_blocks: int, owner: str, account: Account = NO_ACCOUNT) -> Allocation | None:
        """Exactly `num_blocks` blocks for `owner`, or None."""
        lock = self._lock
        lock.acquire()
        try:
            now_s = self._now()
            block_ids = self._charge(num_blocks, account)
            if block_ids is None:
                return None
            allocation = Allocation(owner, block_ids, account)
            self._live[allocation] = now_s
            return allocation
        finally:
            lock.release()

    def append_blocks(self, allocation: Allocation, num_blocks: int) -> BlockIds | None:
        lock = self._lock
        lock.acquire()
        try:
            if allocation not in self._live:
                raise _not_live(allocation)
            block_ids = self._charge(num_blocks, allocation.account)
            if block_ids is not None:
                allocation.block_ids.extend(block_ids)
            return block_ids
        finally:
            lock.release()

    def append_block_to_each(self, allocations: Sequence[Allocation]) -> BlockIds | None:
        lock, live = self._lock, self._live
        lock.acquire()
        try:
            if not all(map(live.__contains__, allocations)):
                raise _not_live(next(item for item in allocations if item not in live))
            if self._quota is not None and len({item.account for item in allocations}) > 1:
                raise BookkeepingError("allocations of several accounts cannot grow together")
            block_ids = self._charge(len(allocations), allocations[0].account if allocations else NO_ACCOUNT)
            if block_ids is not None:
                append_each([item.block_ids for item in allocations], block_ids)
            return block_ids
        finally:
            lock.release()

    def shrink(self, allocation: Allocation, num_blocks: int) -> None:
        lock = self._lock
        lock.acquire()
        try:
            if allocation not in self._live:
                raise _not_live(allocation)
            keep = len(allocation.block_ids) - num_blocks
            if keep < 0 or num_blocks < 0:
                raise BookkeepingError(f"{allocation!r} cannot shrink by {num_blocks}")
            self._release(allocation, keep)
        finally:
            lock.release()

    def free(self, allocation: Allocation | Sequence[int], *others: Allocation) -> None:
        """See `KVPool`. An allocation of which single ids leave nothing is freed with the last of them."""
        if not isinstance(allocation, Allocation):
            self._free_single(allocation)
            return
        lock = self._lock
        lock.acquire()
        try:
            if allocation not in self._live:
                raise _not_live(allocation)
            for other in others:
                if other not in self._live:
                    raise _not_live(other)
            self._release(allocation, 0)
            del self._live[allocation]
            for other in others:
                self._release(other, 0)
                del self._live[other]
        finally:
            lock.release()

    def hand_over(self, allocation: Allocation, start: int, stop: int, holder: str) -> BlockIds:
        lock = self._lock
        lock.acquire()
        try:
            if allocation not in self._live:
                raise _not_live(allocation)
            if not 0 <= start <= stop <= len(allocation.block_ids):
                raise BookkeepingError(
                    f"{allocation!r} has no blocks [{start}, {stop}) to hand to {holder!r}"
                )
            block_ids = allocation.block_ids[start:stop]
            del allocation.block_ids[start:stop]
            self._held[holder] = self._held.get(holder, 0) + stop - start
            return block_ids
        finally:
            lock.release()

    def hand_back(self, holder: str, block_ids: BlockIds, allocation: Allocation, start: int) -> None:
        with self._lock:
            if allocation not in self._live:
                raise _not_live(allocation)
            has = self.num_held(holder)
            if len(block_ids) > has:
                raise BookkeepingError(f"{holder!r} holds {has} blocks and hands back {len(block_ids)}")
            if not 0 <= start <= len(allocation.block_ids):
                raise BookkeepingError(f"{allocation!r} has no place {start} to take blocks at")
            allocation.block_ids[start:start] = block_ids
            self._held[holder] = has - len(block_ids)

    def take_back(self, holder: str, block_ids: BlockIds, account: Account = NO_ACCOUNT) -> None:
        num_blocks = len(block_ids)
        lock = self._lock
        lock.acquire()
        try:
            has = self._held.get(holder, 0)
            if num_blocks > has:
                raise BookkeepingError(f"{holder!r} holds {has} blocks and gives back {num_blocks}")
            quota = self._quota
            if quota is not None:
                self._check_charged({account: num_blocks})
            num_freed = self._put_unread(block_ids)
            if quota is not None:
                quota.refund(account, num_blocks)
            self._held[holder] = has - num_blocks
            self._used -= num_freed
        finally:
            lock.release()

    # -- slow paths

    @property
    def num_kept(self) -> int:
        return len(self._readers)

    @property
    def num_unowned(self) -> int:
        return len(self._unowned)

    def keep(self, block_ids: Sequence[int]) -> None:
        with self._lock:
            self._readers.update(block_ids)

    def let_go(self, block_ids: Sequence[int]) -> None:
        with self._lock:
            readers, counts = self._readers, Counter(block_ids)
            wrong = next((block for block, count in counts.items() if readers[block] < count), None)
            if wrong is not None:
                raise BookkeepingError(f"block {wrong} is let go more often than it was kept")
            last = [block for block, count in counts.items() if readers[block] == count]
            freed = array("i", [block for block in last if block in self._unowned])
            self._put(freed)
            self._used -= len(freed)
            self._unowned.difference_update(freed)
            readers.subtract(counts)
            for block in last:
                del readers[block]

    def remap(self, moves: Mapping[int, int]) -> None:
        """See `KVPool`. Afterwards low ids are free first, as in a fresh pool."""
        with self._lock:
            free = set(self._free_ids())
            self._check_moves(moves, free)
            for allocation in self._live:
                for position, block in enumerate(allocation.block_ids):
                    if block in moves:
                        allocation.block_ids[position] = moves[block]
            free.difference_update(moves.values())
            self._set_free(array("i", sorted(free.union(moves))))

    def check(self, held: Mapping[str, Iterable[int]] | None = None) -> None:
        """See `KVPool`. With a quota, the accounts of all allocations must be charged for them, too."""
        named = None if held is None else {holder: list(blocks) for holder, blocks in held.items()}
        with self._lock:
            self._check_free()
            owners = self._owners(named or {})
            self._check_counts(owners, named)
            charges: Counter[Account] = Counter()
            for allocation in self._live:
                charges[allocation.account] += len(allocation.block_ids)
            self._check_charged(charges)

    # -- shared by the calls above

    def _charge(self, num_blocks: int, account: Account) -> BlockIds | None:
        if num_blocks < 0:
            raise BookkeepingError(f"cannot allocate {num_blocks} blocks")
        used = self._used + num_blocks
        quota = self._quota
        if used > self.total_blocks or (quota is not None and not quota.charge(account, num_blocks)):
            self.num_refused += 1
            return None
        block_ids = self._take(num_blocks)
        self._used = used
        self.num_allocated_total += num_blocks
        if used > self.peak_used:
            self.peak_used = used
        return block_ids

    def _release(self, allocation: Allocation, keep: int) -> None:
        """Free all but the first `keep` blocks."""
        block_ids = allocation.block_ids
        gone = block_ids[keep:] if keep else block_ids
        if self._quota is not None:
            self._quota.refund(allocation.account, len(gone))
        self._used -= self._put_unread(gone)
        del block_ids[keep:]

    def _put_unread(self, block_ids: BlockIds) -> int:
        """Make blocks free, and return how many. Those that are read have no owner from now on."""
        if not self._readers:
            self._put(block_ids)
            return len(block_ids)
        unread = array("i", [block for block in block_ids if block not in self._readers])
        self._put(unread)
        self._unowned.update(block for block in block_ids if block in self._readers)
        return len(unread)

    def _free_single(self, block_ids: Sequence[int]) -> None:
        """Free single ids, each cut out of the allocation that it is in."""
        wanted = set(block_ids)
        if len(wanted) != len(block_ids):
            block = Counter(block_ids).most_common(1)[0][0]
            raise BookkeepingError(f"block {block} is named twice in one free")
        with self._lock:
            cuts = {live: cut for live in self._live if (cut := wanted.intersection(live.block_ids))}
            unknown = wanted.difference(*cuts.values())
            if unknown:
                raise self._not_allocated(min(unknown))
            refunds: Counter[Account] = Counter()
            for allocation, cut in cuts.items():
                refunds[allocation.account] += len(cut)
            self._check_charged(refunds)
            self._used -= self._put_unread(array("i", block_ids))
            if self._quota is not None:
                for account, num_blocks in refunds.items():
                    self._quota.refund(account, num_blocks)
            for allocation, cut in cuts.items():
                left = [block for block in allocation.block_ids if block not in cut]
                allocation.block_ids[:] = array("i", left)
                if not left:
                    del self._live[allocation]

    def _is_free(self, block_id: int) -> bool:
        return any(block == block_id for block in self._free_ids())

    def _info_of_held(self, block_id: int) -> BlockInfo:
        if block_id in self._unowned:
            return BlockInfo(block_id, "a reader")
        return BlockInfo(block_id, " or ".join(sorted(name for name, count in self._held.items() if count)))

    # -- errors and checks

    def _unknown(self, block_id: int) -> BookkeepingError:
        return BookkeepingError(f"no block {block_id}: the pool has blocks 0 to {self.total_blocks - 1}")

    def _not_allocated(self, block_id: int) -> BookkeepingError:
        """The error for a single id that cannot be freed."""
        if not 0 <= block_id < self.total_blocks:
            return self._unknown(block_id)
        if self._is_free(block_id):
            return BookkeepingError(f"double free of block {block_id}: it is free already")
        holder = self._info_of_held(block_id).owner
        return BookkeepingError(
            f"block {block_id} is held by {holder!r}: a holder gives blocks back with take_back"
        )

    def _check_charged(self, charges: Mapping[Account, int]) -> None:
        if self._quota is None:
            return
        for account, num_blocks in charges.items():
            charged = self._quota.used(account)
            if charged < num_blocks:
                raise BookkeepingError(f"{account} is charged for {charged} blocks, not for {num_blocks}")

    def _check_moves(self, moves: Mapping[int, int], free: set[int]) -> None:
        targets = set(moves.values())
        if len(targets) != len(moves):
            raise BookkeepingError("two blocks of one remap move to the same target")
        if targets - free:
            raise BookkeepingError(f"block {min(targets - free)} is a target of a move, and not free")
        for block in moves:
            if not 0 <= block < self.total_blocks:
                raise self._unknown(block)
            if block in free:
                raise BookkeepingError(f"block {block} is the source of a move, and free")
            if block in self._readers:
                raise BookkeepingError(f"block {block} is the source of a move, and kept for a reader")

    def _owners(self, named: Mapping[str, Sequence[int]]) -> dict[int, str]:
        """The owner of each block, in words. Raises where a block has two."""
        owners: dict[int, str] = {}
        claims: list[tuple[str, Iterable[int]]] = [("free", self._free_ids())]
        claims += [(f"of {live.owner!r}", live.block_ids) for live in self._live]
        claims += [(f"held by {holder!r}", blocks) for holder, blocks in named.items()]
        claims.append(("read, and without an owner", self._unowned))
        for owner, blocks in claims:
            for block in blocks:
                if not 0 <= block < self.total_blocks:
                    raise BookkeepingError(f"{self._unknown(block)}, and block {block} is {owner}")
                if block in owners:
                    raise BookkeepingError(f"block {block} is {owners[block]} and {owner}")
                owners[block] = owner
        return owners

    def _check_counts(self, owners: Mapping[int, str], named: Mapping[str, Sequence[int]] | None) -> None:
        num_free = list(owners.values()).count("free")
        if num_free != self.num_free:
            raise BookkeepingError(f"{num_free} blocks are free, the pool counts {self.num_free}")
        missing = [block for block in range(self.total_blocks) if block not in owners]
        if named is None:
            if len(missing) != sum(self._held.values()):
                raise BookkeepingError(f"{len(missing)} blocks are held, the pool counts {self._held}")
            return
        for holder in sorted({*self._held, *named}):
            names, has = len(named.get(holder, ())), self.num_held(holder)
            if names != has:
                raise BookkeepingError(
                    f"{holder!r} holds {has} blocks and names {names}; without an owner: {missing[:8]}"
                )
        if missing:
            raise BookkeepingError(f"block {missing[0]} has no owner: not free, not allocated, not held")

    # -- the free blocks, kept by a subclass. Called under the lock, and before `_used` changes

    @abstractmethod
    def _take(self, num_blocks: int) -> BlockIds:
        """Take so many free blocks; the array is the caller's. There are enough: the caller has checked."""

    @abstractmethod
    def _put(self, block_ids: BlockIds) -> None:
        """Make blocks free again. If it raises an error, it has changed nothing."""

    @abstractmethod
    def _free_ids(self) -> Iterable[int]:
        """Every free block, in any order."""

    @abstractmethod
    def _set_free(self, block_ids: BlockIds) -> None:
        """Replace the free blocks by these: ascending, and as many as before."""

    @abstractmethod
    def _check_free(self) -> None:
        """Raise `BookkeepingError` where the pool's own structure is broken."""


def _not_live(allocation: Allocation) -> BookkeepingError:
    if len(allocation.block_ids):
        return BookkeepingError(f"{allocation!r} is not of this pool")
    return BookkeepingError(f"double free: {allocation!r} was freed before, or is not of this pool")
