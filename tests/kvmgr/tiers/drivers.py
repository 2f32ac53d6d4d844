"""A device of numbered blocks, tiers below it, and a user that checks every byte."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from sagellm.core.blocks import Tier
from sagellm.core.clock import Clock, ManualClock
from sagellm.core.protocols.eviction import NO_USE
from sagellm.core.protocols.kv_tiers import (
    BlockBytes,
    BlockStorage,
    Buffer,
    ReadOutcome,
    StoredBlock,
    TierLookup,
)
from sagellm.core.types import NO_ACCOUNT, TOKEN_BYTES, BlockIds, Namespace, Tokens
from sagellm.engines.build import make_policy
from sagellm.kvmgr.eviction import PrefillCostModel
from sagellm.kvmgr.kv_pool.free_list import FreeListPool
from sagellm.kvmgr.kv_pool.tiers.admission import AdmissionFilter
from sagellm.kvmgr.kv_pool.tiers.arrivals import PrefixArrivals
from sagellm.kvmgr.kv_pool.tiers.circuit_breaker import CircuitBreaker
from sagellm.kvmgr.kv_pool.tiers.hierarchy import HierarchyManager
from sagellm.kvmgr.kv_pool.tiers.migrator import KVMigrator
from sagellm.kvmgr.kv_pool.tiers.remote import PutOutcome, RemoteStore
from sagellm.kvmgr.kv_pool.tiers.remote_storage import RemoteStorage
from sagellm.kvmgr.kv_pool.tiers.remote_tier import RemoteTier
from sagellm.kvmgr.kv_pool.tiers.tier import KVTier
from sagellm.kvmgr.prefix_cache.fingerprint import HASH_BYTES, chain
from sagellm.kvmgr.prefix_cache.radix import RadixIndex

SIZE, BLOCK_BYTES = 2, 64
INDEX = "prefix index"


def hashes_of(path: bytes, namespace: Namespace) -> list[bytes]:
    return chain(path, SIZE * TOKEN_BYTES, namespace)


def content(token_hash: bytes) -> bytes:
    """The KV that the block of this hash must have."""
    return token_hash * (BLOCK_BYTES // HASH_BYTES)


class FakeDevice:
    """Implements `BlockBytes` over an array."""

    bytes_per_block = BLOCK_BYTES

    def __init__(self, num_blocks: int) -> None:
        self.blocks = np.zeros((num_blocks, BLOCK_BYTES), np.uint8)

    def follow_steps(self) -> None:
        pass

    def read_blocks(self, block_ids: Sequence[int], target: memoryview) -> None:
        target[:] = self.blocks[list(block_ids)].tobytes()

    def write_blocks(self, block_ids: Sequence[int], data: Buffer) -> None:
        rows = np.frombuffer(bytes(data), np.uint8).reshape(len(block_ids), BLOCK_BYTES)
        self.blocks[list(block_ids)] = rows


class FaultyStorage:
    """Implements `BlockStorage` in a dictionary, with faults at random in every read and write."""

    def __init__(self, num_slots: int, seed: int = 0, fault_rate: float = 0.0) -> None:
        self.num_slots, self.fault_rate = num_slots, fault_rate
        self.fault: str | None = None
        self.kept: dict[int, tuple[StoredBlock, bytes]] = {}
        self.fails_to_write = False
        self.num_written = 0
        self._rng, self._lock = random.Random(seed), threading.Lock()

    def _fails(self) -> bool:
        return self._rng.random() < self.fault_rate

    def write(self, blocks: Sequence[StoredBlock], data: Buffer) -> None:
        with self._lock:
            if self.fails_to_write:
                raise OSError("the disk is full")
            self.num_written += len(blocks)
            for number, block in enumerate(blocks):
                piece = bytes(data[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES])
                self.kept[block.slot] = block, piece

    def read(
        self, slots: Sequence[int], token_hashes: Sequence[bytes], target: memoryview
    ) -> list[ReadOutcome]:
        outcomes = []
        with self._lock:
            for number, (slot, token_hash) in enumerate(zip(slots, token_hashes, strict=True)):
                block, data = self.kept.get(slot, (None, b""))
                outcome = ReadOutcome.OK
                if block is None or self._fails():
                    outcome = ReadOutcome.ABSENT
                elif block.token_hash != token_hash:
                    outcome = ReadOutcome.OTHER_TOKENS
                else:
                    target[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES] = data
                outcomes.append(outcome)
        return outcomes

    def forget(self, slots: Iterable[int]) -> None:
        with self._lock:
            for slot in slots:
                self.kept.pop(slot, None)

    def touch(self, slots: Iterable[int]) -> None:
        pass

    def recover(self) -> list[StoredBlock]:
        return [block for block, _ in self.kept.values()]

    def close(self) -> None:
        pass


class FakeServer:
    """The blocks of a shared store, in a dictionary that several `FakeRemote` use.

    Faults: `is_dead` answers nothing, `is_full` takes nothing, a share `fault_rate` of all calls fails; while
    `gate` is not set, calls wait.
    """

    def __init__(self, seed: int = 0, fault_rate: float = 0.0) -> None:
        self.kept: dict[bytes, bytes] = {}
        self.calls: list[str] = []
        self.is_dead = self.is_full = False
        self.fault_rate = fault_rate
        self.gate = threading.Event()
        self.gate.set()
        self._rng = random.Random(seed)

    def answers(self, call: str) -> bool:
        self.calls.append(call)
        self.gate.wait()
        return not self.is_dead and self._rng.random() >= self.fault_rate


class FakeRemote(RemoteStore):
    """A `RemoteStore` without network: the same answers from a `FakeServer`, the same breakers."""

    def __init__(self, server: FakeServer, clock: Clock) -> None:
        self.server = server
        self.num_puts = Counter()
        self._breaker = CircuitBreaker("the fake store", clock, 1, 5.0, 60.0)
        self._full = CircuitBreaker("writing to the fake store", clock, 1, 5.0, 60.0)

    @property
    def call_timeout_s(self) -> float:
        return 1.0

    @property
    def fault(self) -> str | None:
        return self._breaker.fault

    @property
    def write_fault(self) -> str | None:
        return self._full.fault or self.fault

    @property
    def takes_blocks(self) -> bool:
        return self._full.is_due and self._breaker.is_due

    def contains(self, token_hashes: Sequence[bytes]) -> Sequence[bool] | None:
        return [each in self.server.kept for each in token_hashes] if self._reach("ask") else None

    def get(self, token_hashes: Sequence[bytes], target: memoryview) -> Sequence[ReadOutcome]:
        if not self._reach("get"):
            return [ReadOutcome.IO_ERROR] * len(token_hashes)
        outcomes = []
        for number, token_hash in enumerate(token_hashes):
            data = self.server.kept.get(token_hash, b"")
            is_right = data == content(token_hash)
            if is_right:
                target[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES] = data
            elif data:
                del self.server.kept[token_hash]
            outcomes.append(
                ReadOutcome.OK if is_right else ReadOutcome.CORRUPT if data else ReadOutcome.ABSENT
            )
        return outcomes

    def put(self, blocks: Sequence[StoredBlock], data: Buffer) -> Sequence[PutOutcome]:
        outcomes = [self._put_one(block, data, number) for number, block in enumerate(blocks)]
        self.num_puts.update(outcomes)
        return outcomes

    def _put_one(self, block: StoredBlock, data: Buffer, number: int) -> PutOutcome:
        if not self._full.allows():
            return PutOutcome.REFUSED
        if not self._reach("put"):
            return PutOutcome.IO_ERROR
        if block.token_hash in self.server.kept:
            return PutOutcome.PRESENT
        if self.server.is_full:
            self._full.failed("full")
            return PutOutcome.REFUSED
        self._full.worked()
        piece = bytes(data[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES])
        assert piece == content(block.token_hash), "a wrong block was put"
        self.server.kept[block.token_hash] = piece
        return PutOutcome.STORED

    def _reach(self, name: str) -> bool:
        if not self._breaker.allows():
            return False
        works = self.server.answers(name)
        if works:
            self._breaker.worked()
        else:
            self._breaker.failed("no answer")
        return works

    def close(self) -> None:
        self._breaker.check()

    def check(self) -> None:
        self._breaker.check()
        self._full.check()


class User:
    """Computes prompts on the device, as an engine does, with whatever comes up from the tiers."""

    def __init__(
        self,
        num_blocks: int,
        tiers: Sequence[tuple[Tier, FaultyStorage]],
        policy: str = "lru",
        server: FakeServer | None = None,
        filters: Mapping[Tier, AdmissionFilter] | None = None,
    ) -> None:
        self.clock = ManualClock()
        self.device: BlockBytes = FakeDevice(num_blocks)
        self.pool = FreeListPool(num_blocks, SIZE)
        self.index = self._index(num_blocks, policy)
        self.arrivals = PrefixArrivals(self.index, self.pool)
        self.arrivals.serve(self._make_room, INDEX)
        storages: dict[Tier, BlockStorage] = dict(tiers)
        if server is not None:
            self.remote = RemoteStorage(FakeRemote(server, self.clock), 200, 20 * BLOCK_BYTES)
            storages[Tier.REMOTE] = self.remote
        self.migrator = KVMigrator(
            self.device, storages, hashes_of, block_size=SIZE, chunk_bytes=3 * BLOCK_BYTES, filters=filters
        )
        self.tiers = [self._tier(name, storage, policy) for name, storage in storages.items()]
        self.hierarchy = HierarchyManager(
            self.index, self.arrivals, self.tiers, self.migrator,
            PrefillCostModel(SIZE, seconds_per_token=1.0), BLOCK_BYTES,
        )  # fmt: skip
        self.num_computed = self.num_reused = 0

    def _tier(self, name: Tier, storage: BlockStorage, policy: str) -> KVTier:
        books = self._index(storage.num_slots, policy), FreeListPool(storage.num_slots, SIZE)
        if isinstance(storage, RemoteStorage):
            return RemoteTier(*books, storage, hashes_of, self.clock, self.migrator.wake)
        return KVTier(name, *books, storage)

    def _index(self, num_blocks: int, policy: str) -> RadixIndex:
        made = partial(make_policy, policy, capacity=num_blocks, clock=self.clock)
        return RadixIndex(SIZE, clock=self.clock, policy_factory=made)

    def _make_room(self, num_blocks: int, account: object = None) -> None:
        missing = min(num_blocks - self.pool.num_free, self.index.num_evictable)
        if missing > 0:
            self.pool.take_back(
                INDEX, self.index.evict(missing) or self.index.block_ids(self.index.lookup(Tokens()))
            )

    def settle(self) -> list[str]:
        """Wait for all moves; returns the requests whose KV has come."""
        came: list[str] = []
        while not self.hierarchy.is_idle:
            self.hierarchy.start_loads()
            self.hierarchy.wait(1.0)
            came += self.hierarchy.poll()
        return came

    def serve(self, tokens: Tokens, name: str, namespace: Namespace = Namespace()) -> int:
        """Compute a prompt; returns how many of its blocks were reused. Checks every reused byte."""
        self.clock.advance(1.0)
        whole = len(tokens) // SIZE
        for _ in range(10):
            if self.hierarchy.request(name, tokens, namespace, len(tokens)) is not TierLookup.HIT_PENDING:
                break
            assert name in self.settle()
        else:
            raise AssertionError(f"{name} is loaded again and again")
        hit = self.index.pin(self.index.lookup(tokens, namespace))
        ids, hashes = self.index.block_ids(hit), hashes_of(bytes(tokens.slice(0)), namespace)
        self.check_content(ids, hashes)
        self._make_room(whole - hit.num_blocks)
        own = self.pool.allocate(whole - hit.num_blocks, name)
        if own is None:
            self.index.unpin(hit)
            return hit.num_blocks
        for block_id, token_hash in zip(own.block_ids, hashes[hit.num_blocks :], strict=True):
            self.device.write_blocks([block_id], content(token_hash))
        found = self.index.insert(tokens, ids + own.block_ids, namespace, pin=True)
        self.pool.hand_over(own, 0, len(own.block_ids), INDEX)
        self.pool.free(own)
        self.index.unpin(hit)
        self.hierarchy.offer(found.hit)
        self.index.unpin(found.hit)
        self.num_computed += whole - hit.num_blocks
        self.num_reused += hit.num_blocks
        return hit.num_blocks

    def end(self, tokens: Tokens, namespace: Namespace = Namespace()) -> None:
        """A request with these tokens ends."""
        hit = self.index.pin(self.index.lookup(tokens, namespace))
        self.hierarchy.offer(hit, NO_ACCOUNT, NO_USE)
        self.index.unpin(hit)

    def preempt(self, tokens: Tokens, name: str, namespace: Namespace = Namespace()) -> None:
        """A request with these tokens, of which the device has some, is preempted."""
        hit = self.index.pin(self.index.lookup(tokens, namespace))
        self.hierarchy.hold(name, hit, NO_ACCOUNT, NO_USE)
        self.index.unpin(hit)

    def check_content(self, block_ids: BlockIds, hashes: Sequence[bytes]) -> None:
        """Assert that these blocks of the device have the KV of these tokens."""
        data = bytearray(BLOCK_BYTES)
        for block_id, token_hash in zip(block_ids, hashes, strict=False):
            self.device.read_blocks([block_id], memoryview(data))
            assert bytes(data) == content(token_hash), "a wrong block was served"

    def check(self) -> None:
        """Assert that all books balance."""
        self.index.check()
        self.arrivals.check()
        self.pool.check({INDEX: self.index.all_block_ids()})
        self.hierarchy.check()
