"""Checksums of copies: the kernel, its twin and xxhash agree."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import xxhash

from sagellm.core import checksums
from sagellm.core.checksums import (
    checksum,
    checksum_kernel,
    copy_with_checksum,
    copy_with_checksums,
)
from sagellm.core.errors import KernelError
from sagellm.core.native_code import LEVELS, this_cpu_flags

SIZES = (0, 1, 63, 64, 192, 240, 241, 256, 320, 1000, 1024, 1088, 2048, 4096 + 64, 65536, 65536 + 1, 200_000)


@pytest.fixture(params=["kernel", "avx2", "plain", "twin"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kernel for this CPU, for two lesser instruction sets, and the twin."""
    name = str(request.param)
    if name == "twin":
        monkeypatch.setattr(checksums, "checksum_kernel", lambda: None)
        yield name
        return
    if name != "kernel":
        level = next(level for level in LEVELS if level.name == name)
        if not level.cpu_flags <= this_cpu_flags():
            pytest.skip(f"the CPU has no {name}")
        monkeypatch.setattr(checksums, "cpu_level", lambda **_: level)
    checksum_kernel.cache_clear()
    if checksum_kernel() is None:
        pytest.skip("no C++ compiler")
    yield name
    checksum_kernel.cache_clear()


def aligned(data: bytes) -> memoryview:
    """In memory at an address that is a multiple of 64."""
    memory = np.empty(len(data) + 64, np.uint8)
    start = -memory.ctypes.data % 64
    view = memory[start : start + len(data)].data
    view[:] = data
    return view


def cut(data: bytes, rng: random.Random, unit: int) -> list[memoryview]:
    """Views of distinct memory that have the data in pieces of whole units."""
    borders = sorted({rng.randrange(len(data) // unit + 1) * unit for _ in range(rng.randrange(6))})
    ends = [*borders, len(data)]
    pieces = [data[a:b] for a, b in zip([0, *borders], ends, strict=True)]
    return [aligned(piece) if rng.randrange(2) else memoryview(bytearray(piece)) for piece in pieces]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("unit", [1, 64])
def test_bytes_in_pieces_are_copied_and_hashed_as_one(kind: str, size: int, unit: int) -> None:
    rng = random.Random(size * unit)
    for _ in range(10):
        data = rng.randbytes(size)
        sources, targets = cut(data, rng, unit), cut(bytes(size), rng, unit)
        past_cache = bool(rng.randrange(2))
        assert copy_with_checksum(targets, sources, past_cache=past_cache) == xxhash.xxh3_64_intdigest(data)
        assert b"".join(targets) == data
        assert checksum(sources) == xxhash.xxh3_64_intdigest(data)


@pytest.mark.parametrize("unit", [1, 64])
def test_many_chunks_in_one_call(kind: str, unit: int) -> None:
    """Some are only read; pieces of sources and targets have other borders."""
    rng = random.Random(unit)
    data = [rng.randbytes(size) for size in (320, 1024, 4096, 65536)]
    sources = [cut(each, rng, unit) for each in data]
    targets = [cut(bytes(len(each)), rng, unit) if len(each) != 1024 else () for each in data]
    expected = [xxhash.xxh3_64_intdigest(each) for each in data]
    assert copy_with_checksums(list(zip(targets, sources, strict=True))) == expected
    assert [b"".join(each) for each in targets if each] == [each for each in data if len(each) != 1024]
    assert checksums.checksums(sources) == expected
    assert not checksums.checksums([])


def test_memory_that_is_only_read(kind: str) -> None:
    data, target = bytes(range(256)) * 16, bytearray(4096)
    assert copy_with_checksum([memoryview(target)], [data]) == xxhash.xxh3_64_intdigest(data)
    assert target == data


def test_sizes_that_differ_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="1024 bytes are copied to 960"):
        copy_with_checksum([memoryview(bytearray(960))], [bytes(1024)])


def test_without_a_compiler_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise KernelError("no C++ compiler")

    monkeypatch.setattr(checksums, "find_compiler", refuse)
    checksum_kernel.cache_clear()
    try:
        for _ in range(3):
            copied = copy_with_checksum([memoryview(bytearray(1024))], [bytes(1024)])
            assert copied == xxhash.xxh3_64_intdigest(bytes(1024))
    finally:
        checksum_kernel.cache_clear()
    assert [record.message for record in caplog.records] == [
        "KV bytes are copied and checked in two passes: no C++ compiler"
    ]


def test_items_wider_than_a_byte(kind: str) -> None:
    """Sizes are counted in bytes, whatever a buffer's items are."""
    numbers = np.arange(512, dtype=np.int64)
    expected = xxhash.xxh3_64_intdigest(numbers.tobytes())
    items = array("q", numbers.tolist())
    sources: list[Any] = [numbers, numbers.reshape(8, 64), items, memoryview(items)]
    for source in sources:
        target = bytearray(numbers.nbytes)
        assert checksum([source]) == expected
        assert copy_with_checksum([memoryview(target)], [source]) == expected
        assert target == numbers.tobytes()
