"""`PrefixIndex`: which prefixes each instance of a fleet has cached, told by KV events.

Instances share one radix tree for each namespace and block size, so a prompt is compared once for all of
them, as memory; instances drop out on the way down. The tree is in `_tree.py`.

Blocks are known by the hash that their publisher gave them; a block's content, and so its place, follows from
its parent and its tokens. Publishers may use different hashes and block sizes. What events do not tell apart
is not told apart here: the model, and images that stand for the same tokens. A wrong answer costs time alone.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

from sagellm.control_plane.kv_events.codec import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    salt_digest,
    tier_of,
)
from sagellm.control_plane.kv_events.sequence import Gap, Malformed, ReceivedBatch, Restart
from sagellm.control_plane.router._tree import (
    DEPTH,
    Edge,
    FleetTree,
    leading_in_any,
    leading_on_device,
    members,
)
from sagellm.core.blocks import Tier
from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import BookkeepingError, ConfigError
from sagellm.core.events import BlocksRemoved, BlocksStored, IndexCleared
from sagellm.core.protocols.router import NOT_CACHED, CachedPrefix
from sagellm.core.types import TOKEN_BYTES, Namespace, Tokens

KVEventItem: TypeAlias = (
    ReceivedBatch | Gap | Malformed | Restart
    | BlocksStored | BlocksRemoved | IndexCleared
    | BlockStored | BlockRemoved | AllBlocksCleared
)  # fmt: skip
"""What `PrefixIndex.apply` takes: items of a `KVEventSubscriber`, single events of the wire or the bus."""

MAX_BLOCKS = 1 << 20
STALE_S = 600.0
_HASH_BYTES = 8
_HASH_MASK = (1 << 64) - 1
_FORGET = 8
"""At its bound an instance forgets one in so many blocks at once, which keeps the mean cost constant."""
_DIGEST = len(salt_digest("a"))


@dataclass(slots=True)
class _Known:
    """Blocks of one tier of an instance: position by hash, oldest first. `suspects`: stored before events
    were lost; whether they are still there is not known."""

    positions: dict[int, int] = field(default_factory=dict)
    suspects: dict[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.positions) + len(self.suspects)

    def get(self, key: int) -> int | None:
        position = self.positions.get(key)
        return position if position is not None or not self.suspects else self.suspects.get(key)

    def pop(self, key: int) -> int | None:
        position = self.positions.pop(key, None)
        return position if position is not None or not self.suspects else self.suspects.pop(key, None)

    def suspect(self) -> None:
        if self.suspects:
            self.suspects.update(self.positions)
            self.positions.clear()
        else:
            self.suspects, self.positions = self.positions, {}


@dataclass(slots=True)
class EventCounts:
    """What was seen of one instance's events.

    `num_orphans`: blocks left out because their parent is not known, as when the events were read from the
    middle on. `num_malformed`: events whose tokens and blocks do not match. `num_ignored`: events of further
    KV groups. `num_forgotten`: blocks dropped at the bound. `num_gaps`: how often events were lost.
    """

    num_blocks: int = 0
    num_orphans: int = 0
    num_malformed: int = 0
    num_ignored: int = 0
    num_forgotten: int = 0
    num_gaps: int = 0


@dataclass(slots=True)
class _Instance:
    index: int
    known: dict[Tier, _Known] = field(default_factory=dict)
    counts: EventCounts = field(default_factory=EventCounts)
    stale_until_s: float | None = None

    def __len__(self) -> int:
        return sum(map(len, self.known.values()))


class PrefixIndex:
    """One for a fleet, used from one thread.

    An instance is known from its first event, or from `join`, until `leave`. At most `max_blocks` blocks of
    each of its tiers are remembered. After lost events it is not fresh: what is known of it is a guess until
    its cache is cleared, or `stale_s` seconds have passed, in which each block that is stored again is
    confirmed, and the others are forgotten.
    """

    def __init__(
        self, clock: Clock | None = None, *, max_blocks: int = MAX_BLOCKS, stale_s: float = STALE_S
    ) -> None:
        if max_blocks < _FORGET or not stale_s >= 0:
            raise ConfigError(
                f"a prefix index needs max_blocks of at least {_FORGET} and stale_s of at least 0, got "
                f"{max_blocks} and {stale_s}"
            )
        self._clock = clock or MonotonicClock()
        self._max_blocks = max_blocks
        self._stale_s = stale_s
        self._tree = FleetTree()
        self._instances: dict[str, _Instance] = {}
        self._free: list[int] = []
        self._tiered = 0  # bitmask of instances with blocks below the device
        self._asked: tuple[str, ...] | None = None  # the last ids that were asked for, and their indexes
        self._asked_indexes: list[int] = []

    @property
    def num_blocks(self) -> int:
        """Different blocks, however many instances hold them."""
        return self._tree.num_blocks

    # -- instances

    def join(self, instance_id: str) -> None:
        """Add an instance whose cache is empty. All its events go to `apply`."""
        self._instance(instance_id)

    def leave(self, instance_id: str) -> None:
        """Forget an instance. Does nothing for one that is not known."""
        instance = self._instances.get(instance_id)
        if instance is not None:
            self._clear(instance, list(instance.known))
            del self._instances[instance_id]
            self._free.append(instance.index)
            self._asked = None

    def is_fresh(self, instance_id: str) -> bool:
        """Whether all of the instance's cache is known; False without such an instance."""
        instance = self._instances.get(instance_id)
        if instance is None:
            return False
        if instance.stale_until_s is not None and self._clock.now() >= instance.stale_until_s:
            self._expire(instance)
        return instance.stale_until_s is None

    def events_of(self, instance_id: str) -> EventCounts:
        """The counts of an instance; zeros for one that is not known."""
        instance = self._instances.get(instance_id)
        if instance is None:
            return EventCounts()
        instance.counts.num_blocks = len(instance)
        return instance.counts

    def whole_edges(self, tokens: Tokens, namespace: Namespace) -> Iterator[Edge]:
        """Edges of the tree all of whose blocks a prompt has, the first first."""
        roots = self._tree.roots.get(_space(namespace.tenant, namespace.adapter))
        data = tokens.tobytes() if roots else b""
        for root in roots.values() if roots else ():
            path, end = self._tree.walk(root, data)
            yield from (edge for edge in path if edge.end <= end)

    def edge(self, number: int) -> Edge | None:
        """An edge by its number; None if it has no blocks any more."""
        edge = self._tree.edges.get(number)
        return edge if edge is not None and edge.end > edge.start else None

    def names_of(self, mask: int) -> frozenset[str]:
        """The instances of a bitmask."""
        return frozenset(name for name, known in self._instances.items() if mask >> known.index & 1)

    def _instance(self, instance_id: str) -> _Instance:
        instance = self._instances.get(instance_id)
        if instance is None:
            index = self._free.pop() if self._free else len(self._instances)
            instance = self._instances[instance_id] = _Instance(index)
            self._asked = None
        return instance

    # -- read

    def lookup(self, tokens: Tokens, namespace: Namespace, instance_ids: Iterable[str]) -> list[CachedPrefix]:
        """How much of a prompt each instance has, in the order of `instance_ids`."""
        roots = self._tree.roots.get(_space(namespace.tenant, namespace.adapter))
        data = tokens.tobytes() if roots else b""
        unknown = len(self._instances) + len(self._free)  # the last entry: instances that are not known
        found = [NOT_CACHED] * (unknown + 1)
        is_first = True
        for block_bytes, root in roots.items() if roots else ():
            path, end = self._tree.walk(root, data)
            if not path:
                continue
            block_tokens = block_bytes // TOKEN_BYTES
            groups = [
                (mask, CachedPrefix(num_blocks * block_tokens, num_blocks * block_tokens))
                for mask, num_blocks in leading_on_device(path, end)
            ]
            if is_first:
                found, is_first = _spread(groups, unknown + 1), False
            else:
                for mask, prefix in groups:
                    for index in members(mask):
                        found[index] = max(found[index], prefix)
            for mask, num_blocks in leading_in_any(path, end, self._tiered) if self._tiered else ():
                for index in members(mask):
                    if num_blocks * block_tokens > found[index].num_tokens:
                        found[index] = found[index]._replace(num_tokens=num_blocks * block_tokens)
        return list(map(found.__getitem__, self._indexes(instance_ids)))

    def _indexes(self, instance_ids: Iterable[str]) -> list[int]:
        """The index of each instance; -1: not known. Those of the last call are kept."""
        asked = tuple(instance_ids)
        if asked != self._asked:
            known = self._instances
            self._asked = asked
            self._asked_indexes = [known[name].index if name in known else -1 for name in asked]
        return self._asked_indexes

    # -- write

    def apply(self, instance_id: str, item: KVEventItem) -> None:
        """Take in one item of an instance's events. Never raises for what a publisher sends."""
        instance = self._instance(instance_id)
        if isinstance(item, ReceivedBatch):
            for event in item.batch.events:
                self._on_event(instance, event)
        elif isinstance(item, Restart):
            self._clear(instance, list(instance.known))
            instance.stale_until_s = None
        elif isinstance(item, Gap | Malformed):
            self._on_gap(instance)
        else:
            self._on_event(instance, item)
        if instance.stale_until_s is not None and self._clock.now() >= instance.stale_until_s:
            self._expire(instance)

    def _on_event(
        self,
        instance: _Instance,
        event: BlockStored | BlockRemoved | AllBlocksCleared | BlocksStored | BlocksRemoved | IndexCleared,
    ) -> None:
        match event:
            case BlockStored():
                self._on_wire_stored(instance, event)
            case BlockRemoved():
                if event.group_idx:
                    instance.counts.num_ignored += 1
                else:
                    self._remove(instance, tier_of(event.medium), _keys(event.block_hashes))
            case BlocksStored():
                space = _space(event.namespace.tenant, event.namespace.adapter)
                self._store(instance, event.tier, space, event.parent_hash, event.hashes, event.tokens)
            case BlocksRemoved():
                self._remove(instance, event.tier, _keys(event.hashes))
            case AllBlocksCleared() | IndexCleared():
                self._clear(instance, [Tier.HBM])
                if not any(known.suspects for known in instance.known.values()):
                    instance.stale_until_s = None

    def _on_wire_stored(self, instance: _Instance, event: BlockStored) -> None:
        if event.group_idx:  # the first KV group of a model stands for all
            instance.counts.num_ignored += 1
            return
        try:
            data = array("i", event.token_ids).tobytes()
        except (OverflowError, TypeError):
            instance.counts.num_malformed += 1
            return
        space = _wire_space(event) if event.parent_block_hash is None else ("", "")
        self._store(instance, tier_of(event.medium), space, event.parent_block_hash, event.block_hashes, data)

    def _on_gap(self, instance: _Instance) -> None:
        instance.counts.num_gaps += 1
        for known in instance.known.values():
            known.suspect()
        instance.stale_until_s = self._clock.now() + self._stale_s

    def _expire(self, instance: _Instance) -> None:
        """Forget what was not confirmed since events were lost."""
        instance.stale_until_s = None
        for tier, known in instance.known.items():
            if known.suspects:
                self._remove(instance, tier, list(known.suspects))

    # -- store

    def _store(
        self,
        instance: _Instance,
        tier: Tier,
        space: tuple[str, str],
        parent: BlockHash | None,
        hashes: Sequence[BlockHash],
        data: bytes,
    ) -> None:
        if not hashes:
            return
        keys, counts = _keys(hashes), instance.counts
        known = instance.known.get(tier)
        if known is None:
            known = instance.known[tier] = _Known()
        if tier is not Tier.HBM:
            self._tiered |= 1 << instance.index
        if data:
            self._store_below(instance, tier, space, parent, keys, data)
        else:
            self._store_known(instance, tier, keys)
        if len(known) > self._max_blocks:
            oldest = list(islice(known.suspects or known.positions, self._max_blocks // _FORGET))
            counts.num_forgotten += len(oldest)
            self._remove(instance, tier, oldest)

    def _store_below(
        self,
        instance: _Instance,
        tier: Tier,
        space: tuple[str, str],
        parent: BlockHash | None,
        keys: Sequence[int],
        data: bytes,
    ) -> None:
        counts = instance.counts
        block_bytes, rest = divmod(len(data), len(keys))
        if rest or block_bytes % TOKEN_BYTES:
            counts.num_malformed += 1
            return
        if parent is None:
            self._insert(instance, tier, self._tree.root(space, block_bytes), 0, data, keys)
        else:
            found = self._parent(instance, instance.known[tier], _keys((parent,))[0])
            if found is None or found[0].block_bytes != block_bytes:
                counts.num_orphans += len(keys)
                return
            edge, depth = found
            self._insert(instance, tier, edge, depth + 1, data, keys)

    def _parent(self, instance: _Instance, known: _Known, key: int) -> tuple[Edge, int] | None:
        """The edge and depth of a block that an instance has in some tier."""
        for holder in (known, *instance.known.values()):
            position = holder.get(key)
            if position is not None:
                found = self._tree.find(position)
                if found is not None and key in holder.positions:
                    self._rename(holder.positions, key, position, found[0])
                return found
        return None

    def _rename(self, positions: dict[int, int], key: int, position: int, edge: Edge) -> None:
        """Let a position name its present edge, so that no parents are climbed."""
        number = position >> 32
        if number != edge.number:
            positions[key] = position & DEPTH | edge.number << 32
            edge.num_positions += 1
            self._tree.release(number)

    def _store_known(self, instance: _Instance, tier: Tier, keys: Sequence[int]) -> None:
        """Blocks without tokens, as vLLM's offloading sends them: those whose place another tier knows."""
        target = instance.known[tier]
        for key in keys:
            found = self._parent(instance, target, key)
            if found is None:
                instance.counts.num_orphans += 1
            else:
                edge, depth = found
                edge.holding(is_device=tier is Tier.HBM).add(
                    instance.index, depth - edge.start, 1, edge.num_blocks
                )
                self._add_positions(instance, tier, edge, depth, [key])

    def _insert(
        self, instance: _Instance, tier: Tier, edge: Edge, at: int, data: bytes, keys: Sequence[int]
    ) -> None:
        """Store blocks below depth `at` of a path; `edge` has that depth."""
        size, done, total, is_device = edge.block_bytes, 0, len(keys), tier is Tier.HBM
        while done < total:
            if at == edge.end:
                child = edge.children.get(data[done * size : (done + 1) * size])
                if child is None:
                    self._append(instance, tier, edge, data[done * size :], keys[done:])
                    return
                edge = child
            count = edge.common_blocks(data, done * size, at - edge.start)
            if count:
                edge.holding(is_device=is_device).add(instance.index, at - edge.start, count, edge.num_blocks)
                self._add_positions(instance, tier, edge, at, keys[done : done + count])
                done += count
                at += count
            if done < total and at < edge.end:
                edge = self._tree.split(edge, at - edge.start)

    def _append(self, instance: _Instance, tier: Tier, edge: Edge, data: bytes, keys: Sequence[int]) -> None:
        """Store blocks that the tree does not have below `edge`."""
        tree, size, done, is_device = self._tree, edge.block_bytes, 0, tier is Tier.HBM
        room = tree.room(edge, instance.index)
        if room > 0:
            done, at = min(room, len(keys)), edge.end
            tree.extend(edge, data[: done * size], instance.index, is_device=is_device)
            self._add_positions(instance, tier, edge, at, keys[:done])
        for new in tree.add_path(edge, data[done * size :]):
            new.holding(is_device=is_device).full = 1 << instance.index
            self._add_positions(instance, tier, new, new.start, keys[done : done + new.num_blocks])
            done += new.num_blocks

    def _add_positions(
        self, instance: _Instance, tier: Tier, edge: Edge, at: int, keys: Sequence[int]
    ) -> None:
        """Remember an instance's hashes of an edge's blocks, from depth `at` on."""
        known, first = instance.known[tier], edge.number << 32 | at
        positions, before = known.positions, len(known.positions)
        if known.suspects:
            for key in keys:
                position = known.suspects.pop(key, None)
                if position is not None:
                    positions[key] = position
        if positions.keys().isdisjoint(keys):
            positions.update(zip(keys, range(first, first + len(keys)), strict=True))
            edge.num_positions += len(positions) - before
            if len(positions) - before < len(keys):  # one hash for several blocks: the last is right
                for position, key in enumerate(keys, first):
                    if positions[key] != position:
                        self._discard(instance, tier, edge, 1 << (position - first + at - edge.start))
            return
        for position, key in enumerate(keys, first):
            old = positions.get(key)
            if old == position:
                continue
            if old is not None:
                found = self._tree.find(old)
                if found == (edge, position & DEPTH):
                    self._rename(positions, key, old, edge)
                    continue
                self._remove(instance, tier, [key])  # the same hash in another place: the former is wrong
            positions[key] = position
            edge.num_positions += 1

    # -- remove

    def _remove(self, instance: _Instance, tier: Tier, keys: Iterable[int]) -> None:
        """Blocks leave a tier; those that are not known there are passed over."""
        known, tree = instance.known.get(tier), self._tree
        if known is None:
            return
        others = [
            other
            for held, other in instance.known.items()
            if other is not known and len(other) and Tier.HBM not in (held, tier)
        ]
        current: Edge | None = None
        bits = 0
        for key in keys:
            position = known.pop(key)
            if position is None:
                continue
            found = tree.find(position)
            tree.release(position >> 32)
            if found is None or any(other.get(key) is not None for other in others):
                continue
            edge, depth = found
            if edge is not current:
                self._discard(instance, tier, current, bits)
                current, bits = edge, 0
            bits |= 1 << (depth - edge.start)
        self._discard(instance, tier, current, bits)

    def _discard(self, instance: _Instance, tier: Tier, edge: Edge | None, bits: int) -> None:
        if edge is not None:
            num_blocks = edge.num_blocks
            edge.holding(is_device=tier is Tier.HBM).discard(instance.index, bits, num_blocks)
            if not edge.children and bits.bit_length() >= num_blocks:
                self._tree.trim(edge)

    def _clear(self, instance: _Instance, tiers: Iterable[Tier]) -> None:
        """Drop all blocks of some tiers: the device's, or all."""
        tree, touched = self._tree, set[Edge]()
        for tier in tiers:
            known = instance.known.pop(tier, None)
            if known is None:
                continue
            numbers = Counter(position >> 32 for position in known.positions.values())
            numbers.update(position >> 32 for position in known.suspects.values())
            for number in numbers:
                edge = tree.edges[number]
                while edge.parent is not None and edge not in touched:
                    touched.add(edge)
                    edge = edge.parent
            for edge in touched:
                holding = edge.device if tier is Tier.HBM else edge.lower
                if holding is not None:
                    holding.drop(instance.index)
            for number, count in numbers.items():
                tree.release(number, count)
        if not any(tier is not Tier.HBM for tier in instance.known):
            self._tiered &= ~(1 << instance.index)
        for edge in touched:
            tree.trim(edge)

    def check(self) -> None:
        """Raise `BookkeepingError` where hashes, positions and holders contradict each other."""
        self._tree.check()
        named: Counter[int] = Counter()
        held: dict[tuple[int, bool, int], int] = {}
        for instance in self._instances.values():
            for tier, known in instance.known.items():
                if not known.positions.keys().isdisjoint(known.suspects):
                    raise BookkeepingError(f"instance {instance.index}: a block is confirmed and suspect")
                for position in (*known.positions.values(), *known.suspects.values()):
                    named[position >> 32] += 1
                    found = self._tree.find(position)
                    if found is not None:
                        edge, depth = found
                        key = (edge.number, tier is Tier.HBM, instance.index)
                        held[key] = held.get(key, 0) | 1 << (depth - edge.start)
        for number, edge in self._tree.edges.items():
            if edge.num_positions != named[number]:
                raise BookkeepingError(
                    f"edge {number} counts {edge.num_positions} positions, {named[number]} name it"
                )
            for is_device, holding in ((True, edge.device), (False, edge.lower)):
                for index in (*members(holding.full), *holding.partial) if holding is not None else ():
                    assert holding is not None
                    bits = holding.bits_of(index, edge.num_blocks)
                    if bits & ~held.get((number, is_device, index), 0):
                        raise BookkeepingError(f"edge {number}: instance {index} holds a block without hash")


def _keys(hashes: Sequence[BlockHash]) -> list[int]:
    """The last 8 bytes of each hash as a number, as on the wire."""
    return [
        block_hash & _HASH_MASK
        if isinstance(block_hash, int)
        else int.from_bytes(block_hash[-_HASH_BYTES:], "big")
        for block_hash in hashes
    ]


def _spread(groups: list[tuple[int, CachedPrefix]], size: int) -> list[CachedPrefix]:
    """The prefix of each instance, by index, from bitmasks of instances with one prefix.

    The masks are disjoint. In a large fleet most instances have the same, as a common system prompt has it:
    that fills the list."""
    rest = (1 << size) - 1
    for mask, _ in groups:
        rest ^= mask
    groups = [*groups, (rest, NOT_CACHED)]
    most, common = max(groups, key=lambda group: group[0].bit_count())
    found = [common] * size
    for mask, prefix in groups:
        for index in members(mask) if mask != most else ():
            found[index] = prefix
    return found


def _space(tenant: str, adapter: str) -> tuple[str, str]:
    """What separates prefixes: the tenant's digest and the adapter.

    An event of the wire has the digest already."""
    is_digest = tenant.startswith("salt:") and len(tenant) == _DIGEST
    return (tenant if is_digest or not tenant else salt_digest(tenant)), adapter


def _wire_space(event: BlockStored) -> tuple[str, str]:
    """The same of a prompt's first block. vLLM gives the salt as the last of the first block's extra keys."""
    adapter = event.lora_name or ("" if event.lora_id is None else str(event.lora_id))
    salt = event.cache_salt or ""
    if not salt and event.extra_keys and event.extra_keys[0]:
        texts = [key for key in event.extra_keys[0] if isinstance(key, str) and key != adapter]
        salt = texts[-1] if texts else ""
    return _space(salt, adapter)
