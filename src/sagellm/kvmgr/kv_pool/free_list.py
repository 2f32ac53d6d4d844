"""`GPUKVPool`: a fixed number of equal blocks on a free list, taken and given back as slices."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.kv_pool import Allocation, BlockInfo


@dataclass(frozen=True, slots=True)
class BlockAllocationRequest:
    """The design documents' form of an allocation: for a sequence, with a priority (recorded, not acted
    on)."""

    num_blocks: int
    sequence_id: str
    priority: int = 0


class GPUKVPool:
    """Implements `KVPool`. The name is the design documents'; the bytes may live on any device.

    Low ids go first, so that a fresh pool gives consecutive blocks. Not thread-safe: one engine thread owns
    it.
    """

    def __init__(self, total_blocks: int, block_size: int = 16, clock: Clock | None = None) -> None:
        if total_blocks < 1 or block_size < 1:
            raise ValueError(
                f"a pool needs at least one block of one token, got {total_blocks} x {block_size}"
            )
        self.total_blocks = total_blocks
        self.block_size = block_size
        self._clock = clock or MonotonicClock()
        self._free = list(range(total_blocks - 1, -1, -1))
        self._owners: list[str | None] = [None] * total_blocks
        self._allocated_s: dict[int, float] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def block_info(self) -> dict[int, BlockInfo]:
        """Records of the blocks in use, by id. Built when asked: not for hot paths."""
        return {block: self.get_block_info(block) for block in sorted(self._allocated_s)}

    def get_free_blocks(self) -> int:
        return len(self._free)

    @overload
    def allocate(self, num_blocks: BlockAllocationRequest) -> list[int]: ...

    @overload
    def allocate(self, num_blocks: int, owner: str) -> Allocation | None: ...

    def allocate(
        self, num_blocks: int | BlockAllocationRequest, owner: str = ""
    ) -> Allocation | list[int] | None:
        """Exactly `num_blocks` blocks for `owner`, or None.

        Given a `BlockAllocationRequest` it returns a list of ids instead, and raises `MemoryError` when full.
        """
        if not isinstance(num_blocks, int):
            return self._allocate_or_raise(num_blocks)
        if num_blocks < 0:
            raise BookkeepingError(f"cannot allocate {num_blocks} blocks")
        free = self._free
        if num_blocks > len(free):
            return None
        taken = free[: -num_blocks - 1 : -1] if num_blocks else []
        del free[len(free) - num_blocks :]
        now_s = self._clock.now()
        for block in taken:
            self._owners[block] = owner
            self._allocated_s[block] = now_s
        return Allocation(owner, tuple(taken))

    def free(self, allocation: Allocation | Sequence[int]) -> None:
        if isinstance(allocation, Allocation):
            self._check_owned(allocation.block_ids, allocation.owner)
            blocks: Sequence[int] = allocation.block_ids
        else:
            self._check_owned(allocation, None)
            blocks = allocation
        for block in blocks:
            self._owners[block] = None
            del self._allocated_s[block]
        self._free.extend(reversed(blocks))

    def hand_over(self, block_ids: Sequence[int], owner: str) -> None:
        """Blocks in use change their owner (a request's blocks enter the prefix index)."""
        for block in block_ids:
            if self._owners[block] is None:
                raise BookkeepingError(f"block {block} is free and cannot be handed to {owner!r}")
            self._owners[block] = owner

    def get_utilization(self) -> float:
        return 1 - len(self._free) / self.total_blocks

    def get_fragmentation(self) -> float:
        if not self._free:
            return 0.0
        return 1 - _longest_run(sorted(self._free)) / len(self._free)

    def get_block_info(self, block_id: int) -> BlockInfo:
        if not 0 <= block_id < self.total_blocks:
            raise BookkeepingError(f"no block {block_id}: the pool has blocks 0 to {self.total_blocks - 1}")
        owner = self._owners[block_id]
        return BlockInfo(block_id, owner, owner, self._allocated_s.get(block_id, 0.0))

    def check(self) -> None:
        if len(self._free) + len(self._allocated_s) != self.total_blocks:
            raise BookkeepingError(
                f"{len(self._free)} free + {len(self._allocated_s)} used != {self.total_blocks}"
            )
        if len(set(self._free)) != len(self._free):
            raise BookkeepingError("a block stands on the free list twice")
        for block in self._free:
            if self._owners[block] is not None:
                raise BookkeepingError(f"block {block} is free and owned by {self._owners[block]!r}")

    def _allocate_or_raise(self, request: BlockAllocationRequest) -> list[int]:
        allocation = self.allocate(request.num_blocks, request.sequence_id)
        if allocation is None:
            raise MemoryError(
                f"{request.num_blocks} blocks asked for, {len(self._free)} of {self.total_blocks} free"
            )
        return list(allocation.block_ids)

    def _check_owned(self, blocks: Sequence[int], owner: str | None) -> None:
        """All or nothing: raises before anything is freed."""
        if len(set(blocks)) != len(blocks):
            raise BookkeepingError("a block is named twice in one free")
        for block in blocks:
            if not 0 <= block < self.total_blocks:
                raise BookkeepingError(f"block {block} is not of this pool (0 to {self.total_blocks - 1})")
            found = self._owners[block]
            if found is None:
                raise BookkeepingError(f"double free of block {block}")
            if owner is not None and found != owner:
                raise BookkeepingError(f"block {block} belongs to {found!r}, not to {owner!r}")


def _longest_run(ids: list[int]) -> int:
    longest = run = 1
    for previous, current in itertools.pairwise(ids):
        run = run + 1 if current == previous + 1 else 1
        longest = max(longest, run)
    return longest


PLUGIN = GPUKVPool
