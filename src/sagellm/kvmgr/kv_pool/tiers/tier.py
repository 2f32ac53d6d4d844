"""`KVTier`: one memory below the device: a prefix index, a pool, a storage.

The index and its eviction policy are of the same kinds as the device's. A tier has every prefix from its
first block on, so a path on the device and the same path here overlap: what is cached there is no hole here.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sagellm.core.blocks import Tier
from sagellm.core.protocols.eviction import NO_USE, Use
from sagellm.core.protocols.kv_pool import BlockQuota, KVPool
from sagellm.core.protocols.kv_tiers import (
    Arrival,
    BlockHash,
    BlockStorage,
    ReadOutcome,
    StoredBlock,
    TierState,
)
from sagellm.core.protocols.prefix_cache import IndexNode, PrefixHit, PrefixReuseIndex
from sagellm.core.types import NO_ACCOUNT, TOKEN_BYTES, Account, BlockIds, Namespace, Tokens
from sagellm.kvmgr.kv_pool.tiers.arrivals import PrefixArrivals

log = logging.getLogger("sagellm.tiers")
OWNER = "tier index"
RECOVERED = Account("\0recovered", "\0recovered")
"""Is charged for blocks from before a restart, if accounts have shares. It has none, and no ceiling."""


@dataclass(slots=True)
class TierStore:
    """Blocks on their way into a tier: positions of a path, and their slots.

    The first `num_repaired` positions have slots in the index that hold damaged bytes. The others are
    those of `arrival`. `prefix` is pinned. `use`: of the request that ends with the path; None: it goes on.
    """

    positions: Sequence[int]
    slots: Sequence[int]
    prefix: PrefixHit
    num_repaired: int
    arrival: Arrival | None
    use: Use | None


class KVTier:
    """Owns the books of one tier; `storage` owns its bytes. For the engine's thread.

    `num_stored` and `num_loaded` count blocks; `num_dropped`: those that were not saved, since too many were
    under way or there were no slots; `num_refused`: those that a filter did not admit; `misses`: blocks that
    were there and could not be used, by outcome. `quota`: of the pool, if accounts have shares.
    """

    def __init__(
        self,
        tier: Tier,
        index: PrefixReuseIndex,
        pool: KVPool,
        storage: BlockStorage,
        quota: BlockQuota | None = None,
    ) -> None:
        self.tier, self.index, self.pool, self.storage = tier, index, pool, storage
        self._quota = quota
        self.arrivals = PrefixArrivals(index, pool)
        self.arrivals.serve(self._make_room, OWNER)
        self._damaged: set[int] = set()
        self.misses: Counter[ReadOutcome] = Counter()
        self.num_stored = self.num_loaded = self.num_evicted = self.num_dropped = self.num_refused = 0
        self._write_fault = self._gone = ""

    @property
    def fault(self) -> str:
        """Why nothing is stored any more; empty while all is well.

        Where the storage itself has failed, nothing is read either.
        """
        return self._gone or self.storage.fault or self._write_fault

    def give_up(self, reason: str) -> None:
        """The storage is neither written nor read any more."""
        self._gone = reason

    @property
    def can_store(self) -> bool:
        """Whether blocks are written now."""
        return not self.fault

    def lookup(self, tokens: Tokens, namespace: Namespace, max_tokens: int | None = None) -> PrefixHit:
        """The longest prefix that is here, up to the first damaged block."""
        hit = self.index.lookup(tokens, namespace, 0 if self._gone or self.storage.fault else max_tokens)
        if not self._damaged or not hit.num_blocks:
            return hit
        for position, slot in enumerate(self.index.block_ids(hit)):
            if slot in self._damaged:
                return self.index.lookup(tokens, namespace, position * self.index.block_size)
        return hit

    # -- down

    def num_slots_behind(self, hit: PrefixHit) -> int:
        """Slots for blocks behind a prefix: free ones, and those that can be evicted."""
        on_path = self.index.num_unpinned_on_path(hit) if hit.num_blocks else 0
        return self.pool.num_free + self.index.num_evictable - on_path

    def begin_store(
        self,
        tokens: Tokens,
        namespace: Namespace,
        num_blocks: int,
        account: Account = NO_ACCOUNT,
        use: Use | None = None,
        *,
        has_time: bool = True,
    ) -> TierStore | None:
        """Reserve slots for what is missing or damaged of a prefix.

        Counts the use of what is there. None if nothing is missing, there is no room, or no `has_time`.
        """
        is_use = use is not None
        prefix = self.index.lookup(tokens, namespace, num_blocks * self.index.block_size)
        prefix = self.index.pin(prefix, is_use=is_use)
        slots = self.index.block_ids(prefix)
        if is_use:
            self.storage.touch(slots)
        damaged = [i for i, slot in enumerate(slots) if slot in self._damaged] if self._damaged else []
        arrival, can_store = None, has_time and self.can_store
        if can_store:
            arrival = self.arrivals.begin_receive(tokens, namespace, num_blocks, account)
        if arrival is None and not (can_store and damaged):
            self.index.unpin(prefix, use or NO_USE, is_use=is_use)
            return None
        if arrival is None:
            return TierStore(damaged, [slots[i] for i in damaged], prefix, len(damaged), None, use)
        received = range(arrival.first, arrival.first + len(arrival.block_ids))
        if not damaged:
            return TierStore(received, arrival.block_ids, prefix, 0, arrival, use)
        positions, targets = [*damaged, *received], [*(slots[i] for i in damaged), *arrival.block_ids]
        return TierStore(positions, targets, prefix, len(damaged), arrival, use)

    def end_store(self, store: TierStore, num_written: int, error: str = "") -> None:
        """The first `num_written` blocks are written."""
        self._damaged.difference_update(store.slots[: min(num_written, store.num_repaired)])
        num_new = max(0, num_written - store.num_repaired)
        use, num_entered = store.use or NO_USE, 0
        if store.arrival is not None:
            num_entered = self.arrivals.publish(store.arrival, num_new, use)
            self.storage.forget(store.arrival.block_ids[: num_new - num_entered])  # others wrote the same
        self.num_stored += num_entered
        self.index.unpin(store.prefix, NO_USE if num_entered else use, is_use=store.use is not None)
        self._write_fault = self._write_fault or error

    # -- up

    def begin_load(self, hit: PrefixHit) -> PrefixHit:
        """Hold a path while its slots are read."""
        return self.index.pin(hit, is_use=False)

    def end_load(self, hit: PrefixHit, first: int, num_read: int, outcome: ReadOutcome) -> None:
        """A load has ended: `num_read` blocks from `first` on were right.

        `outcome` is of the next block; OK if the load was stopped or complete.
        """
        slots = self.index.block_ids(hit)
        self.storage.touch(slots[first : first + num_read])
        if outcome is not ReadOutcome.OK:
            self._damaged.add(slots[first + num_read])
            self.misses[outcome] += 1
        self.num_loaded += num_read
        self.index.unpin(hit, is_use=False)

    # -- after a restart

    def recover(self, block_hash: BlockHash) -> int:
        """Put the blocks that survived a restart into the empty index; returns how many.

        Blocks that do not have their `block_hash` are forgotten, and those whose prefix did not survive.
        Paths are inserted in the order of their last use, so the one that was used longest ago is the first
        to be evicted. Linear in the number of blocks.
        """
        stored = self.storage.recover()
        account = NO_ACCOUNT if self._quota is None else RECOVERED
        sound = [block for block in stored if self._is_sound(block, block_hash)]
        if len(sound) < len(stored):
            log.warning("the tier %s: dropped %d damaged rows", self.tier, len(stored) - len(sound))
        whole, num_children = _with_whole_prefix(sound)
        ends: dict[bytes, IndexNode] = {}
        """Where an inserted path ends or branches."""
        for leaf in sorted(whole.values(), key=lambda block: block.used_s):
            if leaf.token_hash not in num_children:
                self._insert_path(leaf, whole, num_children, ends, account)
        slots = {block.slot for block in whole.values()}
        self.storage.forget([block.slot for block in stored if block.slot not in slots])
        self._give_slots_to_index(slots, account)
        return len(slots)

    def _is_sound(self, block: StoredBlock, block_hash: BlockHash) -> bool:
        num_bytes = self.index.block_size * TOKEN_BYTES
        return len(block.tokens) == num_bytes and block_hash(block) == block.token_hash

    def _insert_path(
        self,
        leaf: StoredBlock,
        whole: Mapping[bytes, StoredBlock],
        num_children: Mapping[bytes, int],
        ends: dict[bytes, IndexNode],
        account: Account,
    ) -> None:
        """Insert the path up to a leaf, behind what `ends` has of it.

        In pieces that end where the path branches.
        """
        pieces, above = [[leaf]], leaf.parent
        while above and above not in ends:
            if num_children[above] > 1:
                pieces.append([])
            pieces[-1].append(whole[above])
            above = whole[above].parent
        node = ends.get(above)
        for piece in reversed(pieces):
            piece.reverse()
            tokens = Tokens.frombytes(b"".join([block.tokens for block in piece]))
            slots = array("i", [block.slot for block in piece])
            end = self.index.extend(node, tokens, slots, leaf.namespace, account=account)
            node = ends[piece[-1].token_hash] = end

    def _give_slots_to_index(self, slots: set[int], account: Account) -> None:
        """Take these slots out of the fresh pool, for the index."""
        every = self.pool.allocate(self.pool.total_blocks, OWNER, account)
        assert every is not None
        unused = [slot for slot in every.block_ids if slot not in slots]
        if unused:
            self.pool.free(unused)
        if slots:
            self.pool.hand_over(every, 0, len(every.block_ids), OWNER)
            self.pool.free(every)

    def state(self, num_held: int = 0) -> TierState:
        """Its counts now; preempted requests hold `num_held` blocks."""
        misses = {outcome.value: count for outcome, count in self.misses.items()}
        counts = self.num_stored, self.num_loaded, self.num_evicted
        return TierState(
            self.tier,
            self.pool.total_blocks,
            self.index.num_cached,
            num_held,
            *counts,
            misses,
            self.fault,
            self.num_dropped,
            self.num_refused,
        )

    def clear(self) -> int:
        """Evict all that nothing uses; returns how many blocks. No crash brings them back."""
        before = self.num_evicted
        if self._quota is None:
            self._give_back(self.index.evict(self.index.num_evictable))
        while self.index.num_evictable:
            for account, count in self.index.evictable_by_account().items():
                self._give_back(self.index.evict_from(account, count), account)
        self.storage.sync()
        return self.num_evicted - before

    def _make_room(self, num_blocks: int, account: Account) -> None:
        """Have slots free for the account, as far as shares allow. Evicts nothing where that is too few."""
        if self._quota is None:
            missing = num_blocks - self.pool.num_free
            if 0 < missing <= self.index.num_evictable:
                self._give_back(self.index.evict(missing))
            return
        while num_blocks > min(self.pool.num_free, self._quota.headroom(account)):
            evictable, before = self.index.evictable_by_account(), self.num_evicted
            given = self._quota.reclaim(account, num_blocks, evictable, self.pool.num_free) or {}
            for giver, count in given.items():
                self._give_back(self.index.evict_from(giver, count), giver)
            if self.num_evicted == before:
                return

    def _give_back(self, slots: BlockIds | None, account: Account = NO_ACCOUNT) -> None:
        if not slots:
            return
        self.pool.take_back(OWNER, slots, account)
        self.storage.forget(slots)
        self._damaged.difference_update(slots)
        self.num_evicted += len(slots)

    def check(self) -> None:
        """Raise `BookkeepingError` where index, pool and arrivals disagree."""
        self.index.check()
        self.arrivals.check()
        self.pool.check({OWNER: self.index.all_block_ids()})


def _with_whole_prefix(
    blocks: Sequence[StoredBlock],
) -> tuple[dict[bytes, StoredBlock], dict[bytes, int]]:
    """The blocks whose prefix is there, by hash.

    Also how many of these follow each block that is no leaf.
    """
    behind: dict[bytes, list[StoredBlock]] = {}
    for block in blocks:
        behind.setdefault(block.parent, []).append(block)
    reached = behind.get(b"", [])
    num_children: dict[bytes, int] = {}
    for block in reached:
        children = [each for each in behind.get(block.token_hash, ()) if each.namespace == block.namespace]
        if children:
            num_children[block.token_hash] = len(children)
            reached += children
    return {block.token_hash: block for block in reached}, num_children
