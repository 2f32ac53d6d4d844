"""Blocks by key: those that another engine names by hashes of its own.

They are in a disk tier (`KeyedTier`) or in the shared store (`KeyedRemote`).

The host has a prefix index of its own and asks for blocks by key. So each key is a path of one block in the
index of `KeyedTier`, and blocks may be stored and evicted in any order. Uses are counted from the last block
of a call to the first: policies that go by recency evict the end of a prompt before its beginning.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Condition, Lock
from typing import Protocol, TypeAlias

from sagellm.core.blocks import Tier
from sagellm.core.clock import Clock
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.eviction import NO_USE, PolicyFactory
from sagellm.core.protocols.kv_tiers import BlockStorage, ReadOutcome, StoredBlock
from sagellm.core.protocols.prefix_cache import PrefixHit
from sagellm.core.types import Namespace
from sagellm.engines.guests.paths import DIGEST_BYTES, TOKENS_PER_DIGEST, index_of_digests, path_of
from sagellm.kvmgr.kv_pool.free_list import FreeListPool
from sagellm.kvmgr.kv_pool.tiers.disk_slab import Scratch
from sagellm.kvmgr.kv_pool.tiers.remote import PutOutcome, RemoteStore
from sagellm.kvmgr.kv_pool.tiers.tier import KVTier, TierStore

CHUNK_BYTES = 16 << 20
"""Blocks are copied, written and read in pieces of this size, or one by one where a block is larger."""
NAMESPACE = Namespace()
_MISSES_OF_CALLERS = (ReadOutcome.OK, ReadOutcome.ABSENT)

Keys: TypeAlias = Sequence[bytes]
"""32 bytes each, of which the first 16 name the block in the index."""
Fill: TypeAlias = Callable[[int, memoryview], None]
"""Copies the block of `keys[i]` into memory."""
Deliver: TypeAlias = Callable[[int, memoryview], None]
"""Takes the block of `keys[i]`, verified. Its memory is used again after the call."""


class KeyedBlocks(Protocol):
    """Blocks of one size by key, for several threads at once.

    Trouble of the medium never raises.
    """

    @property
    def fault(self) -> str:
        """Why the medium is not used now; empty while it works."""

    def contains(self, keys: Keys) -> Sequence[bool]:
        """Which blocks are there. They are not read, and it does not count as a use."""

    def use(self, keys: Keys) -> None:
        """These blocks were used, from another memory."""

    def get(self, keys: Keys, deliver: Deliver) -> list[bool]:
        """Read blocks, and deliver those that verify; says which."""

    def put(self, keys: Keys, fill: Fill) -> list[bool]:
        """Store what is not there yet; says which blocks are there now.

        A block that another call is writing at this moment does not count as there.
        """

    def misses(self) -> Mapping[str, int]:
        """Blocks that were there and did not verify, by `ReadOutcome`."""

    def clear(self) -> None: ...

    def close(self) -> None: ...


class _Chunks:
    """Memory for blocks on their way, and pieces of calls that fit there."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._per_chunk = max(1, CHUNK_BYTES // block_bytes)
        self._scratch = Scratch(self._per_chunk * block_bytes)

    def over(self, places: Sequence[int]) -> Iterator[tuple[Sequence[int], memoryview]]:
        """Places, and memory for their blocks one behind the other."""
        memory = self._scratch.take()
        try:
            for first in range(0, len(places), self._per_chunk):
                chunk = places[first : first + self._per_chunk]
                yield chunk, memory[: len(chunk) * self.block_bytes]
        finally:
            self._scratch.give(memory)

    def block(self, memory: memoryview, number: int) -> memoryview:
        return memory[number * self.block_bytes : (number + 1) * self.block_bytes]


class KeyedTier:
    """Implements `KeyedBlocks` with a tier of slots, an index and an eviction policy.

    Owns the storage from its constructor, which recovers what is there from before, until `close`. The index
    is used under a lock, which is not held while bytes move. A call stores at most half of the slots.
    """

    def __init__(
        self,
        storage: BlockStorage,
        block_bytes: int,
        policy_factory: PolicyFactory,
        clock: Clock,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        index = index_of_digests(policy_factory, clock)
        pool = FreeListPool(storage.num_slots, TOKENS_PER_DIGEST)
        self.tier = KVTier(Tier.NVME, index, pool, storage)
        self._storage, self._now_s = storage, now_s
        self._chunks = _Chunks(block_bytes)
        self._calls = Condition(Lock())
        self._num_calls = 0
        self._writing: set[bytes] = set()
        self._is_closed = False
        self.num_recovered = self.tier.recover(_row_key)

    @property
    def fault(self) -> str:
        return "it is closed" if self._is_closed else self.tier.fault

    def contains(self, keys: Keys) -> Sequence[bool]:
        with self._calls:
            return [not self._is_closed and self._lookup(key).num_blocks > 0 for key in keys]

    def use(self, keys: Keys) -> None:
        with self._calls:
            for key in reversed([] if self._is_closed else keys):
                hit = self._lookup(key)
                if hit.num_blocks:
                    self._used(self.tier.index.pin(hit))

    def get(self, keys: Keys, deliver: Deliver) -> list[bool]:
        outcomes: dict[int, ReadOutcome] = {}
        with self._call() as is_open:
            hits = self._begin_loads(keys) if is_open else {}
            slots = {place: self.tier.index.block_ids(hit)[0] for place, hit in hits.items()}
        try:
            for chunk, memory in self._chunks.over(list(hits)):
                read = self._storage.read(
                    [slots[place] for place in chunk], [keys[place] for place in chunk], memory
                )
                for number, (place, outcome) in enumerate(zip(chunk, read, strict=True)):
                    if outcome is ReadOutcome.OK:
                        deliver(place, self._chunks.block(memory, number))
                    outcomes[place] = outcome
        finally:
            with self._end_call():
                for place in reversed(hits):
                    self._end_load(hits[place], slots[place], outcomes.get(place))
        return [outcomes.get(place) is ReadOutcome.OK for place in range(len(keys))]

    def put(self, keys: Keys, fill: Fill) -> list[bool]:
        held: dict[int, PrefixHit] = {}
        stores: dict[int, TierStore] = {}
        written: set[int] = set()
        with self._call() as is_open:
            if is_open and not self.fault:
                self._begin_stores(keys, held, stores)
        try:
            for chunk, memory in self._chunks.over(list(stores)):
                for number, place in enumerate(chunk):
                    fill(place, self._chunks.block(memory, number))
                self._storage.write(
                    [self._row(place, keys[place], stores[place].slots[0]) for place in chunk], memory
                )
                written.update(chunk)
        except OSError:  # the storage has said why, and is off
            pass
        finally:
            with self._end_call():
                for place in reversed(range(len(keys))):
                    if place in held:
                        self._used(held[place])
                    elif place in stores:
                        self.tier.end_store(stores[place], int(place in written))
                        self._writing.discard(keys[place])
        there = {keys[place] for place in (*held, *written)}
        return [key in there for key in keys]

    def misses(self) -> Mapping[str, int]:
        with self._calls:
            return {outcome.value: count for outcome, count in self.tier.misses.items()}

    def clear(self) -> None:
        """Evict all that is not being read."""
        with self._calls:
            if not self._is_closed:
                self.tier.clear()

    def close(self) -> None:
        """Wait for the calls of other threads and let go of the storage. Calls from now on find nothing."""
        with self._calls:
            is_first, self._is_closed = not self._is_closed, True
            self._calls.wait_for(lambda: not self._num_calls)
        if is_first:
            self._storage.close()

    def check(self) -> None:
        """Raise `BookkeepingError` where index, pool and arrivals disagree."""
        with self._calls:
            self.tier.check()

    # -- inside, with the lock

    @contextmanager
    def _call(self) -> Iterator[bool]:
        """The beginning of a call that moves bytes. False where the storage is closed."""
        with self._calls:
            self._num_calls += 1
            try:
                yield not self._is_closed
            except BaseException:
                self._num_calls -= 1
                raise

    @contextmanager
    def _end_call(self) -> Iterator[None]:
        with self._calls:
            try:
                yield
            finally:
                self._num_calls -= 1
                self._calls.notify_all()

    def _lookup(self, key: bytes) -> PrefixHit:
        return self.tier.lookup(path_of([key]), NAMESPACE)

    def _begin_loads(self, keys: Keys) -> dict[int, PrefixHit]:
        hits = {place: self._lookup(key) for place, key in enumerate(keys)}
        return {place: self.tier.begin_load(hit) for place, hit in hits.items() if hit.num_blocks}

    def _end_load(self, hit: PrefixHit, slot: int, outcome: ReadOutcome | None) -> None:
        """None: the block was not read after all."""
        is_read = outcome is ReadOutcome.OK
        if is_read:
            self._used(self.tier.index.pin(hit))
        elif outcome is not None and not self._storage.fault:
            self._storage.forget([slot])
        self.tier.end_load(hit, 0, int(is_read), outcome or ReadOutcome.OK)

    def _begin_stores(self, keys: Keys, held: dict[int, PrefixHit], stores: dict[int, TierStore]) -> None:
        """Pin what is there, and reserve slots for the rest.

        What another call is writing is left out.
        """
        for place, key in enumerate(keys):
            if key in self._writing:
                continue
            hit = self._lookup(key)
            if hit.num_blocks:
                held[place] = self.tier.index.pin(hit)
                continue
            store = self.tier.begin_store(path_of([key]), NAMESPACE, 1, use=NO_USE)
            if store is not None:
                stores[place] = store
                self._writing.add(key)

    def _used(self, hit: PrefixHit) -> None:
        """A pinned block was used: unpin it."""
        self._storage.touch(self.tier.index.block_ids(hit))
        self.tier.index.unpin(hit)

    def _row(self, place: int, key: bytes, slot: int) -> StoredBlock:
        """The row of a block. After a restart, too, later blocks of a call were used before earlier ones."""
        return StoredBlock(slot, key, b"", NAMESPACE, key[:DIGEST_BYTES], self._now_s() - place * 1e-6)


def _row_key(block: StoredBlock) -> bytes:
    """The key of a row, if its tokens are those of the key."""
    return block.token_hash if block.tokens == block.token_hash[:DIGEST_BYTES] else b""


class KeyedRemote:
    """Implements `KeyedBlocks` with the store that several instances share.

    The server evicts by itself. A block that is read or put stays for another `ttl_s`.
    """

    def __init__(self, store: RemoteStore, block_bytes: int) -> None:
        self._store = store
        self._chunks = _Chunks(block_bytes)

    @property
    def fault(self) -> str:
        return self._store.fault or ""

    def contains(self, keys: Keys) -> Sequence[bool]:
        return self._store.contains(keys) or [False] * len(keys)  # None: no answer

    def use(self, keys: Keys) -> None:
        """Nothing: it would be a round trip for blocks that are not wanted."""

    def get(self, keys: Keys, deliver: Deliver) -> list[bool]:
        found = [False] * len(keys)
        for chunk, memory in self._chunks.over(range(len(keys))):
            for number, outcome in enumerate(self._store.get([keys[place] for place in chunk], memory)):
                if outcome is ReadOutcome.OK:
                    deliver(chunk[number], self._chunks.block(memory, number))
                    found[chunk[number]] = True
        return found

    def put(self, keys: Keys, fill: Fill) -> list[bool]:
        stored = [False] * len(keys)
        for chunk, memory in self._chunks.over(range(len(keys))):
            for number, place in enumerate(chunk):
                fill(place, self._chunks.block(memory, number))
            blocks = [StoredBlock(0, keys[place], b"", NAMESPACE, b"", 0.0) for place in chunk]
            for place, outcome in zip(chunk, self._store.put(blocks, memory), strict=True):
                stored[place] = outcome in (PutOutcome.STORED, PutOutcome.PRESENT)
        return stored

    def misses(self) -> Mapping[str, int]:
        reads = Counter(self._store.num_reads)
        return {outcome.value: n for outcome, n in reads.items() if outcome not in _MISSES_OF_CALLERS}

    def clear(self) -> None:
        """Raises `ConfigError`: other instances use the blocks."""
        raise ConfigError(
            "the shared store is not cleared from here, since other instances use it: its blocks go when "
            "their time is over, or with FLUSHDB on the server"
        )

    def close(self) -> None:
        self._store.close()
