"""A device of numbered blocks, tiers below it, and a user that checks every byte."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np

from sagellm.core.blocks import Tier
from sagellm.core.clock import ManualClock
from sagellm.core.protocols.eviction import NO_USE
from sagellm.core.protocols.kv_tiers import BlockBytes, Buffer, ReadOutcome, StoredBlock, TierLookup
from sagellm.core.types import NO_ACCOUNT, TOKEN_BYTES, BlockIds, Namespace, Tokens
from sagellm.engines.build import make_policy
from sagellm.kvmgr.eviction import PrefillCostModel
from sagellm.kvmgr.kv_pool.free_list import FreeListPool
from sagellm.kvmgr.kv_pool.tiers.arrivals import PrefixArrivals
from sagellm.kvmgr.kv_pool.tiers.hierarchy import HierarchyManager
from sagellm.kvmgr.kv_pool.tiers.migrator import KVMigrator
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
        self._rng, self._lock = random.Random(seed), threading.Lock()

    def _fails(self) -> bool:
        return self._rng.random() < self.fault_rate

    def write(self, blocks: Sequence[StoredBlock], data: Buffer) -> None:
        with self._lock:
            if self.fails_to_write:
                raise OSError("the disk is full")
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


class User:
    """Computes prompts on the device, as an engine does, with whatever comes up from the tiers."""

    def __init__(
        self, num_blocks: int, tiers: Sequence[tuple[Tier, FaultyStorage]], policy: str = "lru"
    ) -> None:
        self.clock = ManualClock()
        self.device: BlockBytes = FakeDevice(num_blocks)
        self.pool = FreeListPool(num_blocks, SIZE)
        self.index = self._index(num_blocks, policy)
        self.arrivals = PrefixArrivals(self.index, self.pool)
        self.arrivals.serve(self._make_room, INDEX)
        self.tiers = [
            KVTier(
                name, self._index(storage.num_slots, policy), FreeListPool(storage.num_slots, SIZE), storage
            )
            for name, storage in tiers
        ]
        self.migrator = KVMigrator(
            self.device, dict(tiers), hashes_of, block_size=SIZE, chunk_bytes=3 * BLOCK_BYTES
        )
        self.hierarchy = HierarchyManager(
            self.index, self.arrivals, self.tiers, self.migrator,
            PrefillCostModel(SIZE, seconds_per_token=1.0), BLOCK_BYTES,
        )  # fmt: skip
        self.num_computed = self.num_reused = 0

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
            self.hierarchy.wait(1.0)
            came += self.hierarchy.poll()
        return came

    def serve(self, tokens: Tokens, name: str, namespace: Namespace = Namespace()) -> int:
        """Compute a prompt; returns how many of its blocks were reused. Checks every reused byte."""
        self.clock.advance(1.0)
        whole = len(tokens) // SIZE
        if self.hierarchy.request(name, tokens, namespace, len(tokens)) is TierLookup.HIT_PENDING:
            assert name in self.settle()
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
