"""xxh3 checksums (64 bits) of KV bytes, computed while they are copied.

A checksum after the copy reads all bytes again, from a cache that may not hold them any more. Where a C++
compiler is there, one pass copies and hashes (`checksums.cpp`), and one call does so for many chunks without
the interpreter's lock; elsewhere pieces are copied, and each is hashed while the processor's cache has it.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from array import array
from collections.abc import Callable, Sequence
from ctypes import addressof, byref, py_object, pythonapi
from pathlib import Path
from typing import TypeAlias, cast

import xxhash

from sagellm.core.errors import KernelError
from sagellm.core.native_code import compiled, cpu_level, find_compiler, loaded
from sagellm.core.protocols.kv_tiers import Buffer

log = logging.getLogger("sagellm.checksums")
_STRIPE = 64
_LEAST_BYTES = 241
"""Shorter inputs are hashed in other ways."""
_PIECE_BYTES = 64 << 10
_at_first_byte = ctypes.c_char.from_buffer


class _PyBuffer(ctypes.Structure):
    """CPython's `Py_buffer`, whose first field is an address."""

    _fields_ = (
        ("buf", ctypes.c_void_p), ("obj", ctypes.c_void_p), ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t), ("readonly", ctypes.c_int), ("ndim", ctypes.c_int),
        ("format", ctypes.c_void_p), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p), ("internal", ctypes.c_void_p),
    )  # fmt: skip


_Kernel: TypeAlias = Callable[[int, int, bool, int], None]
Chunk: TypeAlias = tuple[Sequence[memoryview], Sequence[Buffer]]
"""Targets and sources. Without targets, sources are only read."""


def checksum(parts: Sequence[Buffer]) -> int:
    """xxh3 of bytes that lie in parts, one behind the other."""
    return checksums([parts])[0]


def checksums(chunks: Sequence[Sequence[Buffer]]) -> list[int]:
    """xxh3 of each chunk, whose bytes lie in parts, one behind the other."""
    return copy_with_checksums([((), parts) for parts in chunks])


def copy_with_checksum(
    targets: Sequence[memoryview], sources: Sequence[Buffer], *, past_cache: bool = False
) -> int:
    """As `copy_with_checksums`, for one chunk."""
    return copy_with_checksums([(targets, sources)], past_cache=past_cache)[0]


def copy_with_checksums(chunks: Sequence[Chunk], *, past_cache: bool = False) -> list[int]:
    """Copy each chunk's sources to its targets; returns the xxh3 of each.

    Pieces lie one behind the other, and may be cut elsewhere at targets than at sources. A chunk without
    targets is only read. Targets are writable and do not overlap sources. `past_cache`: targets are not read
    soon, and the processor's cache is left to others. Raises `ValueError` if sources and targets of a chunk
    have not the same number of bytes.
    """
    kernel, words = checksum_kernel(), list[int]()
    if kernel is None or not all(_describe(chunk, words) for chunk in chunks):
        return [_copied_in_pieces(chunk) for chunk in chunks]
    program, found = array("q", words), array("Q", bytes(8 * len(chunks)))
    kernel(len(chunks), program.buffer_info()[0], past_cache, found.buffer_info()[0])
    return found.tolist()


def _describe(chunk: Chunk, words: list[int]) -> bool:
    """Append what the kernel must know; False if it cannot take the chunk.

    Raises `ValueError` for different sizes.
    """
    at, sums, borders = len(words), [], 0
    words += (0, 0)
    for pieces in (chunk[1], chunk[0]):
        num_bytes = 0
        for piece in pieces:
            size = memoryview(piece).nbytes
            if size:  # memory of no bytes has no address
                words += (_address(piece), size)
                num_bytes += size
                borders |= size
        sums.append(num_bytes)
        if len(sums) == 1:
            words[at] = (len(words) - at) // 2 - 1
    words[at + 1] = (len(words) - at) // 2 - 1 - words[at]
    if sums[0] != sums[1] and chunk[0]:
        raise ValueError(f"{sums[0]} bytes are copied to {sums[1]}")
    return sums[0] >= _LEAST_BYTES and not borders % _STRIPE


def _address(piece: Buffer) -> int:
    if not memoryview(piece).readonly:
        return addressof(_at_first_byte(piece))
    view = _PyBuffer()  # ctypes has no other way to memory that is only read
    pythonapi.PyObject_GetBuffer(py_object(piece), byref(view), 0)
    pythonapi.PyBuffer_Release(byref(view))
    return int(view.buf)


def _copied_in_pieces(chunk: Chunk) -> int:
    """What the kernel does, without it."""
    state, (targets, sources) = xxhash.xxh3_64(), chunk
    if not targets:
        for source in sources:
            state.update(source)
        return state.intdigest()
    num_bytes = [sum(memoryview(piece).nbytes for piece in pieces) for pieces in (sources, targets)]
    if num_bytes[0] != num_bytes[1]:
        raise ValueError(f"{num_bytes[0]} bytes are copied to {num_bytes[1]}")
    free = iter([memoryview(target).cast("B") for target in targets])
    target = memoryview(b"")
    for source in sources:
        left = memoryview(source).cast("B")
        while left:
            while not target:
                target = next(free)
            size = min(len(left), len(target), _PIECE_BYTES)
            target[:size] = left[:size]
            state.update(target[:size])
            left, target = left[size:], target[size:]
    return state.intdigest()


@functools.cache
def checksum_kernel() -> _Kernel | None:
    """The C++ kernel, from the user's cache or compiled.

    None, which is said once, where there is no compiler.
    """
    try:
        compiler = find_compiler()
        source = Path(__file__).with_name("checksums.cpp")
        library = loaded(compiled(source, cpu_level(compiler=compiler), compiler, optimize="-O3"))
    except KernelError as error:
        log.warning("KV bytes are copied and checked in two passes: %s", error)
        return None
    function = library.sagellm_copy_with_checksums
    function.argtypes = (ctypes.c_int64, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    function.restype = None
    return cast(_Kernel, function)
