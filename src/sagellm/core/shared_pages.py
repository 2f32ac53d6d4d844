"""`SharedPages`: memory of this process that others of its host may map, to read."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref

from sagellm.core.errors import KVDataError

_F_SEAL_FUTURE_WRITE = 0x10
"""No process gets a writable mapping any more; this one keeps what it has. Linux 5.1."""


class SharedPages:
    """Memory that this process writes and others map by its descriptor `fd`.

    It begins as zeros. Others can only read it, and it keeps its size, so what they read is there. A page is
    resident once it is read or written. `fd` lives as long as this object, `memory` as long as a view of it,
    here or elsewhere.

    Raises `OSError` where the system has no such memory (before Linux 5.1) or refuses the address space.
    """

    def __init__(self, num_bytes: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memory that is shared by a descriptor")
        self.fd = os.memfd_create("sagellm-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, num_bytes)
        self.memory = memoryview(mmap.mmap(self.fd, num_bytes))
        size, more = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW, _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, size | more)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def offset_of(self, part: memoryview) -> int | None:
        """Where a part of `memory` begins in it; None for other memory."""
        if part.readonly:
            return None
        offset = ctypes.addressof(ctypes.c_char.from_buffer(part)) - self._address
        return offset if 0 <= offset < len(self.memory) else None


def mapped_to_read(fd: int, max_bytes: int) -> memoryview:
    """The `SharedPages` of another process.

    Raises `KVDataError` for memory that could shrink while it is read, and for none or more than `max_bytes`.
    """
    num_bytes = os.fstat(fd).st_size
    if not 0 < num_bytes <= max_bytes:
        raise KVDataError(f"a peer shares {num_bytes} bytes, not 1 to {max_bytes}")
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise KVDataError("a peer shares memory that is not sealed")
    return memoryview(mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ))
