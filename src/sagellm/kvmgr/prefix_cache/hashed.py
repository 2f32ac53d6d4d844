"""`HashedIndex`: a dictionary from chained block hashes to blocks, one record per block.

This is the form in which other engines name blocks (vLLM's automatic prefix caching, and the KV events that
routers read). The hash of a block covers all tokens before it, so one flat dictionary holds every prefix.

Each block has its reference count (`BlockRecord.pins`): `pin` and `unpin` change it on the whole path.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from sagellm.core.blocks import cdiv
from sagellm.core.errors import BookkeepingError
from sagellm.core.events import BlocksRemoved, BlocksStored
from sagellm.core.protocols.eviction import EvictionPolicy, Extent, PolicyFactory
from sagellm.core.protocols.prefix_cache import IndexNode, InsertResult, PrefixHit
from sagellm.core.types import NO_ACCOUNT, Account, BlockIds, Namespace, Retention, Tokens
from sagellm.kvmgr.prefix_cache._extents import AccountShare, CachedExtent, EvictableLeaves, Ghost, Ghosts
from sagellm.kvmgr.prefix_cache._index_base import DEFAULT_NAMESPACE, IndexBase
from sagellm.kvmgr.prefix_cache.fingerprint import chain

KEY_BYTES = 8


@dataclass(slots=True, eq=False, kw_only=True)
class BlockRecord(CachedExtent):
    """One resident block of `data`; for a policy, an `Extent`. `num_blocks` is 0 once it has left the index.
    `pins` is the number of pinned hits that cover the block."""

    hash: bytes
    data: bytes
    block_id: int

    @property
    def content(self) -> bytes:
        return self.data


class Records:
    """The resident blocks, found by chain hash and by block id. A hash says only where to look: the tokens
    are compared, and blocks with equal hashes are kept apart."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._by_hash: dict[bytes, list[BlockRecord]] = {}
        self._by_key: dict[int, BlockRecord] = {}
        self.by_block: dict[int, BlockRecord] = {}
        self.first: dict[int, BlockRecord] = {}
        """By key, those at the beginning of prompts."""

    def hash(self, block: bytes, parent: BlockRecord | None, namespace: Namespace) -> bytes:
        """The hash that `block` has, or would have, behind `parent`."""
        above = parent.hash if parent is not None else None
        return chain(block, self._block_bytes, namespace, above)[0]

    def find(self, block: bytes, parent: BlockRecord | None, namespace: Namespace) -> BlockRecord | None:
        for record in self._by_hash.get(self.hash(block, parent, namespace), ()):
            if record.parent is parent and record.data == block and record.namespace == namespace:
                return record
        return None

    def walk(self, data: bytes, limit: int, namespace: Namespace) -> list[BlockRecord]:
        """The records of the leading blocks of `data` that are resident, at most `limit`."""
        path: list[BlockRecord] = []
        parent: BlockRecord | None = None
        for start in range(0, limit * self._block_bytes, self._block_bytes):
            parent = self.find(data[start : start + self._block_bytes], parent, namespace)
            if parent is None:
                break
            path.append(parent)
        return path

    def add(
        self,
        parent: BlockRecord | None,
        block: bytes,
        block_id: int,
        namespace: Namespace,
        share: AccountShare,
    ) -> BlockRecord:
        """Put a block that is not resident behind `parent`."""
        digest = self.hash(block, parent, namespace)
        key = int.from_bytes(digest[:KEY_BYTES], "little")
        while key in self._by_key:  # keys must be unique, or a policy would take one block for another
            key = (key + 1) % (1 << 8 * KEY_BYTES)
        end_block = parent.end_block + 1 if parent is not None else 1
        record = BlockRecord(
            parent, {}, namespace, share, key, 1, end_block, hash=digest, data=block, block_id=block_id
        )
        self._by_hash.setdefault(digest, []).append(record)
        self._by_key[key] = self.by_block[block_id] = record
        share.num_cached += 1
        if parent is not None:
            parent.children[block] = record
        else:
            self.first[key] = record
        return record

    def remove(self, record: BlockRecord) -> None:
        """Take out an evictable leaf. Its last use was a use of its parent too."""
        same_hash = self._by_hash[record.hash]
        same_hash.remove(record)
        if not same_hash:
            del self._by_hash[record.hash]
        del self._by_key[record.key]
        del self.by_block[record.block_id]
        record.num_blocks = 0
        record.end_block -= 1
        record.share.num_cached -= 1
        parent = record.parent
        if parent is None:
            del self.first[record.key]
        else:
            del parent.children[record.data]
            parent.last_use = max(parent.last_use, record.last_use)
            if record.used_s >= parent.used_s:
                parent.used_s, parent.use = record.used_s, record.use

    def check_new(self, block_ids: BlockIds, path: Sequence[BlockRecord]) -> None:
        """Raise `BookkeepingError` unless each id is new or is its block of the path."""
        if len(set(block_ids)) < len(block_ids) or min(block_ids, default=0) < 0:
            raise BookkeepingError(f"block ids must be different and not negative: {block_ids.tolist()}")
        for position, block_id in enumerate(block_ids):
            record = self.by_block.get(block_id)
            if record is not None and (position >= len(path) or path[position] is not record):
                raise BookkeepingError(f"block {block_id} is in the index already, at another place")

    def remap(self, moves: Mapping[int, int]) -> None:
        """Change block ids, all at once; each target must be free."""
        moved = {source: self.by_block[source] for source in moves if source in self.by_block}
        targets = {moves[source] for source in moved}
        if len(targets) < len(moved) or targets & (self.by_block.keys() - moved.keys()):
            raise BookkeepingError(f"each block must move to a free one of its own, not {dict(moves)}")
        for source in moved:
            del self.by_block[source]
        for source, record in moved.items():
            record.block_id = moves[source]
            self.by_block[record.block_id] = record

    def check(self) -> None:
        """Raise `BookkeepingError` naming the first record that does not fit the others."""
        for block_id, record in self.by_block.items():
            for wrong, what in self._faults(block_id, record):
                if wrong:
                    raise BookkeepingError(f"block {block_id}: {what}")
        num_hashed = sum(len(same_hash) for same_hash in self._by_hash.values())
        firsts = sorted(record.key for record in self.by_block.values() if record.parent is None)
        if sorted(self.first) != firsts:
            raise BookkeepingError(f"{len(firsts)} prompts begin, {len(self.first)} are known")
        if not num_hashed == len(self._by_key) == len(self.by_block):
            raise BookkeepingError(
                f"{len(self.by_block)} blocks have {num_hashed} hashes and {len(self._by_key)} keys"
            )

    def _faults(self, block_id: int, record: BlockRecord) -> Iterator[tuple[bool, str]]:
        parent, children = record.parent, record.children.values()
        yield record.block_id != block_id, f"its record says {record.block_id}"
        yield self._by_key.get(record.key) is not record, "not found by its key"
        yield self.find(record.data, parent, record.namespace) is not record, "not found by its tokens"
        yield record.hash != self.hash(record.data, parent, record.namespace), "it has another block's hash"
        yield len(record.data) != self._block_bytes, f"it holds {len(record.data)} bytes of tokens"
        yield record.num_blocks != 1, "it has left the index"
        yield record.first_position != sum(1 for _ in record.path()) - 1, "it is at a wrong position"
        yield parent is not None and parent.children.get(record.data) is not record, "unknown to its parent"
        yield any(child.parent is not record for child in children), "it has a child of another block"
        yield record.num_ends < 0, f"{record.num_ends} hits end with it"
        pins = record.num_ends + sum(child.pins for child in children)
        yield record.pins != pins, f"it has {record.pins} pins, its hits and children {pins}"


class HashedIndex(IndexBase[BlockRecord]):
    """Implements `PrefixReuseIndex`."""

    _extent_type = BlockRecord

    def _create(
        self, policy: EvictionPolicy | None, policy_factory: PolicyFactory | None, max_ghosts: int
    ) -> None:
        self._records = Records(self._block_bytes)
        self._leaves = EvictableLeaves(policy, policy_factory)
        self._ghosts: Ghosts[bytes] = Ghosts(max_ghosts)

    @property
    def num_cached(self) -> int:
        return len(self._records.by_block)

    @property
    def num_evictable(self) -> int:
        return sum(share.num_evictable for share in self._leaves.shares.values())

    # -- read

    def lookup(
        self, tokens: Tokens, namespace: Namespace = DEFAULT_NAMESPACE, max_tokens: int | None = None
    ) -> PrefixHit:
        limit = len(tokens) if max_tokens is None else min(max_tokens, len(tokens))
        path = self._records.walk(tokens.tobytes(), limit // self.block_size, namespace)
        return self._hit(tokens, namespace, path[-1] if path else None, len(path))

    def block_ids(self, hit: PrefixHit) -> BlockIds:
        ids = array("i", [record.block_id for record in self._path_of(self._current(hit))])
        ids.reverse()
        return ids

    def num_unpinned_on_path(self, hit: PrefixHit) -> int:
        return sum(not record.pins for record in self._path_of(self._current(hit)))

    def num_held_alone(self, hit: PrefixHit) -> int:
        return sum(record.pins == 1 for record in self._path_of(self._current(hit)))

    def all_block_ids(self) -> BlockIds:
        return array("i", self._records.by_block)

    # -- pins: the reference counts

    def _pin(self, last: BlockRecord, num_blocks: int, *, is_use: bool = True) -> BlockRecord:
        last.num_ends += 1
        for record in last.path():
            record.num_uses += is_use
            record.pins += 1
            if record.pins == 1:
                record.share.num_pinned += 1
                self._leaves.discard(record, is_use=is_use)
        return last

    def _unpin(self, last: BlockRecord) -> None:
        last.num_ends -= 1
        for record in last.path():
            record.pins -= 1
            if not record.pins:
                record.share.num_pinned -= 1
                self._leaves.add(record, after_use=True)

    # -- write

    def insert(
        self,
        tokens: Tokens,
        block_ids: Sequence[int],
        namespace: Namespace = DEFAULT_NAMESPACE,
        *,
        account: Account = NO_ACCOUNT,
        retention: Sequence[Retention] = (),
        pin: bool = False,
    ) -> InsertResult:
        ids = array("i", block_ids)
        if len(ids) * self.block_size > len(tokens):
            raise BookkeepingError(
                f"{len(ids)} blocks of {self.block_size} tokens for a prompt of {len(tokens)} tokens"
            )
        data = tokens.tobytes()
        path = self._records.walk(data, len(ids), namespace)
        self._records.check_new(ids, path)
        share, existing = self._leaves.share(account), len(path)
        for position in range(existing, len(ids)):
            block = data[position * self._block_bytes : (position + 1) * self._block_bytes]
            parent = path[-1] if path else None
            path.append(self._records.add(parent, block, ids[position], namespace, share))
        self._retain(path, retention)
        if existing < len(path):
            self._enter(path[existing:])
        last = path[-1] if path else None
        if pin and last is not None:
            self._pin(last, len(path))
            if share.listener is not None:
                share.listener.added(last, len(path) - existing, share.num_cached)
        elif existing < len(path):
            for record in path:
                record.num_uses += 1
            self._leaves.add(path[-1])
        return InsertResult(existing, self._hit(tokens, namespace, last, len(path)))

    def extend(
        self,
        above: IndexNode | None,
        tokens: Tokens,
        block_ids: Sequence[int],
        namespace: Namespace = DEFAULT_NAMESPACE,
        *,
        account: Account = NO_ACCOUNT,
    ) -> BlockRecord:
        last = above if isinstance(above, BlockRecord) else None
        data, ids = tokens.tobytes(), array("i", block_ids)
        first = data[: self._block_bytes]
        self._check_extension(data, ids, is_there=self._records.find(first, last, namespace) is not None)
        self._records.check_new(ids, ())
        share, new = self._leaves.share(account), list[BlockRecord]()
        for number, block_id in enumerate(ids):
            block = data[number * self._block_bytes : (number + 1) * self._block_bytes]
            last = self._records.add(last, block, block_id, namespace, share)
            last.num_uses = 1
            new.append(last)
        self._enter(new)
        self._leaves.add(new[-1])
        return new[-1]

    def _enter(self, new: Sequence[BlockRecord]) -> None:
        """Set the time of use of new records of a path, and report them."""
        self._num_touches += 1
        now, above = self._clock.now(), new[0].parent
        for record in new:
            record.last_use, record.used_s = self._num_touches, now
            self._ghosts.discard(record.hash)
        if above is not None:
            self._leaves.discard(above)
        if self._events.wants(BlocksStored):
            self._events.emit(
                BlocksStored(
                    block_ids=tuple(record.block_id for record in new),
                    num_tokens_before=new[0].first_position * self.block_size,
                    hashes=tuple(record.hash for record in new),
                    parent_hash=None if above is None else above.hash,
                    tokens=b"".join(record.data for record in new),
                    namespace=new[0].namespace,
                )
            )

    def _retain(self, path: Sequence[BlockRecord], retention: Sequence[Retention]) -> None:
        """Raise the bonus of the blocks that ranges of tokens touch."""
        for bias in retention:
            start = bias.start // self.block_size
            stop = len(path) if bias.stop is None else cdiv(bias.stop, self.block_size)
            for record in path[start:stop]:
                if record.bonus_s < bias.bonus_s:
                    self._leaves.set_bonus(record, bias.bonus_s)

    def retract(self, result: InsertResult) -> None:
        hit, last = result.hit, result.hit.node
        if not isinstance(last, BlockRecord):
            return
        new = list(last.path())[: hit.num_blocks - result.num_existing]
        followers = sum(len(record.children) for record in new)
        if not last.num_ends or any(record.pins > 1 for record in new) or followers > max(0, len(new) - 1):
            raise BookkeepingError("retract of an insertion that is not pinned, or that others use by now")
        for record in last.path():
            record.num_uses -= 1
        self._unpin(last)
        for record in new:
            self._leaves.discard(record)
            parent = self._remove(record)
            if parent is not None:
                self._leaves.add(parent)
        self._emit_removed(new, "retracted")

    def remap(self, moves: Mapping[int, int]) -> None:
        self._records.remap(moves)

    # -- inside: for the base

    def _first_extents(self) -> Iterable[BlockRecord]:
        return list(self._records.first.values())

    def _uses(self, order: Sequence[BlockRecord]) -> Mapping[int, int]:
        return {id(record): record.num_uses for record in order}

    def _current(self, hit: PrefixHit) -> PrefixHit:
        if not isinstance(hit.node, BlockRecord) or hit.node.num_blocks:
            return hit
        return self.lookup(hit.tokens, hit.namespace, hit.num_blocks * self.block_size)

    def _namespaces(self, first_block: bytes) -> Iterable[Namespace]:
        records = self._records.by_block.values()
        return [
            record.namespace for record in records if record.parent is None and record.data == first_block
        ]

    def _ghost_behind(self, hit: PrefixHit, next_block: bytes) -> Ghost | None:
        parent = next(self._path_of(hit), None)
        return self._ghosts.get(self._records.hash(next_block, parent, hit.namespace))

    def _blocks_behind(self, hit: PrefixHit) -> Iterable[bytes]:
        followers = (record for record in self._records.by_block.values() if record.parent is hit.node)
        return (record.data for record in followers if record.namespace == hit.namespace)

    def _evict_of(
        self, share: AccountShare, num_blocks: int, cause: str, last: BlockRecord | None = None
    ) -> BlockIds:
        gone: list[BlockRecord] = []

        def give_up(extent: Extent, num_blocks: int) -> BlockRecord | None:
            record = self._leaves.by_key.get(extent.key)
            if record is None or record.share is not share or num_blocks != 1:
                raise BookkeepingError(f"the policy gave up {num_blocks} blocks of extent {extent.key:x}")
            self._note(record)
            gone.append(record)
            return self._remove(record)

        if last is None:
            self._leaves.evict(share, num_blocks, give_up)
        else:
            self._leaves.evict_tail(last, num_blocks, give_up)
        ghost = Ghost(self._clock.now(), cause)
        for record in gone:
            self._ghosts.add(record.hash, ghost)
        self._emit_removed(gone, cause)
        return array("i", [record.block_id for record in gone])

    # -- inside: eviction

    def _remove(self, record: BlockRecord) -> BlockRecord | None:
        """Take out an evictable leaf. Returns its parent if that is an evictable leaf of the same account
        now. A parent of another account is given to the policy of that account."""
        self._leaves.by_key.pop(record.key, None)
        self._records.remove(record)
        parent = record.parent
        if parent is None or parent.pins or parent.children:
            return None
        if parent.share is not record.share:
            self._leaves.add(parent)
            return None
        self._leaves.register(parent)
        return parent

    def _emit_removed(self, gone: Sequence[BlockRecord], cause: str) -> None:
        if not self._events.wants(BlocksRemoved):
            return
        for namespace, records in groupby(gone, key=lambda record: record.namespace):
            ids, hashes = zip(*((record.block_id, record.hash) for record in records), strict=True)
            self._events.emit(BlocksRemoved(ids, cause, hashes, namespace))

    def check(self) -> None:
        self._records.check()
        self._leaves.check(self._records.by_block.values())


PLUGIN = HashedIndex
