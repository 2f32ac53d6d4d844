"""Pages that others map: they see what is written, and can change nothing."""

from __future__ import annotations

import gc
import mmap
import os
import sys

import pytest

from sagellm.core.errors import KVDataError

if sys.platform != "linux":
    pytest.skip("memfd is Linux's", allow_module_level=True)

from sagellm.core.shared_pages import SharedPages, mapped_to_read

BYTES = 3 * mmap.PAGESIZE


def test_what_is_written_is_seen_through_the_descriptor() -> None:
    pages = SharedPages(BYTES)
    seen = mapped_to_read(pages.fd, BYTES)
    assert bytes(seen) == bytes(BYTES)
    pages.memory[5:8] = b"abc"
    assert bytes(seen[5:8]) == b"abc"
    with pytest.raises(TypeError, match="read-only"):
        seen[5:8] = b"xyz"


def test_nobody_else_can_write_or_change_the_size() -> None:
    pages = SharedPages(BYTES)
    again = os.open(f"/proc/self/fd/{pages.fd}", os.O_RDWR)
    try:
        for fd in (pages.fd, again):
            with pytest.raises(PermissionError):
                mmap.mmap(fd, BYTES)
            with pytest.raises(PermissionError):
                os.pwrite(fd, b"x", 0)
            for size in (0, 2 * BYTES):
                with pytest.raises(PermissionError):
                    os.ftruncate(fd, size)
    finally:
        os.close(again)
    pages.memory[0] = 7
    assert pages.memory[0] == 7


def test_a_mapping_outlives_its_owner() -> None:
    pages = SharedPages(BYTES)
    seen, fd = mapped_to_read(pages.fd, BYTES), pages.fd
    pages.memory[1] = 3
    view = pages.memory[1:2]
    del pages
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert seen[1] == view[0] == 3


def test_where_a_part_begins() -> None:
    pages, other = SharedPages(BYTES), SharedPages(BYTES)
    assert pages.offset_of(pages.memory[100:200]) == 100
    for elsewhere in (other.memory[:9], memoryview(bytearray(9)), memoryview(b"read only")):
        assert pages.offset_of(elsewhere) is None


@pytest.mark.parametrize("size", [0, BYTES, 2 * BYTES])
def test_memory_that_could_shrink_and_sizes_that_do_not_fit_are_refused(size: int) -> None:
    fd = os.memfd_create("x")
    try:
        os.ftruncate(fd, size)
        with pytest.raises(KVDataError, match="not sealed" if size == BYTES else "not 1 to"):
            mapped_to_read(fd, BYTES)
    finally:
        os.close(fd)
