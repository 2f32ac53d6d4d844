"""`TieredDevice`: a device and a tier below it, without bytes and steps.

It has the real books of `engines/build_kv.py`; only the blocks hold nothing (`NoBytes`). Replays and micro
benchmarks share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

from sagellm.benchmarks.replay.block_trace import BlockTrace
from sagellm.core.blocks import Tier
from sagellm.core.clock import ManualClock
from sagellm.core.errors import CapacityError
from sagellm.core.protocols.eviction import Use
from sagellm.core.protocols.kv_pool import KVPool
from sagellm.core.protocols.kv_tiers import BlockStorage, Buffer, ReadOutcome, StoredBlock, TierLookup
from sagellm.core.protocols.prefix_cache import PrefixHit, PrefixReuseIndex
from sagellm.core.types import TOKEN_BYTES, Account, Namespace, Tokens
from sagellm.engines.build_kv import make_policy
from sagellm.kvmgr.eviction import PrefillCostModel
from sagellm.kvmgr.kv_pool.free_list import FreeListPool
from sagellm.kvmgr.kv_pool.tiers.arrivals import PrefixArrivals
from sagellm.kvmgr.kv_pool.tiers.hierarchy import HierarchyManager
from sagellm.kvmgr.kv_pool.tiers.migrator import KVMigrator
from sagellm.kvmgr.kv_pool.tiers.tier import KVTier
from sagellm.kvmgr.prefix_cache.radix import RadixIndex

OWNER = "prefix index"
IndexOf: TypeAlias = Callable[[int], PrefixReuseIndex]
"""Makes an empty index for so many blocks."""
PoolOf: TypeAlias = Callable[[int], KVPool]
"""Makes a pool of so many free blocks."""


class NoBytes:
    """Implements `BlockBytes` and `BlockStorage` for blocks without bytes."""

    bytes_per_block = 1
    numa_node: int | None = None
    fault: str | None = None

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots

    def lock_pages(self, buffer: memoryview) -> None:
        pass

    def follow_steps(self) -> None:
        pass

    def read_blocks(self, block_ids: Sequence[int], target: memoryview) -> None:
        pass

    def write_blocks(self, block_ids: Sequence[int], data: Buffer) -> None:
        pass

    def write(self, blocks: Sequence[StoredBlock], data: Buffer) -> None:
        pass

    def read(
        self, slots: Sequence[int], token_hashes: Sequence[bytes], target: memoryview
    ) -> list[ReadOutcome]:
        return [ReadOutcome.OK] * len(slots)

    def forget(self, slots: Iterable[int]) -> None:
        pass

    def touch(self, slots: Iterable[int]) -> None:
        pass

    def sync(self) -> None:
        pass

    def recover(self) -> Sequence[StoredBlock]:
        return ()

    def close(self) -> None:
        pass


class ServedPrompt(NamedTuple):
    """Blocks of a prompt: on the device before, loaded from the tier, and all."""

    num_on_device: int
    num_loaded: int
    num_blocks: int


class TieredDevice:
    """A device of `num_blocks` blocks with a tier of `num_slots` below it.

    With 0 slots there is no tier. `writes_back`: blocks are saved when they are evicted, not when they are
    computed. `close` ends the threads.
    """

    def __init__(
        self,
        num_blocks: int,
        num_slots: int,
        index_of: IndexOf,
        pool_of: PoolOf,
        *,
        writes_back: bool = False,
    ) -> None:
        self._writes_back = writes_back
        self.index, self.pool = index_of(num_blocks), pool_of(num_blocks)
        self._block_size = self.index.block_size
        arrivals = PrefixArrivals(self.index, self.pool)
        arrivals.serve(self._make_room, OWNER)
        storages: dict[Tier, BlockStorage] = {Tier.DRAM: NoBytes(num_slots)} if num_slots else {}
        tiers = [
            KVTier(name, index_of(num_slots), pool_of(num_slots), each) for name, each in storages.items()
        ]
        migrator = KVMigrator(NoBytes(num_blocks), storages, self._no_hashes, block_size=self._block_size)
        costs = PrefillCostModel(self._block_size, seconds_per_token=1e9)
        self.tiers = HierarchyManager(self.index, arrivals, tiers, migrator, costs, 1)

    def serve(self, name: str, tokens: Tokens, namespace: Namespace, num_output_tokens: int) -> ServedPrompt:
        """Load and compute a prompt, save it, and wait for all moves."""
        num_on_device = self.index.lookup(tokens, namespace).num_blocks
        if self.tiers.request(name, tokens, namespace, len(tokens)) is TierLookup.HIT_PENDING:
            self.settle()
        num_reused, whole = self.compute(tokens, namespace)
        use = Use(num_output_tokens, num_reused)
        if not self._writes_back:
            self.tiers.offer(whole, use=use)
            self.settle()
        self.index.unpin(whole, use)
        return ServedPrompt(num_on_device, num_reused - num_on_device, whole.num_blocks)

    def compute(self, tokens: Tokens, namespace: Namespace = Namespace()) -> tuple[int, PrefixHit]:
        """Fill blocks for what the device lacks of a prompt.

        Returns how many blocks it had, and the whole path, pinned. Raises `CapacityError` if too few blocks
        can be made free.
        """
        hit = self.index.pin(self.index.lookup(tokens, namespace))
        missing = len(tokens) // self._block_size - hit.num_blocks
        self._make_room(missing)
        own = self.pool.allocate(missing, "request")
        if own is None:
            raise CapacityError(f"the device has {self.pool.num_free} free blocks, not {missing}")
        ids = self.index.block_ids(hit) + own.block_ids
        whole = self.index.insert(tokens, ids, namespace, pin=True).hit
        self.pool.hand_over(own, 0, missing, OWNER)
        self.pool.free(own)
        self.index.unpin(hit)
        return hit.num_blocks, whole

    def settle(self) -> None:
        """Wait until nothing is under way."""
        while not self.tiers.is_idle:
            self.tiers.wait(1.0)
            self.tiers.poll()

    def evict_all(self) -> None:
        """Empty the device; the tier keeps what it has."""
        self._make_room(self.pool.total_blocks)

    def close(self) -> None:
        self.tiers.close()

    def _make_room(self, num_blocks: int, account: Account | None = None) -> None:
        """Evict; with write-back also save, and wait for it."""
        missing = min(num_blocks - self.pool.num_free, self.index.num_evictable)
        if missing <= 0:
            return
        evicted, paths = self.index.evict_paths(missing)
        give_back = partial(self.pool.take_back, OWNER, evicted)
        if not self._writes_back:
            give_back()
            return
        self.tiers.save_evicted(paths, give_back)
        self.settle()

    def _no_hashes(self, path: bytes, namespace: Namespace) -> list[bytes]:
        return [b""] * (len(path) // (self._block_size * TOKEN_BYTES))


class TieredReplay(NamedTuple):
    """What became of each prompt, and how many blocks were written to the tier."""

    served: list[ServedPrompt]
    num_stored: int


def replay_tiered(
    trace: BlockTrace, num_blocks: int, num_slots: int, policy: str, *, writes_back: bool = False
) -> TieredReplay:
    """Serve the prompts of a trace one after the other.

    Those longer than the device are cut.
    """
    clock = ManualClock(trace.requests[0].time_s)

    def index_of(size: int) -> RadixIndex:
        return RadixIndex(
            1, clock=clock, policy_factory=partial(make_policy, policy, capacity=size, clock=clock)
        )

    device = TieredDevice(
        num_blocks, num_slots, index_of, lambda size: FreeListPool(size, 1), writes_back=writes_back
    )
    served = []
    for number, request in enumerate(trace.requests):
        clock.advance(max(0.0, request.time_s - clock.now()))
        tokens = Tokens(request.ids.slice(0, num_blocks))
        served.append(device.serve(f"r{number}", tokens, request.namespace, request.num_output_tokens))
    num_stored = sum(state.stored for state in device.tiers.states())
    device.close()
    return TieredReplay(served, num_stored)
