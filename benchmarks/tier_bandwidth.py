"""Bandwidth of `DiskStorage` and `HostStorage` beside raw reads, writes and memcpy.

    python benchmarks/tier_bandwidth.py --folder DIR --rounds 5

All bytes are distinct. Disk: blocks are written and read in calls of `--call-mb`, verified; beside it the
slab file itself is written and read with `pwritev` and `preadv`, in pieces of the block size from one thread,
with O_DIRECT. Host: beside `numpy.copyto` of the same pieces. Rounds are interleaved;
figures are medians of GB/s, with the least and the most. `verify` is the share of the load time that
verification adds: one minus the ratio of the times without and with it, medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sagellm.core.protocols.kv_tiers import BlockFormat, BlockStorage, ReadOutcome, StoredBlock
from sagellm.core.types import Namespace
from sagellm.kvmgr.kv_pool.tiers.disk import DiskStorage
from sagellm.kvmgr.kv_pool.tiers.disk_slab import SLAB_FILE, aligned_buffer
from sagellm.kvmgr.kv_pool.tiers.host import HostStorage

MB = 1 << 20


class Rates:
    """GB/s by name, one per round."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._by_name: dict[str, list[float]] = defaultdict(list)

    def measure(self, name: str, move: Callable[[], None]) -> None:
        began_s = time.perf_counter()
        move()
        self._by_name[name].append(self._num_bytes / (time.perf_counter() - began_s) / 1e9)

    def ratio(self, name: str, reference: str) -> float:
        """The median of the rounds' ratios."""
        return statistics.median(
            rate / other for rate, other in zip(self._by_name[name], self._by_name[reference], strict=True)
        )

    def show(self, name: str, reference: str = "") -> None:
        rates = self._by_name[name]
        spread = f"{statistics.median(rates):6.2f} GB/s ({min(rates):.2f} to {max(rates):.2f})"
        beside = f"  {self.ratio(name, reference):.2f} of {reference}" if reference else ""
        print(f"  {name:24} {spread}{beside}")


class Blocks:
    """Distinct blocks in memory, and room to read them back."""

    def __init__(self, block_bytes: int, total_bytes: int, call_bytes: int) -> None:
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
                raise RuntimeError(f"blocks from {first} on: {outcomes}")

    def raw(self, move: Callable[[int, list[memoryview], int], int], fd: int, memory: memoryview) -> None:
        for start in range(0, self.num_bytes, self.size):
            if move(fd, [memory[start : start + self.size]], start) != self.size:
                raise RuntimeError(f"a short transfer at {start}")


def measure_disk(parent: Path, blocks: Blocks, num_rounds: int) -> None:
    with tempfile.TemporaryDirectory(dir=parent) as name:
        folder = Path(name)
        disk_round(folder, blocks, Rates(blocks.num_bytes))  # allocates the slab, and warms up
        rates = Rates(blocks.num_bytes)
        for _ in range(num_rounds):
            disk_round(folder, blocks, rates)
    rates.show("raw write")
    rates.show("write", "raw write")
    rates.show("raw read")
    rates.show("read", "raw read")
    rates.show("read without verify", "raw read")
    print(f"  verify: {1 - rates.ratio('read', 'read without verify'):.1%} of the load time")


def disk_round(folder: Path, blocks: Blocks, rates: Rates) -> None:
    block_format = BlockFormat(bytes(16), blocks.size)
    storage = DiskStorage(folder, blocks.count, block_format)
    storage.recover()
    storage.forget(range(blocks.count))
    fd = os.open(folder / SLAB_FILE, os.O_RDWR | os.O_DIRECT)
    rates.measure("raw write", lambda: blocks.raw(os.pwritev, fd, blocks.data))
    rates.measure("write", lambda: blocks.write(storage))
    rates.measure("raw read", lambda: blocks.raw(os.preadv, fd, blocks.target))
    blocks.target[:] = bytes(blocks.num_bytes)
    rates.measure("read", lambda: blocks.read(storage))
    os.close(fd)
    storage.close()
    if blocks.target != blocks.data:
        raise RuntimeError("other bytes came back")
    unverified = DiskStorage(folder, blocks.count, block_format, verify=False)
    unverified.recover()
    rates.measure("read without verify", lambda: blocks.read(unverified))
    unverified.close()


def measure_host(blocks: Blocks, num_rounds: int) -> None:
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
        rates.measure("memcpy to host", lambda: memcpy(copy, source))
        rates.measure("host write", lambda: blocks.write(storage))
        rates.measure("memcpy from host", lambda: memcpy(target, copy))
        rates.measure("host read", lambda: blocks.read(storage))
    if blocks.target != blocks.data:
        raise RuntimeError("other bytes came back")
    storage.close()
    for name, reference in (("host write", "memcpy to host"), ("host read", "memcpy from host")):
        rates.show(reference)
        rates.show(name, reference)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure")
    parser.add_argument("--total-mb", type=int, default=1024)
    parser.add_argument("--block-kb", type=int, nargs="+", default=[1024, 576, 128])
    parser.add_argument("--call-mb", type=int, nargs="+", default=[16, 1])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for block_kb in options.block_kb:
        for call_mb in options.call_mb:
            blocks = Blocks(block_kb << 10, options.total_mb * MB, call_mb * MB)
            print(f"{blocks.count} blocks of {block_kb} KB, {blocks.per_call} in a call")
            measure_disk(options.folder, blocks, options.rounds)
            measure_host(blocks, options.rounds)


if __name__ == "__main__":
    main()
