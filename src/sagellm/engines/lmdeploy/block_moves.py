"""`BlockMoves`: moves of blocks between GPU and CPU, for LMDeploy's swap maps.

A logical block keeps its number; its physical block changes. LMDeploy numbers physical blocks of the GPU from
0 and those of the CPU from `num_gpu_blocks` on; the maps count both from 0. Its cache engine copies the bytes
before the step computes. With our patch 0003 it swaps out first, so a block that is swapped in may take the
place of one that is swapped out in the same step. The other way round it may not: a CPU block that is read
becomes free only once the maps are on their way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sagellm.core.errors import BookkeepingError, PlanError

DEVICES = ("gpu", "cpu")


@dataclass(frozen=True, slots=True)
class DeviceMove:
    """Move one logical block from 'gpu' to 'cpu' or back. Raises `PlanError` for other devices."""

    block_id: int
    source: str
    target: str

    def __post_init__(self) -> None:
        if sorted((self.source, self.target)) != sorted(DEVICES):
            raise PlanError(
                f"block {self.block_id} from {self.source!r} to {self.target!r}: "
                "blocks move from 'gpu' to 'cpu' or from 'cpu' to 'gpu'"
            )


class PendingIn(NamedTuple):
    """A logical block and the physical CPU block that has its bytes."""

    block_id: int
    cpu_block: int


class BlockMoves:
    """Moves that the next step carries out; a patched scheduler calls `fill`.

    The caller guarantees that no sequence in a step uses a block that moves, and that its KV is computed.
    """

    def __init__(self, scheduler: Any) -> None:
        manager = scheduler.block_manager
        self._allocator, self._num_gpu = manager.allocator, int(manager.num_gpu_blocks)
        self._gpu, self._cpu = (self._allocator.get_phy_allocator(device) for device in DEVICES)
        self._outs: dict[int, int] = {}
        """The GPU block with the bytes, by the CPU block that gets them."""
        self._ins: dict[int, PendingIn] = {}
        """By the GPU block that gets the bytes."""
        self._read: set[int] = set()
        """CPU blocks that the next step reads and that no logical block has any more."""
        self.num_swapped_out = self.num_swapped_in = 0

    @property
    def num_free_gpu(self) -> int:
        return int(self._gpu.get_num_free_blocks())

    @property
    def num_free_cpu(self) -> int:
        return int(self._cpu.get_num_free_blocks())

    def device(self, block_id: int) -> str:
        """Where the bytes of a logical block are after the next step."""
        return "gpu" if self._physical(block_id) < self._num_gpu else "cpu"

    def to_cpu(self, block_id: int) -> None:
        """Move a block to the CPU. Its GPU block is free at once. Raises `MemoryError` where none fits."""
        gpu_block = self._physical(block_id)
        pending = self._ins.get(gpu_block)
        if pending is not None and pending.block_id == block_id:  # its bytes have not left the CPU yet
            del self._ins[gpu_block]
            self._read.discard(pending.cpu_block)
            cpu_block = pending.cpu_block
        else:
            cpu_block = int(self._cpu.allocate(1)[0])
            self._outs[cpu_block] = gpu_block
        self._place(block_id, cpu_block)
        self._gpu.free(np.array([gpu_block]))

    def to_gpu(self, block_id: int) -> None:
        """Move a block to the GPU. Raises `MemoryError` where no block is free there."""
        cpu_block, gpu_block = self._physical(block_id), int(self._gpu.allocate(1)[0])
        self._ins[gpu_block] = PendingIn(block_id, cpu_block)
        self._read.add(cpu_block)
        self._place(block_id, gpu_block)

    def drop(self, block_id: int) -> None:
        """Free a block on the CPU to which nothing else refers."""
        self._outs.pop(self._physical(block_id), None)
        self._allocator.free(np.array([block_id]))

    def fill(
        self,
        running: Sequence[Any],
        swap_in_map: dict[int, int],
        swap_out_map: dict[int, int],
        copy_map: dict[int, int],
    ) -> None:
        """Enter the moves into the maps of a step. LMDeploy drops the maps of one without sequences."""
        del copy_map  # LMDeploy's cache engine copies nothing from GPU to GPU
        if not running:
            return
        for cpu_block, gpu_block in self._outs.items():
            swap_out_map[gpu_block] = cpu_block - self._num_gpu
        for gpu_block, pending in self._ins.items():
            if self._is_at(pending.block_id, gpu_block):
                swap_in_map[pending.cpu_block - self._num_gpu] = gpu_block
        self.num_swapped_out += len(swap_out_map)
        self.num_swapped_in += len(swap_in_map)
        self._cpu.free(np.array(sorted(self._read), dtype=np.int64))
        for pending_ones in (self._outs, self._ins, self._read):
            pending_ones.clear()

    def _physical(self, block_id: int) -> int:
        return int(self._allocator.get_physical_blocks(np.array([block_id]))[0])

    def _place(self, block_id: int, physical: int) -> None:
        self._allocator.update_phy_map(np.array([block_id]), np.array([physical]))

    def _is_at(self, block_id: int, physical: int) -> bool:
        """Whether a block is still in use there; its sequence may have ended."""
        is_used = self._allocator.get_ref_count(np.array([block_id]))[0] > 0
        return bool(is_used) and self._physical(block_id) == physical

    def check(self) -> None:
        """Raise `BookkeepingError` where blocks and moves do not add up."""
        memory = self._allocator._log_mem
        used = memory.phy_map[memory.ref_count > 0]
        if len(set(used.tolist())) != len(used):
            raise BookkeepingError("two logical blocks have the same physical block")
        on_gpu = int((used < self._num_gpu).sum())
        if on_gpu + self.num_free_gpu != self._num_gpu:
            raise BookkeepingError(f"{on_gpu} GPU blocks in use, {self.num_free_gpu} of {self._num_gpu} free")
        on_cpu, num_cpu = len(used) - on_gpu + len(self._read), int(self._cpu._num_blocks)
        if on_cpu + self.num_free_cpu != num_cpu:
            raise BookkeepingError(
                f"{on_cpu} CPU blocks in use or to be read, {self.num_free_cpu} of {num_cpu} free"
            )
        if len(set(self._outs.values())) != len(self._outs):
            raise BookkeepingError("one GPU block is swapped out twice in a step")
        if self._read & set(used.tolist()) or not self._outs.keys() <= self._read | set(used.tolist()):
            raise BookkeepingError("a step reads or writes a CPU block that belongs to something else")
