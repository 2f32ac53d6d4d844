"""What the hashed index keeps: a record per block, found by its chain hash, its key and its block id."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.eviction import NO_USE, EvictionPolicy, GiveUp, Hint, Use, UseListener, bonus_of
from sagellm.core.types import Account, BlockIds, Namespace

KEY_BYTES = 8

HashBlocks = Callable[[bytes, int, Namespace, bytes | None], list[bytes]]
"""The signature of `fingerprint.chain`."""


@dataclass(slots=True, eq=False)
class BlockRecord:
    """One resident block; for a policy, an `Extent`. `num_blocks` is 0 once it has left the index.

    `pins` counts the pinned hits that cover the block, `num_ends` those of them that end with it. The times
    of the last use are exact for leaves: a block that goes hands them to the one before it.
    """

    parent: BlockRecord | None
    hash: bytes
    data: bytes
    block_id: int
    namespace: Namespace
    share: Share
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

    @property
    def is_evictable_leaf(self) -> bool:
        return not self.pins and not self.children

    def take_hint(self, hint: Hint, now_s: float) -> None:
        """Note a hint until the next use, and tell the policy, if it has this record now."""
        self.hint = hint.over(self.hint)
        if hint.duration_s is not None:
            self.bonus_s = bonus_of(hint, now_s - self.used_s)
        if self.is_evictable_leaf:
            if hint.duration_s is not None:
                self.share.withdraw(self)
                self.share.offer(self)
            if self.share.policy is not None:
                self.share.policy.hint(self.key, self.hint)

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


@dataclass(slots=True, eq=False)
class Share:
    """What one account has in the index: blocks, those of them that are pinned, and evictable leaves by key.

    The leaves are in the hands of `policy`, where there is one.
    """

    account: Account
    policy: EvictionPolicy | None
    num_blocks: int = 0
    num_pinned: int = 0
    leaves: dict[int, BlockRecord] = field(default_factory=dict)

    @property
    def num_evictable(self) -> int:
        return self.num_blocks - self.num_pinned

    @property
    def listener(self) -> UseListener | None:
        """The policy, if it wants to know every use."""
        policy: object = self.policy
        return policy if isinstance(policy, UseListener) else None

    def offer(self, record: BlockRecord, *, returning: bool = False) -> None:
        """The record is one of the leaves from now on (`returning`: because its last user went)."""
        self.leaves[record.key] = record
        if self.policy is not None:
            (self.policy.unpin if returning else self.policy.insert)(record)

    def withdraw(self, record: BlockRecord, *, in_use: bool = False) -> bool:
        """The record is no evictable leaf any more (`in_use`: it is pinned); answers whether it was one."""
        if self.leaves.pop(record.key, None) is None:
            return False
        if self.policy is not None:
            (self.policy.pin if in_use else self.policy.remove)(record.key)
        return True

    def introduce(self, policy: EvictionPolicy) -> EvictionPolicy:
        """Tell a policy that is to take over of the leaves, in order of their last use; returns it."""
        for leaf in sorted(self.leaves.values(), key=lambda leaf: leaf.last_use):
            policy.insert(leaf)
        return policy

    def give_up(self, num_blocks: int, give_up: GiveUp) -> None:
        """Have `give_up` called for `num_blocks` blocks, or for as many as it takes until no leaf is left."""
        if self.policy is not None:
            self.policy.evict(num_blocks, give_up)
            return
        queue = [_age(leaf) for leaf in self.leaves.values()]
        heapq.heapify(queue)
        while num_blocks and queue:
            num_blocks -= 1
            above = give_up(self.leaves[heapq.heappop(queue)[2]], 1)
            if above is not None:
                heapq.heappush(queue, _age(self.leaves[above.key]))

    def check(self, own: Sequence[BlockRecord]) -> None:
        """Raise `BookkeepingError` if the counts do not fit the account's own records."""
        leaves = {record.key: record for record in own if record.is_evictable_leaf}
        self._require("blocks", len(own), self.num_blocks)
        self._require("pinned blocks", sum(record.pins > 0 for record in own), self.num_pinned)
        self._require("evictable leaves", leaves, self.leaves)
        if self.policy is not None:
            self._require("blocks with its policy", len(leaves), self.policy.num_evictable)
            self.policy.check()

    def _require(self, what: str, found: object, booked: object) -> None:
        if found != booked:
            raise BookkeepingError(f"{self.account} has {found} {what}, the books say {booked}")


def _age(leaf: BlockRecord) -> tuple[int, int, int]:
    return (leaf.last_use, -leaf.first_position, leaf.key)


class Records:
    """The resident blocks. A hash says only where to look: the tokens are compared, and blocks that happen to
    have one hash stand side by side."""

    def __init__(self, step: int, hash_blocks: HashBlocks) -> None:
        self._step = step
        self._hash_blocks = hash_blocks
        self._by_hash: dict[bytes, list[BlockRecord]] = {}
        self._by_key: dict[int, BlockRecord] = {}
        self.by_block: dict[int, BlockRecord] = {}

    def __len__(self) -> int:
        return len(self.by_block)

    def __iter__(self) -> Iterator[BlockRecord]:
        return iter(self.by_block.values())

    def hash(self, block: bytes, parent: BlockRecord | None, namespace: Namespace) -> bytes:
        """The name that `block` has, or would have, behind `parent`."""
        above = parent.hash if parent is not None else None
        return self._hash_blocks(block, self._step, namespace, above)[0]

    def find(self, block: bytes, parent: BlockRecord | None, namespace: Namespace) -> BlockRecord | None:
        for record in self._by_hash.get(self.hash(block, parent, namespace), ()):
            if record.parent is parent and record.data == block and record.namespace == namespace:
                return record
        return None

    def walk(self, data: bytes, limit: int, namespace: Namespace) -> list[BlockRecord]:
        """The records of the leading blocks of `data` that are resident, at most `limit`."""
        path: list[BlockRecord] = []
        parent: BlockRecord | None = None
        for start in range(0, limit * self._step, self._step):
            parent = self.find(data[start : start + self._step], parent, namespace)
            if parent is None:
                break
            path.append(parent)
        return path

    def namespaces(self) -> set[Namespace]:
        return {record.namespace for record in self}

    def followers(self, parent: BlockRecord | None, namespace: Namespace) -> Iterator[BlockRecord]:
        """The resident blocks right behind `parent` (None: at the beginning)."""
        return (one for one in self if one.parent is parent and one.namespace == namespace)

    def add(
        self, parent: BlockRecord | None, block: bytes, block_id: int, namespace: Namespace, share: Share
    ) -> BlockRecord:
        name = self.hash(block, parent, namespace)
        key = int.from_bytes(name[:KEY_BYTES], "little")
        while key in self._by_key:  # a policy must not take one block for another
            key = (key + 1) % (1 << 8 * KEY_BYTES)
        position = parent.first_position + 1 if parent is not None else 0
        record = BlockRecord(parent, name, block, block_id, namespace, share, key, position)
        self._by_hash.setdefault(name, []).append(record)
        self._by_key[key] = self.by_block[block_id] = record
        share.num_blocks += 1
        if parent is not None:
            parent.children[key] = record
        return record

    def remove(self, record: BlockRecord) -> None:
        """Take out an evictable leaf. Whoever used it last used its parent too."""
        same_name = self._by_hash[record.hash]
        same_name.remove(record)
        if not same_name:
            del self._by_hash[record.hash]
        del self._by_key[record.key]
        del self.by_block[record.block_id]
        record.num_blocks = 0
        record.share.num_blocks -= 1
        parent = record.parent
        if parent is not None:
            del parent.children[record.key]
            parent.last_use = max(parent.last_use, record.last_use)
            if record.used_s >= parent.used_s:
                parent.used_s, parent.use = record.used_s, record.use

    def check_new(self, block_ids: BlockIds, path: Sequence[BlockRecord]) -> None:
        """Raise unless each id is new here, or stands at its very place of the path."""
        if len(set(block_ids)) < len(block_ids) or min(block_ids, default=0) < 0:
            raise BookkeepingError(f"block ids must be different and not negative: {block_ids.tolist()}")
        for position, block_id in enumerate(block_ids):
            record = self.by_block.get(block_id)
            if record is not None and (position >= len(path) or path[position] is not record):
                raise BookkeepingError(f"block {block_id} is in the index already, at another place")

    def remap(self, moves: Mapping[int, int]) -> None:
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
        """Raise `BookkeepingError` naming the first block whose record does not fit the others."""
        for block_id, record in self.by_block.items():
            for wrong, what in self._faults(block_id, record):
                if wrong:
                    raise BookkeepingError(f"block {block_id}: {what}")
        named = sum(len(same_name) for same_name in self._by_hash.values())
        if not named == len(self._by_key) == len(self.by_block):
            raise BookkeepingError(
                f"{len(self.by_block)} blocks have {named} hashes and {len(self._by_key)} keys"
            )

    def _faults(self, block_id: int, record: BlockRecord) -> Iterator[tuple[bool, str]]:
        parent, children = record.parent, record.children.values()
        yield record.block_id != block_id, f"its record says {record.block_id}"
        yield self._by_key.get(record.key) is not record, "not found by its key"
        yield self.find(record.data, parent, record.namespace) is not record, "not found by its tokens"
        yield record.hash != self.hash(record.data, parent, record.namespace), "it has another block's hash"
        yield len(record.data) != self._step, f"it holds {len(record.data)} bytes of tokens"
        yield record.num_blocks != 1, "it has left the index"
        yield record.first_position != sum(1 for _ in record.path()) - 1, "it is at a wrong position"
        yield parent is not None and parent.children.get(record.key) is not record, "unknown to its parent"
        yield any(child.parent is not record for child in children), "it has a child of another block"
        yield record.num_ends < 0, f"{record.num_ends} hits end with it"
        pins = record.num_ends + sum(child.pins for child in children)
        yield record.pins != pins, f"it has {record.pins} pins, its hits and children {pins}"
