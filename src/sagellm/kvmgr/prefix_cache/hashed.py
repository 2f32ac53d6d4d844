"""`HashedIndex`: a dictionary from chained block hashes to blocks, one record per block.

This is the form in which other engines name blocks (vLLM's automatic prefix caching, and the KV events that
routers read). The hash of a block covers all tokens before it, so one flat dictionary holds every prefix.

Each block has its reference count (`BlockRecord.pins`): `pin` and `unpin` change it on the whole path.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from sagellm.core.blocks import cdiv
from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import BookkeepingError
from sagellm.core.events import BlocksRemoved, BlocksStored, EventBus, IndexCleared
from sagellm.core.protocols.eviction import NO_USE, EvictionPolicy, Extent, Hint, Use
from sagellm.core.protocols.prefix_cache import Branch, InsertResult, MatchEnd, MatchReport, PrefixHit
from sagellm.core.types import NO_ACCOUNT, TOKEN_BYTES, Account, BlockIds, Namespace, Retention, Tokens
from sagellm.kvmgr.prefix_cache._ghosts import Ghost, Ghosts
from sagellm.kvmgr.prefix_cache._leaves import AccountShare, EvictableLeaves
from sagellm.kvmgr.prefix_cache.fingerprint import chain

DEFAULT_NAMESPACE = Namespace()
KEY_BYTES = 8

HashBlocks = Callable[[bytes, int, Namespace, bytes | None], list[bytes]]
"""The signature of `fingerprint.chain`."""


@dataclass(slots=True, eq=False)
class BlockRecord:
    """One resident block; for a policy, an `Extent`. `num_blocks` is 0 once it has left the index.

    `pins` is the reference count: the pinned hits that cover the block; `num_ends` of them end with it. The
    times of the last use are exact for leaves: a removed block hands them to the block before it.
    """

    parent: BlockRecord | None
    hash: bytes
    data: bytes
    block_id: int
    namespace: Namespace
    share: AccountShare
    key: int
    first_position: int
    num_blocks: int = 1
    last_use: int = 0
    num_uses: int = 0
    used_s: float = 0.0
    bonus_s: float = 0.0
    use: Use = NO_USE
    hint: Hint | None = None
    pins: int = 0
    num_ends: int = 0
    children: dict[int, BlockRecord] = field(default_factory=dict)

    @property
    def tenant(self) -> str:
        return self.share.account.tenant or self.namespace.tenant

    @property
    def content(self) -> bytes:
        return self.data

    def path(self) -> Iterator[BlockRecord]:
        """This record and its ancestors."""
        record: BlockRecord | None = self
        while record is not None:
            yield record
            record = record.parent

    def leaves_below(self, left_out: BlockRecord | None) -> Iterator[BlockRecord]:
        """Leaves at or below this record, but for those below its child `left_out`."""
        stack = [self]
        while stack:
            record = stack.pop()
            if not record.children:
                yield record
            stack.extend(child for child in record.children.values() if child is not left_out)


class Records:
    """The resident blocks, found by chain hash and by block id.

    A hash says only where to look: the tokens are compared, and blocks with equal hashes are kept apart.
    """

    def __init__(self, block_bytes: int, hash_blocks: HashBlocks) -> None:
        self._block_bytes = block_bytes
        self._hash_blocks = hash_blocks
        self._by_hash: dict[bytes, list[BlockRecord]] = {}
        self._by_key: dict[int, BlockRecord] = {}
        self.by_block: dict[int, BlockRecord] = {}

    def __len__(self) -> int:
        return len(self.by_block)

    def __iter__(self) -> Iterator[BlockRecord]:
        return iter(self.by_block.values())

    def hash(self, block: bytes, parent: BlockRecord | None, namespace: Namespace) -> bytes:
        """The hash that `block` has, or would have, behind `parent`."""
        above = parent.hash if parent is not None else None
        return self._hash_blocks(block, self._block_bytes, namespace, above)[0]

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

    def followers(self, parent: BlockRecord | None, namespace: Namespace) -> Iterator[BlockRecord]:
        """The resident blocks right behind `parent` (None: at the beginning)."""
        return (record for record in self if record.parent is parent and record.namespace == namespace)

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
        position = parent.first_position + 1 if parent is not None else 0
        record = BlockRecord(parent, digest, block, block_id, namespace, share, key, position)
        self._by_hash.setdefault(digest, []).append(record)
        self._by_key[key] = self.by_block[block_id] = record
        share.num_cached += 1
        if parent is not None:
            parent.children[key] = record
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
        record.share.num_cached -= 1
        parent = record.parent
        if parent is not None:
            del parent.children[record.key]
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
        yield parent is not None and parent.children.get(record.key) is not record, "unknown to its parent"
        yield any(child.parent is not record for child in children), "it has a child of another block"
        yield record.num_ends < 0, f"{record.num_ends} hits end with it"
        pins = record.num_ends + sum(child.pins for child in children)
        yield record.pins != pins, f"it has {record.pins} pins, its hits and children {pins}"


class HashedIndex:
    """Implements `PrefixReuseIndex`. Not thread-safe: one engine thread owns it.

    `evict` gives up what `policy` chooses; without one, the block that was used longest ago, deeper ones
    first. With `policy_factory` each account has a policy of its own. `max_ghosts` bounds how many evictions
    `explain` remembers. `hash_blocks` replaces `fingerprint.chain` in tests.
    """

    def __init__(
        self,
        block_size: int = 16,
        policy: EvictionPolicy | None = None,
        events: EventBus | None = None,
        clock: Clock | None = None,
        policy_factory: Callable[[], EvictionPolicy] | None = None,
        max_ghosts: int = 4096,
        *,
        hash_blocks: HashBlocks = chain,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.block_size = block_size
        self._events = events or EventBus()
        self._clock = clock or MonotonicClock()
        self._block_bytes = block_size * TOKEN_BYTES
        self._records = Records(self._block_bytes, hash_blocks)
        self._leaves: EvictableLeaves[BlockRecord] = EvictableLeaves(policy, policy_factory)
        self._ghosts: Ghosts[bytes] = Ghosts(max_ghosts)
        self._num_touches = 0

    # -- counts

    @property
    def num_cached(self) -> int:
        return len(self._records)

    @property
    def num_evictable(self) -> int:
        return sum(share.num_evictable for share in self._leaves.shares.values())

    def evictable_by_account(self) -> Mapping[Account, int]:
        return self._leaves.evictable_by_account()

    def all_block_ids(self) -> BlockIds:
        return array("i", self._records.by_block)

    # -- read

    def lookup(
        self, tokens: Tokens, namespace: Namespace = DEFAULT_NAMESPACE, max_tokens: int | None = None
    ) -> PrefixHit:
        limit = len(tokens) if max_tokens is None else min(max_tokens, len(tokens))
        path = self._records.walk(tokens.tobytes(), limit // self.block_size, namespace)
        return self._hit(tokens, namespace, path)

    def branches(self, tokens: Tokens, k: int, namespace: Namespace = DEFAULT_NAMESPACE) -> list[Branch]:
        path = self._records.walk(tokens.tobytes(), len(tokens) // self.block_size, namespace)
        found: list[Branch] = []
        below: BlockRecord | None = None
        while path and len(found) < k:
            hit = self._hit(tokens, namespace, path)
            leaves = sorted(path[-1].leaves_below(below), key=lambda leaf: -leaf.last_use)
            found += [Branch(hit, leaf.first_position + 1, leaf.used_s) for leaf in leaves]
            below = path.pop()
        return found[: max(0, k)]

    def block_ids(self, hit: PrefixHit) -> BlockIds:
        return array("i", [record.block_id for record in reversed(self._records_of(hit))])

    def verify(self, hit: PrefixHit) -> bool:
        limit = hit.num_blocks * self.block_size
        return self.lookup(hit.tokens, hit.namespace, limit).num_blocks == hit.num_blocks

    def num_unpinned_on_path(self, hit: PrefixHit) -> int:
        return sum(not record.pins for record in self._records_of(hit))

    def num_held_alone(self, hit: PrefixHit) -> int:
        return sum(record.pins == 1 for record in self._records_of(hit))

    def explain(self, tokens: Tokens, namespace: Namespace = DEFAULT_NAMESPACE) -> MatchReport:
        data, total = tokens.tobytes(), len(tokens) // self.block_size
        path = self._records.walk(data, total, namespace)
        hit = self._hit(tokens, namespace, path)
        if hit.num_blocks == total:
            return MatchReport(hit.num_tokens, total, MatchEnd.COMPLETE)
        block = data[hit.num_blocks * self._block_bytes : (hit.num_blocks + 1) * self._block_bytes]
        others = {record.namespace for record in self._records} - {namespace}
        longest = max((len(self._records.walk(data, total, other)) for other in others), default=0)
        elsewhere = longest if longest > hit.num_blocks else 0
        ghost = self._ghosts.get(self._records.hash(block, hit.node, namespace))
        at_s, cause = ghost if ghost is not None else (None, None)
        end = MatchEnd.NEVER_SEEN
        if ghost is not None:
            end = MatchEnd.EVICTED
        elif elsewhere:
            end = MatchEnd.OTHER_NAMESPACE
        else:
            followers = self._records.followers(hit.node, namespace)
            if any(follower.data.startswith(block[:TOKEN_BYTES]) for follower in followers):
                end = MatchEnd.NOT_ALIGNED
        return MatchReport(hit.num_tokens, hit.num_blocks, end, at_s, cause, elsewhere)

    # -- pins: the reference counts

    def pin(self, hit: PrefixHit) -> PrefixHit:
        path = self._records_of(hit)
        if path:
            num_held = sum(record.pins > 0 for record in path)
            self._pin_path(path)
            share = path[0].share
            if share.listener is not None:
                share.listener.found(path[0], num_held)
        return self._hit(hit.tokens, hit.namespace, path[::-1])

    def _pin_path(self, path: Sequence[BlockRecord]) -> None:
        """Add one to the reference counts of a path, its last record first."""
        for record in path:
            record.num_uses += 1
            record.pins += 1
            if record.pins == 1:
                record.share.num_pinned += 1
                self._leaves.discard(record)
        path[0].num_ends += 1

    def unpin(self, hit: PrefixHit, use: Use = NO_USE) -> None:
        if not hit.num_blocks:
            return
        if not hit.node.num_ends:
            raise BookkeepingError(f"unpin of a prefix of {hit.num_blocks} blocks that is not pinned")
        self._num_touches += 1
        hit.node.last_use, hit.node.used_s = self._num_touches, self._clock.now()
        hit.node.use = use
        self._unpin_path(hit.node)
        if use is not NO_USE and hit.node.share.listener is not None:
            hit.node.share.listener.used(hit.node)

    # -- the policy

    def hint(self, hit: PrefixHit, hint: Hint) -> int:
        path = self._records_of(hit)
        if not path or ((hint.ended or hint.superseded) and path[0].children):
            return 0
        num_blocks, now_s = 0, self._clock.now()
        for record in path:
            if record is not path[0] and len(record.children) > 1:
                break
            self._leaves.hint(record, hint, now_s)
            num_blocks += 1
        return num_blocks

    def set_policy(self, factory: Callable[[], EvictionPolicy]) -> None:
        self._leaves.set_policy(factory)

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
            self._enter(path, existing)
        hit = self._hit(tokens, namespace, path)
        if pin and path:
            self._pin_path(path[::-1])
            if share.listener is not None:
                share.listener.added(path[-1], len(path) - existing, share.num_cached)
        elif existing < len(path):
            for record in path:
                record.num_uses += 1
            self._leaves.add(path[-1])
        return InsertResult(existing, hit)

    def retract(self, result: InsertResult) -> None:
        hit = result.hit
        if not hit.num_blocks:
            return
        last: BlockRecord = hit.node
        new = list(last.path())[: hit.num_blocks - result.num_existing]
        followers = sum(len(record.children) for record in new)
        if not last.num_ends or any(record.pins > 1 for record in new) or followers > max(0, len(new) - 1):
            raise BookkeepingError("retract of an insertion that is not pinned, or that others use by now")
        for record in last.path():
            record.num_uses -= 1
        self._unpin_path(last)
        for record in new:
            self._leaves.discard(record)
            parent = self._remove(record)
            if parent is not None:
                self._leaves.add(parent)
        self._emit_removed(new, "retracted")

    def evict(self, num_blocks: int, cause: str = "capacity") -> BlockIds | None:
        if num_blocks < 0:
            raise BookkeepingError(f"cannot evict {num_blocks} blocks")
        if num_blocks > self.num_evictable:
            return None
        gone: list[BlockRecord] = []
        before = -1
        # An evicted leaf may expose a parent of another account: repeat while blocks are freed.
        while before < len(gone) < num_blocks:
            before = len(gone)
            for share in self._leaves.shares_to_evict_from():
                self._evict_of(share, num_blocks - len(gone), gone)
        freed = self._record_evicted(gone, cause)
        if len(freed) < num_blocks:
            raise BookkeepingError(
                f"the eviction policy gave up {len(freed)} blocks of {num_blocks}; they are {freed.tolist()}"
            )
        return freed

    def evict_from(self, account: Account, num_blocks: int, cause: str = "capacity") -> BlockIds:
        if num_blocks < 0:
            raise BookkeepingError(f"cannot evict {num_blocks} blocks")
        gone: list[BlockRecord] = []
        share = self._leaves.shares.get(account)
        if share is not None:
            self._evict_of(share, min(num_blocks, share.num_evictable), gone)
        return self._record_evicted(gone, cause)

    def clear(self) -> BlockIds:
        freed = self.evict(self.num_evictable, "cleared")
        assert freed is not None
        for share in self._leaves.shares.values():
            if share.listener is not None:
                share.listener.cleared(share.num_cached)
        if not self._records and self._events.wants(IndexCleared):
            self._events.emit(IndexCleared())
        return freed

    def remap(self, moves: Mapping[int, int]) -> None:
        self._records.remap(moves)

    # -- inside: finding

    def _hit(self, tokens: Tokens, namespace: Namespace, path: Sequence[BlockRecord]) -> PrefixHit:
        node = path[-1] if path else None
        return PrefixHit(len(path) * self.block_size, len(path), tokens, namespace, node)

    def _current(self, hit: PrefixHit) -> PrefixHit:
        """The hit, or a new look-up if its last block has left the index."""
        if not hit.num_blocks or hit.node.num_blocks:
            return hit
        return self.lookup(hit.tokens, hit.namespace, hit.num_blocks * self.block_size)

    def _records_of(self, hit: PrefixHit) -> list[BlockRecord]:
        """The records of a hit, the deepest first."""
        hit = self._current(hit)
        return list(hit.node.path()) if hit.num_blocks else []

    # -- inside: insertion

    def _enter(self, path: Sequence[BlockRecord], existing: int) -> None:
        """Set the time of use of the new records, and report them as stored."""
        self._num_touches += 1
        now = self._clock.now()
        for record in path[existing:]:
            record.last_use, record.used_s = self._num_touches, now
            self._ghosts.discard(record.hash)
        if existing:
            self._leaves.discard(path[existing - 1])
        if self._events.wants(BlocksStored):
            self._events.emit(_stored(path, existing, self.block_size))

    def _retain(self, path: Sequence[BlockRecord], retention: Sequence[Retention]) -> None:
        """Raise the bonus of the blocks that ranges of tokens touch."""
        for bias in retention:
            start = bias.start // self.block_size
            stop = len(path) if bias.stop is None else cdiv(bias.stop, self.block_size)
            for record in path[start:stop]:
                if record.bonus_s < bias.bonus_s:
                    self._leaves.set_bonus(record, bias.bonus_s)

    def _unpin_path(self, last: BlockRecord) -> None:
        """Take one from the reference counts of a path."""
        last.num_ends -= 1
        for record in last.path():
            record.pins -= 1
            if not record.pins:
                record.share.num_pinned -= 1
                self._leaves.add(record, after_use=True)

    # -- inside: eviction

    def _evict_of(self, share: AccountShare, num_blocks: int, gone: list[BlockRecord]) -> None:
        """Evict `num_blocks` blocks of one account, or all it can; adds them to `gone`."""

        def give_up(extent: Extent, num_blocks: int) -> BlockRecord | None:
            record = self._leaves.by_key.get(extent.key)
            if record is None or record.share is not share or num_blocks != 1:
                raise BookkeepingError(f"the policy gave up {num_blocks} blocks of extent {extent.key:x}")
            gone.append(record)
            return self._remove(record)

        self._leaves.evict(share, num_blocks, give_up)

    def _remove(self, record: BlockRecord) -> BlockRecord | None:
        """Take out an evictable leaf.

        Returns its parent if that is an evictable leaf of the same account now. A parent of another account
        is given to the policy of that account.
        """
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

    def _record_evicted(self, gone: Sequence[BlockRecord], cause: str) -> BlockIds:
        """Keep ghosts, emit the events, and return the ids."""
        ghost = Ghost(self._clock.now(), cause)
        for record in gone:
            self._ghosts.add(record.hash, ghost)
        self._emit_removed(gone, cause)
        return array("i", [record.block_id for record in gone])

    def _emit_removed(self, gone: Sequence[BlockRecord], cause: str) -> None:
        if not self._events.wants(BlocksRemoved):
            return
        for namespace, records in groupby(gone, key=lambda record: record.namespace):
            ids, hashes = zip(*((record.block_id, record.hash) for record in records), strict=True)
            self._events.emit(BlocksRemoved(ids, cause, hashes, namespace))

    # -- check

    def check(self) -> None:
        self._records.check()
        leaves = {record.key: record for record in self._records if not record.pins and not record.children}
        self._require("evictable leaves", leaves, "in all", self._leaves.by_key)
        for share in self._leaves.shares.values():
            own = [record for record in self._records if record.share is share]
            self._require("blocks", len(own), share.account, share.num_cached)
            num_pinned = sum(record.pins > 0 for record in own)
            self._require("pinned blocks", num_pinned, share.account, share.num_pinned)
            if share.policy is not None:
                num_leaves = sum(leaf.share is share for leaf in leaves.values())
                self._require("blocks with its policy", num_leaves, share.account, share.policy.num_evictable)
                share.policy.check()

    def _require(self, what: str, found: object, owner: object, booked: object) -> None:
        if found != booked:
            raise BookkeepingError(f"{owner} has {found} {what}, the books say {booked}")


def _stored(path: Sequence[BlockRecord], existing: int, block_size: int) -> BlocksStored:
    new = path[existing:]
    return BlocksStored(
        block_ids=tuple(record.block_id for record in new),
        num_tokens_before=existing * block_size,
        hashes=tuple(record.hash for record in new),
        parent_hash=path[existing - 1].hash if existing else None,
        tokens=b"".join(record.data for record in new),
        namespace=new[0].namespace,
    )


PLUGIN = HashedIndex
