"""Blocks whose bytes follow from their token hash, and an I/O seam with faults."""

from __future__ import annotations

import errno
import os
import random
import zlib
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from sagellm.core.errors import KVDataError
from sagellm.core.protocols.kv_tiers import BlockFormat, Buffer, ReadOutcome, StoredBlock
from sagellm.core.types import Namespace
from sagellm.kvmgr.kv_pool.tiers.disk import DiskStorage
from sagellm.kvmgr.kv_pool.tiers.disk_slab import FreeSpace
from sagellm.kvmgr.kv_pool.tiers.host import HostStorage

BLOCK_BYTES = 8192
FORMAT = BlockFormat(b"weights of tests", BLOCK_BYTES)
ANY_SPACE = FreeSpace(0, 0.0)
NAMESPACE = Namespace("tenant", "model", "", "bf16")


def token_hash(number: int) -> bytes:
    return blake2b(number.to_bytes(8, "big", signed=True), digest_size=32).digest()


def payload(key: bytes, num_bytes: int = BLOCK_BYTES) -> bytes:
    """The bytes of the block with that token hash.

    Half of the blocks can be compressed.
    """
    data = np.random.default_rng(int.from_bytes(key, "big")).bytes(num_bytes)
    return data if key[0] % 2 else data[: num_bytes // 4].ljust(num_bytes, key[1:2])


def block(slot: int, number: int, used_s: float = 1.0) -> StoredBlock:
    return StoredBlock(slot, token_hash(number), token_hash(number - 1), NAMESPACE, b"tok" * 4, used_s)


def write(storage: DiskStorage | HostStorage, *blocks: StoredBlock, num_bytes: int = BLOCK_BYTES) -> None:
    storage.write(blocks, b"".join(payload(each.token_hash, num_bytes) for each in blocks))


def read(
    storage: DiskStorage | HostStorage, *blocks: StoredBlock, num_bytes: int = BLOCK_BYTES
) -> list[ReadOutcome]:
    """Outcomes of reading blocks; those that are OK have their own bytes."""
    target = memoryview(bytearray(len(blocks) * num_bytes))
    outcomes = storage.read([each.slot for each in blocks], [each.token_hash for each in blocks], target)
    for index, (each, outcome) in enumerate(zip(blocks, outcomes, strict=True)):
        if outcome is ReadOutcome.OK:
            found = bytes(target[index * num_bytes : (index + 1) * num_bytes])
            assert found == payload(each.token_hash, num_bytes), f"wrong bytes in slot {each.slot}"
    return list(outcomes)


def open_disk(folder: Path, num_slots: int = 16, **options: Any) -> DiskStorage:
    """A storage whose blocks `recover` has not asked for yet."""
    block_format = options.pop("block_format", FORMAT)
    return DiskStorage(folder, num_slots, block_format, **{"space": ANY_SPACE, **options})


def reopened(storage: DiskStorage, folder: Path, **options: Any) -> DiskStorage:
    """The same folder after a restart."""
    storage.close()
    storage = open_disk(folder, **options)
    storage.recover()
    return storage


class ZlibCodec:
    """Exact; random bytes become longer by it."""

    name = "zlib"
    is_exact = True
    max_error = 0.0

    def encode(self, data: Buffer) -> Buffer:
        return zlib.compress(data, 1)

    def decode(self, data: Buffer, target: memoryview) -> None:
        try:
            target[:] = zlib.decompress(data)
        except (zlib.error, ValueError) as error:
            raise KVDataError("no block of that size") from error


class FaultyIO:
    """Calls of `os`, of which the `countdown`-th from now fails with `error_number`.

    With `shorten`, calls move a random part of what they are asked for, and may say that they moved less.
    """

    def __init__(self, seed: int = 0, *, shorten: bool = False) -> None:
        self.countdown = -1
        self.error_number = errno.EIO
        self._shorten = shorten
        self._random = random.Random(seed)

    def arm(self, countdown: int, error_number: int = errno.EIO) -> None:
        self.countdown, self.error_number = countdown, error_number

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        self._maybe_fail()
        return self._said(os.preadv(fd, self._part(buffers), offset))

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        fails = self.countdown == 0
        if fails and self._shorten:  # part of it reaches the disk
            os.pwritev(fd, self._part(buffers), offset)
        self._maybe_fail()
        return self._said(os.pwritev(fd, self._part(buffers), offset))

    def _maybe_fail(self) -> None:
        self.countdown -= 1
        if self.countdown == -1:
            raise OSError(self.error_number, os.strerror(self.error_number))

    def _said(self, num_bytes: int) -> int:
        is_less = self._shorten and num_bytes > 4096 and self._random.random() < 0.3
        return num_bytes - self._random.randint(1, 4095) if is_less else num_bytes

    def _part(self, buffers: Sequence[memoryview]) -> Sequence[memoryview]:
        if not self._shorten or self._random.random() < 0.5:
            return buffers
        num_pages = self._random.randint(1, max(1, sum(map(len, buffers)) // 4096))
        return _first(buffers, 4096 * num_pages)


def _first(buffers: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    kept: list[memoryview] = []
    for buffer in buffers:
        if num_bytes <= 0:
            break
        kept.append(buffer[:num_bytes])
        num_bytes -= len(buffer)
    return kept
