"""`PoolBytes`: the blocks of a paged KV pool as bytes."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from sagellm.core.numa import node_of_pci
from sagellm.core.protocols.kv_tiers import Buffer
from sagellm.engines.native.accelerators import module_of

if TYPE_CHECKING:
    from sagellm.core.shared_pages import SharedPages

log = logging.getLogger("sagellm.tiers")
Rows: TypeAlias = np.ndarray[tuple[int, int], Any]


class PoolBytes:
    """Implements `BlockBytes`. A block's bytes are its row in each pool, one behind the other.

    `pools`: uint8 [num_blocks, bytes of a row], at least one, all on one device; `shared_pages`: where they
    lie, if other processes may map them. In a CPU's memory numpy copies whole rows at the speed of memory;
    torch's indexing takes two to three times as long. A GPU gathers rows into blocks, and one copy moves the
    blocks of a call, in a stream of its own, which is waited for, so that a later step finds what was
    written. Other vendors' chips do so too, without locked pages.
    """

    def __init__(self, pools: Sequence[torch.Tensor], shared_pages: SharedPages | None = None) -> None:
        self._pools, self.shared_pages = pools, shared_pages
        self._spans = list(pairwise([0, *accumulate(pool.shape[1] for pool in self._pools)]))
        self.bytes_per_block = self._spans[-1][1]
        self.numa_node: int | None = None
        self._device = pools[0].device
        self._arrays: list[Rows] = []
        self._flat: list[memoryview] = []
        self._module: Any = None
        self._stream: Any = None
        if self._device.type != "cpu":
            self._module = module_of(self._device)
            self._stream = self._module.Stream(self._device)
            address = _pci_address(self._device)
            self.numa_node = None if address is None else node_of_pci(address)
        else:
            self._arrays = [pool.numpy() for pool in self._pools]
            if all(array.flags.c_contiguous for array in self._arrays):
                self._flat = [array.data.cast("B") for array in self._arrays]

    def views(self, block_ids: Sequence[int]) -> Sequence[memoryview]:
        """The memory of blocks, in the order of `read_blocks`: `BlockViews`, on a CPU only."""
        flat, spans = self._flat, self._spans
        return [
            memory[block * (stop - start) : (block + 1) * (stop - start)]
            for block in block_ids
            for memory, (start, stop) in zip(flat, spans, strict=True)
        ]

    @property
    def has_views(self) -> bool:
        return bool(self._flat)

    def lock_pages(self, buffer: memoryview) -> None:
        if self._module is not torch.cuda:
            return
        with torch.cuda.device(self._device):
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            error = int(cudart.cudaHostRegister(_address(buffer), len(buffer), 0))
            if not error:
                weakref.finalize(self, _unlock_pages, buffer, self._device).atexit = False
                return
            log.warning(
                "KV moves slower: CUDA locks no %d bytes of host memory (error %d)", len(buffer), error
            )
            with suppress(RuntimeError):  # CUDA reports the error again at this thread's next kernel
                torch.ones(1, device=self._device)

    def follow_steps(self) -> None:
        """Threads launch steps, recorded ones too, on their current stream: the device's default one.

        A stream of torch does not wait for that one by itself.
        """
        if self._stream is not None:
            self._stream.wait_stream(self._module.current_stream(self._device))

    def read_blocks(self, block_ids: Sequence[int], target: memoryview) -> None:
        rows, ids = self._rows(target, len(block_ids)), np.asarray(block_ids, np.int64)
        for array, (start, stop) in zip(self._arrays, self._spans, strict=False):
            rows[:, start:stop] = array[ids]
        if self._stream is not None:
            with self._staged(ids) as (index, blocks):
                for pool, (start, stop) in zip(self._pools, self._spans, strict=True):
                    torch.index_select(pool, 0, index, out=blocks[:, start:stop])
                torch.from_numpy(rows).copy_(blocks, non_blocking=True)

    def write_blocks(self, block_ids: Sequence[int], data: Buffer) -> None:
        rows, ids = self._rows(data, len(block_ids)), np.asarray(block_ids, np.int64)
        for array, (start, stop) in zip(self._arrays, self._spans, strict=False):
            array[ids] = rows[:, start:stop]
        if self._stream is not None:
            with self._staged(ids) as (index, blocks):
                blocks.copy_(torch.from_numpy(rows), non_blocking=True)
                for pool, (start, stop) in zip(self._pools, self._spans, strict=True):
                    pool.index_copy_(0, index, blocks[:, start:stop])

    def _rows(self, data: Buffer, num_blocks: int) -> Rows:
        """The bytes as [num_blocks, bytes_per_block]."""
        return np.frombuffer(data, np.uint8).reshape(num_blocks, self.bytes_per_block)

    @contextmanager
    def _staged(self, ids: Rows) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """On the GPU: the ids, and room for their blocks [num_blocks, bytes_per_block].

        The body runs in the stream, which is waited for at its end.
        """
        with torch.inference_mode(), self._module.stream(self._stream):
            blocks = torch.empty((len(ids), self.bytes_per_block), dtype=torch.uint8, device=self._device)
            yield torch.from_numpy(ids).to(self._device), blocks
            self._stream.synchronize()


def _pci_address(device: torch.device) -> str | None:
    """As in sysfs: domain, bus, device; GPUs are function 0. None where torch does not say."""
    found: Any = module_of(device).get_device_properties(device)
    if not hasattr(found, "pci_domain_id"):
        return None
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def _address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


def _unlock_pages(buffer: memoryview, device: torch.device) -> None:
    with torch.cuda.device(device):
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        cudart.cudaHostUnregister(_address(buffer))
