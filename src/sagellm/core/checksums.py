"""xxh3 checksums (64 bits) of KV bytes, computed while they are copied.

A checksum after the copy reads all bytes again, from a cache that may not hold them any more. Where a C++
compiler is there, one pass copies and hashes (`checksums.cpp`); elsewhere pieces are copied, and each is
hashed while the processor's cache has it.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
from collections.abc import Callable, Sequence
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
_Kernel: TypeAlias = Callable[[int, object, object, object, bool], int]


def checksum(parts: Sequence[Buffer]) -> int:
    """xxh3 of bytes that lie in parts, one behind the other."""
    if len(parts) == 1:
        return xxhash.xxh3_64_intdigest(parts[0])
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.intdigest()


def copy_with_checksum(
    targets: Sequence[memoryview], sources: Sequence[Buffer], *, past_cache: bool = False
) -> int:
    """Copy sources to targets, as if each were one piece; returns their xxh3.

    Both are views of bytes that do not overlap, writable ones as targets. `past_cache`: the targets are not
    read soon, and the processor's cache is left to others. Raises `ValueError` if sources and targets have
    not the same number of bytes.
    """
    pairs = _paired(_views(targets), _views(sources))
    sizes = [len(target) for target, _ in pairs]
    kernel = checksum_kernel()
    if kernel is None or sum(sizes) < _LEAST_BYTES or any(size % _STRIPE for size in sizes):
        return _copied_in_pieces(pairs)
    try:
        to_at, from_at = ([_address(view) for view in side] for side in zip(*pairs, strict=True))
    except TypeError:  # memory that is only read has no address for ctypes
        return _copied_in_pieces(pairs)
    pointers, lengths = ctypes.c_void_p * len(sizes), ctypes.c_int64 * len(sizes)
    return kernel(len(sizes), pointers(*from_at), pointers(*to_at), lengths(*sizes), past_cache)


def _copied_in_pieces(pairs: Sequence[tuple[memoryview, memoryview]]) -> int:
    """What the kernel does, without it."""
    state = xxhash.xxh3_64()
    for target, source in pairs:
        for first in range(0, len(source), _PIECE_BYTES):
            piece = slice(first, first + _PIECE_BYTES)
            target[piece] = source[piece]
            state.update(target[piece])
    return state.intdigest()


def _views(buffers: Sequence[Buffer]) -> list[memoryview]:
    """Of bytes; without empty ones, which have no address."""
    return [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]


def _paired(
    targets: Sequence[memoryview], sources: Sequence[memoryview]
) -> list[tuple[memoryview, memoryview]]:
    """Pieces of equal sizes: both cut where one has a border."""
    target_ends, source_ends = ([*itertools.accumulate(map(len, side))] for side in (targets, sources))
    if target_ends == source_ends:
        return list(zip(targets, sources, strict=True))
    if (target_ends or [0])[-1] != (source_ends or [0])[-1]:
        raise ValueError(f"{(source_ends or [0])[-1]} bytes are copied to {(target_ends or [0])[-1]}")
    borders = sorted({*target_ends, *source_ends})
    return list(zip(_cut(targets, borders), _cut(sources, borders), strict=True))


def _cut(views: Sequence[memoryview], borders: Sequence[int]) -> list[memoryview]:
    """The views cut at positions, which count from the first byte of all."""
    found, at, ends = [], 0, iter(borders)
    for view in views:
        begin, end = at, at + len(view)
        while at < end:
            border = next(ends)
            found.append(view[at - begin : border - begin])
            at = border
    return found


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


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
    function = library.sagellm_copy_with_checksum
    function.argtypes = (ctypes.c_int64, *(ctypes.c_void_p,) * 3, ctypes.c_int)
    function.restype = ctypes.c_uint64
    return cast(_Kernel, function)
