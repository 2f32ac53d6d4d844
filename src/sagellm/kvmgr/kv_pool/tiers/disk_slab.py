"""`Slab`: a preallocated file of slots, with direct I/O where that works."""

from __future__ import annotations

import errno
import logging
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sagellm.core.blocks import cdiv
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.kv_tiers import Buffer
from sagellm.kvmgr.kv_pool.tiers.disk_folder import OwnedFolder

log = logging.getLogger("sagellm.kv_tiers")
ALIGNMENT = 4096
"""Of addresses, offsets and sizes in direct I/O; also the area of a slot's header."""
SLAB_FILE = "slab"
_MAX_IDLE_BUFFERS = 16
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


class SlabIO(Protocol):
    """The calls that move bytes to the disk and back, as in `os`.

    Tests inject faults through it.
    """

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int: ...

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int: ...


@dataclass(frozen=True, slots=True)
class FreeSpace:
    """What a slab leaves free of its file system: the greater of both."""

    min_bytes: int = 0
    min_share: float = 0.05

    def __post_init__(self) -> None:
        if self.min_bytes < 0 or not 0 <= self.min_share < 1:
            raise ValueError(f"free space is at least 0 bytes and a share in [0, 1), got {self}")

    def usable(self, fd: int) -> int:
        """Bytes that the slab may still take; below 0 if too few are free."""
        disk = os.fstatvfs(fd)
        kept = max(self.min_bytes, int(self.min_share * disk.f_blocks * disk.f_frsize))
        return disk.f_bavail * disk.f_frsize - kept


class Slab:
    """Owns the slab file from its constructor until `close`.

    A slot is an aligned area for the header and the payload padded to `ALIGNMENT`. `num_slots` is what was
    asked for, or less if the free space allows no more, but never for that reason less than `num_found`, the
    slots that were there before. `is_direct`: reads and writes bypass the page cache, and need aligned
    memory. `is_sparse`: space is taken when a slot is first written, so a write checks the free space.
    """

    def __init__(
        self, folder: OwnedFolder, bytes_per_block: int, num_slots: int, space: FreeSpace, io: SlabIO
    ) -> None:
        self.slot_bytes = slot_bytes(bytes_per_block)
        self.path = folder.path / SLAB_FILE
        self.is_direct = self.is_sparse = False
        self._space = space
        self._io = io
        self._fd = self._open(folder)
        try:
            self.num_found = os.fstat(self._fd).st_size // self.slot_bytes
            self.num_slots = self._affordable(num_slots)
            self._allocate()
            self._try_direct(folder)
        except BaseException:
            self.close()
            raise

    @property
    def num_bytes(self) -> int:
        """The size of the file."""
        return os.fstat(self._fd).st_size

    def erase(self) -> None:
        """All slots are empty again; their space is taken anew."""
        os.ftruncate(self._fd, 0)
        self.num_found = 0
        self._allocate()

    def grow(self, num_slots: int) -> None:
        """Have so many slots, or fewer if the free space allows no more."""
        self.num_slots = max(self.num_slots, self._affordable(num_slots))
        self._allocate()

    def read(self, slot: int, buffers: Sequence[memoryview]) -> int:
        """Fill buffers from the start of a slot on. Returns the bytes read: fewer at the end of the file.

        Raises `OSError`."""
        return self._transfer(self._io.preadv, slot * self.slot_bytes, buffers)

    def write(self, slot: int, buffers: Sequence[memoryview]) -> None:
        """Write buffers from the start of a slot on. Raises `OSError`; any part may then be written."""
        size = sum(map(len, buffers))
        if self.is_sparse and self._space.usable(self._fd) < size:
            raise OSError(errno.ENOSPC, "the free space would fall below its limit", str(self.path))
        if self._transfer(self._io.pwritev, slot * self.slot_bytes, buffers) < size:
            raise OSError(errno.EIO, "the disk takes no more bytes", str(self.path))

    def takes(self, buffer: memoryview, block_bytes: int) -> bool:
        """Whether blocks in this memory can be read and written without a copy."""
        return not self.is_direct or (block_bytes % ALIGNMENT == 0 and address(buffer) % ALIGNMENT == 0)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    # -- inside

    def _open(self, folder: OwnedFolder) -> int:
        try:
            fd = folder.open(SLAB_FILE, getattr(os, "O_DIRECT", 0))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return folder.open(SLAB_FILE)
        self.is_direct = hasattr(os, "O_DIRECT")
        return fd

    def _affordable(self, num_slots: int) -> int:
        """Slots for which there is room beside the free space that is kept.

        Not fewer than are there.
        """
        status = os.fstat(self._fd)
        taken = min(status.st_blocks * 512, status.st_size)
        usable = self._space.usable(self._fd)
        room = (taken + max(0, usable)) // self.slot_bytes
        most = max(room, self.num_found)
        self.is_sparse |= room < min(num_slots, self.num_found)  # some of these have no space yet
        if most < 1:
            raise ConfigError(
                f"{self.path}: no room for one block of {self.slot_bytes} bytes beside the space that is "
                f"kept free ({self._space}): free some, keep less, or name a folder on another disk"
            )
        if most < num_slots:
            log.warning(
                "%s: room for %d of %d blocks beside the free space that is kept", self.path, most, num_slots
            )
        return min(num_slots, most)

    def _allocate(self) -> None:
        size = self.num_slots * self.slot_bytes
        before = self.num_bytes
        try:
            if not self.is_sparse:
                # With O_DIRECT the C library cannot imitate this by writing to each page, for minutes.
                os.posix_fallocate(self._fd, 0, size)
        except OSError as error:
            os.ftruncate(self._fd, before)
            if error.errno not in _NOT_SUPPORTED:
                raise
            self.is_sparse = True
            log.warning("%s: this file system preallocates no space, so writes may find it full", self.path)
        os.ftruncate(self._fd, size)

    def _try_direct(self, folder: OwnedFolder) -> None:
        """Some file systems open a file for direct I/O and refuse the first call."""
        if self.is_direct:
            try:
                self._io.preadv(self._fd, [aligned_buffer(ALIGNMENT)], 0)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                os.close(self._fd)
                self._fd = -1
                self._fd = folder.open(SLAB_FILE)
                self.is_direct = False
        if not self.is_direct:
            log.info("%s: this file system has no direct I/O, blocks go through the page cache", self.path)

    def _transfer(
        self,
        call: Callable[[int, Sequence[memoryview], int], int],
        offset: int,
        buffers: Sequence[memoryview],
    ) -> int:
        """Repeat a call until all bytes are moved, or it moves none.

        Python itself repeats a call that a signal interrupts.
        """
        total = sum(map(len, buffers))
        done = resumed = call(self._fd, buffers, offset)
        while done < total:
            if self.is_direct:
                resumed = done - done % ALIGNMENT
            moved = call(self._fd, list(_behind(buffers, resumed)), offset + resumed)
            if resumed + moved <= done:
                break
            done = resumed = resumed + moved
        return done


class Scratch:
    """Aligned buffers of one size for worker threads, used again and again."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._idle: list[memoryview] = []

    def take(self) -> memoryview:
        try:
            return self._idle.pop()
        except IndexError:
            return aligned_buffer(self._num_bytes)

    def give(self, buffer: memoryview) -> None:
        if len(self._idle) < _MAX_IDLE_BUFFERS:
            self._idle.append(buffer)


def aligned(num_bytes: int) -> int:
    """Rounded up to the alignment of direct I/O."""
    return cdiv(num_bytes, ALIGNMENT) * ALIGNMENT


def slot_bytes(bytes_per_block: int) -> int:
    """Of a slot: the area of the header, and the block rounded up."""
    return ALIGNMENT + aligned(bytes_per_block)


def aligned_buffer(num_bytes: int) -> memoryview:
    """Zeroed memory. Its blocks go to the disk without a copy if 4096 divides their size.

    Huge pages, where the system has them, make direct I/O faster by a fifth: fewer pieces for the device.
    """
    memory = mmap.mmap(-1, aligned(num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)[:num_bytes]


def address(buffer: Buffer) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


def _behind(buffers: Sequence[memoryview], done: int) -> Iterator[memoryview]:
    """What is left of buffers behind their first `done` bytes."""
    for buffer in buffers:
        if done < len(buffer):
            yield buffer[done:]
        done = max(0, done - len(buffer))
