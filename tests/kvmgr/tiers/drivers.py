"""A device of numbered blocks, tiers below it, and a user that checks every byte."""

from __future__ import annotations

import random
import threading
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from sagellm.core.blocks import Tier
from sagellm.core.clock import Clock, ManualClock
from sagellm.core.protocols.eviction import NO_USE
from sagellm.core.protocols.kv_pool import Allocation
from sagellm.core.protocols.kv_tiers import (
    BlockStorage,
    Buffer,
    ReadOutcome,
    StoredBlock,
    Tail,
    TierLookup,
)
from sagellm.core.protocols.prefix_cache import PrefixHit
from sagellm.core.types import NO_ACCOUNT, TOKEN_BYTES, BlockIds, Namespace, Tokens
from sagellm.engines.build_kv import make_policy
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
    """Implements `BlockBytes` over an array. A share `fault_rate` of all calls fails, half done."""

    bytes_per_block = BLOCK_BYTES

    def __init__(self, num_blocks: int, seed: int = 0, numa_node: int | None = None) -> None:
        self.blocks = np.zeros((num_blocks, BLOCK_BYTES), np.uint8)
        self.numa_node, self.fault_rate = numa_node, 0.0
        self.locked: list[memoryview] = []
        self._rng = random.Random(seed)

    def lock_pages(self, buffer: memoryview) -> None:
        self.locked.append(buffer)

    def follow_steps(self) -> None:
        pass

    def read_blocks(self, block_ids: Sequence[int], target: memoryview) -> None:
        self._fail_at_random(target)
        target[:] = self.blocks[list(block_ids)].tobytes()

    def write_blocks(self, block_ids: Sequence[int], data: Buffer) -> None:
        rows = np.frombuffer(bytes(data), np.uint8).reshape(len(block_ids), BLOCK_BYTES)
        self._fail_at_random(memoryview(self.blocks[block_ids[0]]))
        self.blocks[list(block_ids)] = rows

    def _fail_at_random(self, target: memoryview) -> None:
        if self._rng.random() < self.fault_rate:
            target[: BLOCK_BYTES // 2] = b"?" * (BLOCK_BYTES // 2)
            raise RuntimeError("the device has failed")


class FaultyStorage:
    """Implements `BlockStorage` in a dictionary.

    A share `fault_rate` of the reads finds nothing; a share `error_rate` of all calls fails in the middle,
    with an error that no medium raises. While `gate` is not set, calls set `called` and do not return.
    """

    def __init__(self, num_slots: int, seed: int = 0, fault_rate: float = 0.0) -> None:
        self.num_slots, self.fault_rate, self.error_rate = num_slots, fault_rate, 0.0
        self.fault: str | None = None
        self.kept: dict[int, tuple[StoredBlock, bytes]] = {}
        self.fails_to_write = False
        self.num_written = 0
        self.gate, self.called = threading.Event(), threading.Event()
        self.gate.set()
        self._rng, self._lock = random.Random(seed), threading.Lock()

    def _fails(self) -> bool:
        return self._rng.random() < self.fault_rate

    def _err_at_random(self) -> None:
        if self._rng.random() < self.error_rate:
            raise RuntimeError("a mistake in the storage")

    def write(self, blocks: Sequence[StoredBlock], data: Buffer) -> None:
        self.called.set()
        self.gate.wait()
        with self._lock:
            if self.fails_to_write:
                raise OSError("the disk is full")
            self.num_written += len(blocks)
            for number, block in enumerate(blocks):
                self._err_at_random()
                piece = bytes(data[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES])
                self.kept[block.slot] = block, piece

    def read(
        self, slots: Sequence[int], token_hashes: Sequence[bytes], target: memoryview
    ) -> list[ReadOutcome]:
        outcomes = []
        self.called.set()
        self.gate.wait()
        with self._lock:
            for number, (slot, token_hash) in enumerate(zip(slots, token_hashes, strict=True)):
                self._err_at_random()
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

    def sync(self) -> None:
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
        self.num_wrong = 0
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
        self.server.num_wrong += piece != content(block.token_hash)
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


class Running(NamedTuple):
    """A request that computes the blocks of `own` behind `hit` while its tail comes."""

    tokens: Tokens
    namespace: Namespace
    hit: PrefixHit
    own: Allocation


class User:
    """Computes prompts on the device, as an engine does, with whatever comes up from the tiers."""

    def __init__(
        self,
        num_blocks: int,
        tiers: Sequence[tuple[Tier, BlockStorage]],
        policy: str = "lru",
        server: FakeServer | None = None,
        filters: Mapping[Tier, AdmissionFilter] | None = None,
        *,
        writes_back: bool = False,
    ) -> None:
        self.writes_back, self.leaving = writes_back, dict[int, BlockIds]()
        self.clock = ManualClock()
        self.device, self.server = FakeDevice(num_blocks), server
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
        self.num_computed = self.num_reused = self.num_written_back = 0
        self.waiting: set[str] = set()
        self.running: dict[str, Running] = {}

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

    def write_back(self, num_blocks: int) -> None:
        """Evict blocks, which are free once they are saved."""
        evicted, paths = self.index.evict_paths(num_blocks)
        number = self.num_written_back = self.num_written_back + 1
        self.leaving[number] = evicted
        self.hierarchy.save_evicted(paths, lambda: self.pool.take_back(INDEX, self.leaving.pop(number)))

    def ask(self, tokens: Tokens, name: str, namespace: Namespace, *, start: bool = True) -> TierLookup:
        """A request asks for its KV, and may wait for it from now on."""
        outcome = self.hierarchy.request(name, tokens, namespace, len(tokens), start=start)
        if outcome is TierLookup.HIT_PENDING:
            self.waiting.add(name)
        return outcome

    def cancel(self, name: str) -> None:
        self.hierarchy.cancel(name)
        self.waiting.discard(name)

    def poll(self) -> list[str]:
        came = self.hierarchy.poll()
        self.waiting.difference_update(came)
        return came

    def settle(self) -> list[str]:
        """Wait for all moves; returns the requests whose KV has come. Then no request waits."""
        came = self.poll()
        while not self.hierarchy.is_idle:
            self.hierarchy.start_loads()
            assert self.hierarchy.wait(20.0), "a move does not end"
            came += self.poll()
        assert not self.waiting, "requests wait for KV that does not come"
        return came

    def serve(self, tokens: Tokens, name: str, namespace: Namespace = Namespace()) -> int:
        """Compute a prompt; returns how many of its blocks were reused. Checks every reused byte."""
        self.clock.advance(1.0)
        whole = len(tokens) // SIZE
        for _ in range(10):
            if self.ask(tokens, name, namespace) is not TierLookup.HIT_PENDING:
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
            self.device.blocks[block_id] = np.frombuffer(content(token_hash), np.uint8)
        found = self.index.insert(tokens, ids + own.block_ids, namespace, pin=True)
        self.pool.hand_over(own, 0, len(own.block_ids), INDEX)
        self.pool.free(own)
        self.index.unpin(hit)
        if not self.writes_back:
            self.hierarchy.offer(found.hit)
        self.index.unpin(found.hit)
        self.num_computed += whole - hit.num_blocks
        self.num_reused += hit.num_blocks
        return hit.num_blocks

    def split_loads(self) -> None:
        """Loading a block takes a little less time than computing it, so that prompts are split.

        What the device can evict is gone.
        """
        self._make_room(self.pool.total_blocks)
        self.hierarchy.speeds.set_all(BLOCK_BYTES / (0.9 * SIZE))

    def begin_tail(
        self, tokens: Tokens, name: str, namespace: Namespace = Namespace(), tail_blocks: int = 4
    ) -> int | None:
        """Have the tail of a prompt loaded, and compute what is before it; returns its first block."""
        for _ in range(3):  # a shared store is asked before
            found = self.hierarchy.request(name, tokens, namespace, len(tokens), tail_blocks=tail_blocks)
            if found is TierLookup.SPLIT:
                break
            assert found is not TierLookup.HIT_PENDING or name in self.settle()
        first = self.hierarchy.load_tail(name, tokens, namespace, len(tokens), NO_ACCOUNT, tail_blocks)
        if first is None:
            return None
        hit = self.index.pin(self.index.lookup(tokens, namespace, first * SIZE))
        self._make_room(first - hit.num_blocks)
        own = self.pool.allocate(first - hit.num_blocks, name)
        if own is None:
            self.index.unpin(hit)
            self.hierarchy.cancel(name)
            return None
        hashes = hashes_of(bytes(tokens.slice(0)), namespace)
        for block_id, token_hash in zip(own.block_ids, hashes[hit.num_blocks :], strict=False):
            self.device.blocks[block_id] = np.frombuffer(content(token_hash), np.uint8)
        self.running[name] = Running(tokens, namespace, hit, own)
        return first

    def end_tail(self, name: str, *, leaves: bool = False) -> int:
        """Take the tail, or leave without it; what the request has is cached. Returns how many came."""
        tokens, namespace, hit, own = self.running.pop(name)
        num_head, tail = len(own.block_ids), Tail()
        while not leaves:
            found = self.hierarchy.take_tail(name)
            if found is not None:
                tail = found
                break
            self.hierarchy.wait(1.0)
            self.hierarchy.poll()
        if tail.arrival is not None:
            self.arrivals.hand_over(tail.arrival, tail.num_blocks, own)
        self.hierarchy.cancel(name)
        ids = self.index.block_ids(hit) + own.block_ids
        self.check_content(ids, hashes_of(bytes(tokens.slice(0)), namespace))
        found_there = self.index.insert(tokens, ids, namespace, pin=True)
        num_known = max(0, found_there.num_existing - hit.num_blocks)
        self.pool.hand_over(own, num_known, len(own.block_ids), INDEX)
        self.pool.free(own)
        self.index.unpin(hit)
        if not self.writes_back:
            self.hierarchy.offer(found_there.hit)
        self.index.unpin(found_there.hit)
        return len(ids) - hit.num_blocks - num_head

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
        for block_id, token_hash in zip(block_ids, hashes, strict=False):
            assert self.device.blocks[block_id].tobytes() == content(token_hash), "a wrong block was served"

    def check(self) -> None:
        """Assert that all books balance."""
        self.index.check()
        self.arrivals.check()
        leaving = [block for blocks in self.leaving.values() for block in blocks]
        self.pool.check({INDEX: self.index.all_block_ids() + array("i", leaving)})
        assert not (leaving and self.hierarchy.is_idle), "evicted blocks are never free again"
        plans = [move.report.plan for move in self.migrator._moves.values()]
        read = {block for plan in plans if plan.source is Tier.HBM for block in plan.source_ids}
        assert read <= self.pool.block_info.keys(), "blocks that are copied are free"
        self.hierarchy.check()
        assert self.server is None or not self.server.num_wrong, "a wrong block was put"
