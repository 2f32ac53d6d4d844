"""Bandwidth of tiers, beside memcpy and raw reads and writes of a file.

All bytes are distinct: one block copied again and again would measure the processor's cache.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.kv_tiers import BlockFormat, BlockStorage, ReadOutcome, StoredBlock
from sagellm.core.types import Namespace
from sagellm.kvmgr.kv_pool.tiers.disk import DiskStorage
from sagellm.kvmgr.kv_pool.tiers.disk_slab import SLAB_FILE, aligned_buffer
from sagellm.kvmgr.kv_pool.tiers.host import HostStorage

MB = 1 << 20
CALL_BYTES = 16 * MB
"""Of one call, about the size of the migrator's chunks."""
READ, READ_UNVERIFIED, WRITE, RAW_READ, RAW_WRITE = (
    "read", "read without verify", "write", "raw read", "raw write",
)  # fmt: skip
HOST_WRITE, HOST_READ, COPY_TO, COPY_FROM = (
    "host write", "host read", "memcpy to host", "memcpy from host",
)  # fmt: skip


class Rates:
    """GB/s by name, one per round."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._by_name: dict[str, list[float]] = defaultdict(list)

    def measure(self, name: str, move: Callable[[], None]) -> None:
        began_s = time.perf_counter()
        move()
        self._by_name[name].append(self._num_bytes / (time.perf_counter() - began_s) / 1e9)

    def median(self, name: str) -> float:
        return statistics.median(self._by_name[name])

    def ratio(self, name: str, reference: str) -> float:
        """The median of the rounds' ratios."""
        return statistics.median(
            rate / other for rate, other in zip(self._by_name[name], self._by_name[reference], strict=True)
        )

    def show(self, name: str, reference: str = "") -> None:
        rates = self._by_name[name]
        spread = f"{self.median(name):6.2f} GB/s ({min(rates):.2f} to {max(rates):.2f})"
        beside = f"  {self.ratio(name, reference):.2f} of {reference}" if reference else ""
        print(f"  {name:24} {spread}{beside}")


class Blocks:
    """Distinct blocks in memory, and room to read them back: twice `total_bytes`."""

    def __init__(self, block_bytes: int, total_bytes: int, call_bytes: int = CALL_BYTES) -> None:
        self.size = block_bytes
        self.per_call = max(1, call_bytes // block_bytes)
        self.count = total_bytes // block_bytes // self.per_call * self.per_call
        self.num_bytes = self.count * block_bytes
        self.data, self.target = aligned_buffer(self.num_bytes), aligned_buffer(self.num_bytes)
        np.frombuffer(self.data, np.uint64)[:] = np.random.default_rng(7).integers(
            0, 1 << 63, self.num_bytes // 8, np.uint64
        )
        self.target[:] = self.data
        self.stored = [
            StoredBlock(slot, slot.to_bytes(32, "big"), b"", Namespace(), bytes(64), 0.0)
            for slot in range(self.count)
        ]

    def write(self, storage: BlockStorage) -> None:
        for first in range(0, self.count, self.per_call):
            stop = first + self.per_call
            storage.write(self.stored[first:stop], self.data[first * self.size : stop * self.size])

    def read(self, storage: BlockStorage) -> None:
        for first in range(0, self.count, self.per_call):
            blocks = self.stored[first : first + self.per_call]
            place = self.target[first * self.size : (first + self.per_call) * self.size]
            outcomes = storage.read(
                [block.slot for block in blocks], [block.token_hash for block in blocks], place
            )
            if set(outcomes) != {ReadOutcome.OK}:
                raise BookkeepingError(f"blocks from {first} on: {outcomes}")

    def raw(self, move: Callable[[int, list[memoryview], int], int], fd: int, memory: memoryview) -> None:
        for start in range(0, self.num_bytes, self.size):
            if move(fd, [memory[start : start + self.size]], start) != self.size:
                raise BookkeepingError(f"a short transfer at {start}")

    def check(self) -> None:
        """Raise `BookkeepingError` if what was read is not what was written."""
        if self.target != self.data:
            raise BookkeepingError("other bytes came back")


def measure_disk(folder: Path, blocks: Blocks, num_rounds: int, *, unverified: bool = False) -> Rates:
    """GB/s of `DiskStorage` in the empty `folder`, and of raw I/O.

    Raw are `pwritev` and `preadv` of the same file, a block in a call, with O_DIRECT where the file system
    takes it, from one thread. With `unverified` also of reads that are not verified.
    """
    storage = DiskStorage(folder, blocks.count, BlockFormat(bytes(16), blocks.size))
    storage.recover()
    blocks.write(storage)  # the first write to a place takes longer
    storage.close()
    rates = Rates(blocks.num_bytes)
    for _ in range(num_rounds):
        _disk_round(folder, blocks, rates)
        if unverified:
            storage = DiskStorage(folder, blocks.count, BlockFormat(bytes(16), blocks.size), verify=False)
            storage.recover()
            rates.measure(READ_UNVERIFIED, partial(blocks.read, storage))
            storage.close()
    return rates


def _disk_round(folder: Path, blocks: Blocks, rates: Rates) -> None:
    storage = DiskStorage(folder, blocks.count, BlockFormat(bytes(16), blocks.size))
    storage.recover()
    storage.forget(range(blocks.count))
    fd = _open_direct(folder / SLAB_FILE)
    rates.measure(RAW_WRITE, lambda: blocks.raw(os.pwritev, fd, blocks.data))
    rates.measure(WRITE, lambda: blocks.write(storage))
    rates.measure(RAW_READ, lambda: blocks.raw(os.preadv, fd, blocks.target))
    np.frombuffer(blocks.target, np.uint8)[:] = 0
    rates.measure(READ, lambda: blocks.read(storage))
    os.close(fd)
    storage.close()
    blocks.check()


def _open_direct(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | getattr(os, "O_DIRECT", 0))
    except OSError:  # as on tmpfs
        return os.open(path, os.O_RDWR)


def measure_host(blocks: Blocks, num_rounds: int) -> Rates:
    """GB/s of `HostStorage`, and of `numpy.copyto` block by block; takes as much memory again."""
    rates = Rates(blocks.num_bytes)
    storage = HostStorage(blocks.count, BlockFormat(bytes(16), blocks.size))
    copy = np.frombuffer(aligned_buffer(blocks.num_bytes), np.uint8).reshape(blocks.count, -1)
    source, target = (
        np.frombuffer(memory, np.uint8).reshape(blocks.count, -1) for memory in (blocks.data, blocks.target)
    )

    def memcpy(to: npt.NDArray[np.uint8], of: npt.NDArray[np.uint8]) -> None:
        for block in range(blocks.count):
            np.copyto(to[block], of[block])

    copy[:] = source
    blocks.write(storage)  # touches the memory
    for _ in range(num_rounds):
        rates.measure(COPY_TO, lambda: memcpy(copy, source))
        rates.measure(HOST_WRITE, lambda: blocks.write(storage))
        rates.measure(COPY_FROM, lambda: memcpy(target, copy))
        rates.measure(HOST_READ, lambda: blocks.read(storage))
    blocks.check()
    storage.close()
    return rates
