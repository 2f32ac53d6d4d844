"""`PrefixArrivals`: blocks that are filled from elsewhere, then enter an index.

The device has one for blocks from lower tiers or other instances; each lower tier has one for blocks that are
saved there. From `begin_receive` until `publish`, `hand_over` or `abort` the blocks belong to the arrival,
and the cached prefix in front of them is pinned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.eviction import NO_USE, Use
from sagellm.core.protocols.kv_pool import Allocation, KVPool
from sagellm.core.protocols.kv_tiers import Arrival
from sagellm.core.protocols.prefix_cache import PrefixHit, PrefixReuseIndex
from sagellm.core.types import NO_ACCOUNT, Account, BlockIds, Namespace, Tokens


@dataclass(slots=True)
class _Open:
    """The pinned prefix of an arrival, and its blocks."""

    prefix: PrefixHit
    blocks: Allocation


class PrefixArrivals:
    """Implements `KVArrivals` for one index and its pool, once `serve` was called.

    Several arrivals together have at most `max_share` of the pool; one that is alone may have all of it.
    """

    def __init__(self, index: PrefixReuseIndex, pool: KVPool, max_share: float = 0.5) -> None:
        self._index, self._pool = index, pool
        self._most_blocks = int(max_share * pool.total_blocks)
        self._open: dict[int, _Open] = {}
        self._num_epochs = 0
        self.num_blocks = 0
        self.num_changes = 0

    def serve(self, make_room: Callable[[int, Account], None], owner: str) -> None:
        self._make_room, self._owner = make_room, owner

    def begin_receive(
        self,
        tokens: Tokens,
        namespace: Namespace,
        num_blocks: int,
        account: Account = NO_ACCOUNT,
        first: int | None = None,
    ) -> Arrival | None:
        index, size = self._index, self._index.block_size
        found = index.lookup(tokens, namespace, (num_blocks if first is None else first) * size)
        first = found.num_blocks if first is None else first
        missing = num_blocks - first
        if missing <= 0 or (self._open and self.num_blocks + missing > self._most_blocks):
            return None
        prefix = index.pin(found, is_use=False)
        self._num_epochs += 1
        self.num_changes += 1
        try:
            if self._pool.num_free < missing:
                self._make_room(missing, account)
            blocks = self._pool.allocate(missing, f"arrival {self._num_epochs}", account)
        except Exception:
            index.unpin(prefix, is_use=False)
            raise
        if blocks is None:
            index.unpin(prefix, is_use=False)
            return None
        self._open[self._num_epochs] = _Open(prefix, blocks)
        self.num_blocks += missing
        return Arrival(tokens, namespace, first, blocks.block_ids[:], self._num_epochs)

    def num_cached(self, tokens: Tokens, namespace: Namespace, num_blocks: int) -> int:
        return self._index.lookup(tokens, namespace, num_blocks * self._index.block_size).num_blocks

    def publish(self, arrival: Arrival, num_blocks: int, use: Use = NO_USE) -> int:
        found = self._close(arrival)
        if not 0 <= num_blocks <= len(arrival.block_ids) or arrival.first > found.prefix.num_blocks:
            raise BookkeepingError(
                f"{num_blocks} of {len(arrival.block_ids)} blocks of an arrival are filled from block "
                f"{arrival.first} on, {found.prefix.num_blocks} are cached before them"
            )
        index, blocks, entered = self._index, found.blocks, 0
        self.num_changes += 1
        ids = index.block_ids(found.prefix)
        if num_blocks and len(ids) == arrival.first:  # else the blocks would enter at other positions
            ids += arrival.block_ids[:num_blocks]
            whole = index.insert(arrival.tokens, ids, arrival.namespace, account=blocks.account, pin=True)
            num_known = max(0, whole.num_existing - arrival.first)
            self._pool.hand_over(blocks, num_known, num_blocks, self._owner)
            index.unpin(whole.hit, use)
            entered = num_blocks - num_known
        index.unpin(found.prefix, is_use=False)
        self._pool.free(blocks)
        return entered

    def hand_over(self, arrival: Arrival, num_blocks: int, target: Allocation) -> BlockIds:
        found = self._close(arrival)
        if not 0 <= num_blocks <= len(arrival.block_ids) or found.blocks.account != target.account:
            raise BookkeepingError(
                f"{target!r} cannot take {num_blocks} blocks of {found.blocks!r}: they are fewer, or others'"
            )
        self.num_changes += 1
        filled = self._pool.hand_over(found.blocks, 0, num_blocks, self._owner)
        self._pool.hand_back(self._owner, filled, target, len(target.block_ids))
        self._index.unpin(found.prefix, is_use=False)
        self._pool.free(found.blocks)
        return filled

    def abort(self, arrival: Arrival) -> None:
        found = self._close(arrival)
        self._index.unpin(found.prefix, is_use=False)
        self._pool.free(found.blocks)
        self.num_changes += 1

    def _close(self, arrival: Arrival) -> _Open:
        found = self._open.pop(arrival.epoch, None)
        if found is None:
            raise BookkeepingError(f"arrival {arrival.epoch} has ended: publish or abort it once")
        self.num_blocks -= len(arrival.block_ids)
        return found

    def check(self) -> None:
        """Raise `BookkeepingError` where blocks and open arrivals do not add up."""
        held = sum(len(each.blocks.block_ids) for each in self._open.values())
        if held != self.num_blocks:
            raise BookkeepingError(f"arrivals have {held} blocks, {self.num_blocks} are counted")
