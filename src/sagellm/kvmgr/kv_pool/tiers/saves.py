"""`TierSaves`: which paths of the device are written to which tiers, and when.

Device blocks are held while they are copied: those in the index are pinned, evicted ones are not given back
to the pool. A path waits to be offered again where its first missing block
is being written already, and where it is larger than may be under way at once.
"""

from __future__ import annotations

import itertools
import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from sagellm.core.blocks import Tier, cdiv
from sagellm.core.protocols.eviction import Use
from sagellm.core.protocols.prefix_cache import PrefixHit, PrefixReuseIndex
from sagellm.core.types import TOKEN_BYTES, Account, BlockIds
from sagellm.kvmgr.kv_pool.tiers.migrator import MigrationPlan, MigrationReport, Migrator, MoveTarget
from sagellm.kvmgr.kv_pool.tiers.tier import KVTier, TierStore

log = logging.getLogger("sagellm.tiers")
MAX_PENDING_BYTES = 1 << 30
"""Bytes of all moves under way, beyond which nothing more is saved. A path with more is saved in parts."""
MAX_LATER = 256
"""Paths that wait to be offered again, beyond which nothing more is saved: each pins blocks of the device."""
ANY_BLOCK = -1
BlocksByTier = dict[Tier, Sequence[int]]
"""Blocks of the device on their way to tiers."""


@dataclass(slots=True)
class EvictedBlocks:
    """Evicted blocks of the device, whose bytes are still read. The last holder has them given back."""

    give_back: Callable[[], None]
    num_holders: int = 1

    def let_go(self) -> None:
        self.num_holders -= 1
        if not self.num_holders:
            self.give_back()


@dataclass(frozen=True, slots=True)
class SavedPath:
    """A path of the device that is to be saved.

    `whole`: its tokens and length. `cached`: the part that is in the index. `rest`: the blocks behind that,
    which are among the `evicted` ones.
    """

    whole: PrefixHit
    cached: PrefixHit
    rest: BlockIds = field(default_factory=lambda: array("i"))
    evicted: EvictedBlocks | None = None


@dataclass(slots=True)
class _Save:
    """A path on its way down. Its blocks are held; `blocks`: those that are written."""

    path: SavedPath
    stores: dict[Tier, TierStore]
    blocks: BlocksByTier


@dataclass(slots=True)
class _Offer:
    """A path that waits to be offered to a tier, with its blocks held.

    `num_known`: blocks that the tier had when a part of the path was sent there; -1 before the first.
    """

    tier: KVTier
    path: SavedPath
    account: Account
    use: Use | None
    num_known: int


class TierSaves:
    """Owns the writes to tiers under way, and the paths that wait for them.

    `is_awaited`: the engine waits for the end of what is sent now.
    """

    def __init__(
        self, index: PrefixReuseIndex, tiers: Sequence[KVTier], migrator: Migrator, bytes_per_block: int
    ) -> None:
        self._index, self._tiers = index, tiers
        self._migrator, self._block_bytes = migrator, bytes_per_block
        self._saves: dict[int, _Save] = {}
        self._saving: dict[Tier, set[int]] = {tier.tier: set() for tier in tiers}
        self._later: dict[tuple[Tier, int], list[_Offer]] = {}
        """By tier and the block whose write they wait for."""
        self.is_awaited = False

    @property
    def move_ids(self) -> list[int]:
        """The moves under way."""
        return [*self._saves]

    @property
    def num_acceptable(self) -> int:
        """Blocks that can be offered now before any is dropped."""
        most = max(1, MAX_PENDING_BYTES // self._block_bytes)
        return max(0, most - cdiv(self._migrator.num_pending_bytes, self._block_bytes))

    def _hold(self, path: SavedPath) -> SavedPath:
        """Keep the blocks of a path as they are until `_let_go`."""
        if path.evicted is not None:
            path.evicted.num_holders += 1
        return replace(path, cached=self._index.pin(path.cached, is_use=False))

    def _let_go(self, path: SavedPath) -> None:
        self._index.unpin(path.cached, is_use=False)
        if path.evicted is not None:
            path.evicted.let_go()

    def offer(
        self,
        tiers: Sequence[KVTier],
        path: SavedPath,
        account: Account,
        use: Use | None,
        num_known: int = -1,
    ) -> None:
        """Write what tiers lack of a path.

        A tier into which the first of these blocks is being written is offered the path again behind that;
        so is one that lacks more than may be under way, behind a part of it. `num_known`: see `_Offer`.
        """
        stores: dict[Tier, TierStore] = {}
        later: list[tuple[int, _Offer]] = []
        ids: BlockIds | None = None
        hit = path.whole
        for tier in tiers:
            found = tier.lookup(hit.tokens, hit.namespace, hit.num_tokens)
            known, missing = found.num_blocks, hit.num_blocks - found.num_blocks
            block = ANY_BLOCK
            if missing:
                ids = ids or self._index.block_ids(path.cached) + path.rest
                block = ids[known]
            if block in self._saving[tier.tier]:
                later.append((block, _Offer(tier, path, account, use, num_known)))
                continue
            if known <= num_known:  # it has not taken the last part
                continue
            num_now, has_rest = self._num_to_save(tier, found, missing, goes_on=num_known >= 0)
            part_use = None if has_rest else use
            store = tier.begin_store(
                hit.tokens, hit.namespace, known + num_now, account, part_use, has_time=num_now > 0
            )
            if store is not None:
                stores[tier.tier] = store
            if has_rest and not num_now:
                later.append((ANY_BLOCK, _Offer(tier, path, account, use, num_known)))
            elif has_rest and store is not None:
                later.append((block, _Offer(tier, path, account, use, known)))
            elif tier.can_store:
                tier.num_dropped += missing - (num_now if store is not None else 0)
        for block, offer in later:
            self._offer_later(block, offer)
        if stores and ids:
            self._send_down(path, ids, stores, ends=use is not None)

    def _offer_later(self, block: int, offer: _Offer) -> None:
        if sum(map(len, self._later.values())) >= MAX_LATER:
            offer.tier.num_dropped += offer.path.whole.num_blocks
            return
        offer.path = self._hold(offer.path)
        self._later.setdefault((offer.tier.tier, block), []).append(offer)

    def offer_again(self, ended: Sequence[BlocksByTier]) -> None:
        """Offer the paths that wait for one of these blocks, and those for any."""
        if not self._later:
            return
        keys = {(name, block) for blocks in ended for name, ids in blocks.items() for block in ids}
        keys |= {(tier.tier, ANY_BLOCK) for tier in self._tiers}
        waiting = [offer for key in sorted(self._later.keys() & keys) for offer in self._later.pop(key)]
        for offer in waiting:
            self.offer((offer.tier,), offer.path, offer.account, offer.use, offer.num_known)
            self._let_go(offer.path)

    def drop_offers(self) -> None:
        """Forget the paths that wait to be offered again."""
        for offer in itertools.chain(*self._later.values()):
            self._let_go(offer.path)
        self._later.clear()

    def _num_to_save(
        self, tier: KVTier, found: PrefixHit, missing: int, *, goes_on: bool
    ) -> tuple[int, bool]:
        """How many missing blocks to write now, and whether the next ones follow.

        A path that is larger than `MAX_PENDING_BYTES` goes in parts, each when at least half of that is free;
        `goes_on`: one has gone. Of another path, what does not fit now is dropped.
        """
        fitting = min(missing, tier.num_slots_behind(found))
        most, room = max(1, MAX_PENDING_BYTES // self._block_bytes), self.num_acceptable
        if fitting <= room or not tier.can_store or (fitting <= most and not goes_on):
            return min(fitting, room), False
        return (room if 2 * room >= most else 0), True

    def _send_down(
        self, path: SavedPath, ids: BlockIds, stores: dict[Tier, TierStore], *, ends: bool
    ) -> None:
        held, hit = self._hold(path), path.whole
        first, *others = [store.positions for store in stores.values()]
        positions = first
        if any(other != first for other in others):
            positions = sorted({position for store in stores.values() for position in store.positions})
        targets = tuple(
            MoveTarget(name, _offsets(store.positions, positions), store.slots)
            for name, store in stores.items()
        )
        data = hit.tokens.tobytes()[: (positions[-1] + 1) * self._index.block_size * TOKEN_BYTES]
        plan = MigrationPlan(
            data, hit.namespace, positions, Tier.HBM, _at(ids, positions), targets, ends, self.is_awaited
        )
        try:
            move_id = self._migrator.migrate(plan)
        except Exception:
            self._let_go(held)
            raise
        blocks: BlocksByTier = {name: _at(ids, store.positions) for name, store in stores.items()}
        for name, written in blocks.items():
            self._saving[name].update(written)
        self._saves[move_id] = _Save(held, stores, blocks)

    def end(self, report: MigrationReport) -> BlocksByTier | None:
        """A move has ended: its blocks enter their tiers. Returns what was written; None: it is no save."""
        save = self._saves.pop(report.move_id, None)
        if save is None:
            return None
        for tier in self._tiers:
            store = save.stores.get(tier.tier)
            if store is None:
                continue
            error = report.errors.get(tier.tier, "")
            if tier.tier in report.num_admitted:
                tier.num_refused += len(store.slots) - report.num_admitted[tier.tier]
            if error and not tier.fault:
                log.warning("the tier %s is not used any more: %s", tier.tier, error)
            tier.end_store(store, report.num_written.get(tier.tier, 0), error)
        for name, blocks in save.blocks.items():
            self._saving[name].difference_update(blocks)
        self._let_go(save.path)
        return save.blocks


def _at(ids: BlockIds, positions: Sequence[int]) -> Sequence[int]:
    """The ids at positions; a slice where these follow each other."""
    if isinstance(positions, range):
        return ids[positions.start : positions.stop]
    return [ids[position] for position in positions]


def _offsets(part: Sequence[int], positions: Sequence[int]) -> Sequence[int]:
    """Where the positions of `part` stand in `positions`."""
    if part == positions:
        return range(len(part))
    offset_of = {position: offset for offset, position in enumerate(positions)}
    return [offset_of[position] for position in part]
