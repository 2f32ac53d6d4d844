"""`DiskStorage`: round trips, each outcome of a read, codecs, threads."""

from __future__ import annotations

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.kv_tiers import BlockFormat, BlockHeader, ReadOutcome
from sagellm.kvmgr.kv_pool.tiers.disk_slab import ALIGNMENT, SLAB_FILE, aligned_buffer
from tests.kvmgr.tiers.storages.stored_blocks import (
    BLOCK_BYTES,
    FORMAT,
    FaultyIO,
    ZlibCodec,
    block,
    open_disk,
    payload,
    read,
    reopened,
    token_hash,
    write,
)

OK, ABSENT = ReadOutcome.OK, ReadOutcome.ABSENT
SLOT_BYTES = ALIGNMENT + BLOCK_BYTES


def patch_slab(folder: Path, offset: int, data: bytes) -> None:
    with (folder / SLAB_FILE).open("r+b") as file:
        file.seek(offset)
        file.write(data)


def with_header(folder: Path, slot: int, **changes: Any) -> None:
    """Replace fields of a header, whose own digest is right again."""
    with (folder / SLAB_FILE).open("rb") as file:
        file.seek(slot * SLOT_BYTES)
        header = BlockHeader.unpack(file.read(ALIGNMENT))
    patch_slab(folder, slot * SLOT_BYTES, replace(header, **changes).pack())


@pytest.mark.parametrize("num_bytes", [1, 4095, 4096, 8192, 10_000, (5 << 20) + 12])
@pytest.mark.parametrize("shorten", [False, True])
def test_round_trip_of_any_size(tmp_path: Path, num_bytes: int, shorten: bool) -> None:
    blocks = [block(slot, slot) for slot in (0, 1, 2, 5, 4, 3)]
    storage = open_disk(
        tmp_path, 8, block_format=BlockFormat(FORMAT.digest, num_bytes), io=FaultyIO(3, shorten=shorten)
    )
    storage.recover()
    write(storage, *blocks, num_bytes=num_bytes)
    assert read(storage, *reversed(blocks), num_bytes=num_bytes) == [OK] * 6
    storage.check()
    storage.close()


def test_aligned_memory_needs_no_copy(tmp_path: Path) -> None:
    storage = open_disk(tmp_path)
    storage.recover()
    blocks = [block(slot, slot) for slot in range(16)]
    data, target = aligned_buffer(16 * BLOCK_BYTES), aligned_buffer(16 * BLOCK_BYTES)
    data[:] = b"".join(payload(each.token_hash) for each in blocks)
    storage.write(blocks, data)
    outcomes = storage.read(range(16), [each.token_hash for each in blocks], target)
    assert list(outcomes) == [OK] * 16
    assert target == data
    storage.close()


def test_a_slot_is_absent_until_written_and_once_forgotten(tmp_path: Path) -> None:
    storage = open_disk(tmp_path)
    assert storage.recover() == []
    assert read(storage, block(3, 3)) == [ABSENT]
    write(storage, block(3, 3))
    assert read(storage, block(3, 3), block(3, 4)) == [OK, ReadOutcome.OTHER_TOKENS]
    storage.forget([3])
    assert read(storage, block(3, 3)) == [ABSENT]
    storage.check()
    storage.close()


def test_what_is_forgotten_while_written_holds_nothing(tmp_path: Path) -> None:
    class Slow(FaultyIO):
        def pwritev(self, fd: int, buffers, offset: int, /) -> int:  # type: ignore[no-untyped-def]
            storage.forget([2])
            return super().pwritev(fd, buffers, offset)

    storage = open_disk(tmp_path, io=Slow())
    storage.recover()
    write(storage, block(1, 1), block(2, 2))
    assert read(storage, block(1, 1), block(2, 2)) == [OK, ABSENT]
    storage.check()
    storage = reopened(storage, tmp_path)
    assert read(storage, block(1, 1), block(2, 2)) == [OK, ABSENT]
    storage.close()


# -- what does not verify


def test_bit_flips_are_found(tmp_path: Path) -> None:
    storage = open_disk(tmp_path)
    storage.recover()
    write(storage, block(0, 0), block(1, 1), block(2, 2))
    patch_slab(tmp_path, ALIGNMENT + 77, bytes([payload(token_hash(0))[77] ^ 1]))
    patch_slab(tmp_path, SLOT_BYTES + 40, b"\xff")
    assert read(storage, block(0, 0), block(1, 1), block(2, 2)) == [ReadOutcome.CORRUPT] * 2 + [OK]
    with pytest.raises(BookkeepingError, match="slot 1"):
        storage.check()
    storage.close()


def test_without_verify_the_header_is_still_checked(tmp_path: Path) -> None:
    storage = open_disk(tmp_path, verify=False)
    storage.recover()
    write(storage, block(0, 0), block(1, 1))
    with_header(tmp_path, 0, checksum=1)
    with_header(tmp_path, 1, token_hash=token_hash(9))
    assert read(storage, block(0, 0), block(1, 1)) == [OK, ReadOutcome.OTHER_TOKENS]
    storage.close()


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"version": 0, "format_digest": b"x" * 16}, ReadOutcome.OTHER_VERSION),
        ({"format_digest": b"x" * 16, "token_hash": b"x" * 32}, ReadOutcome.OTHER_FORMAT),
        ({"token_hash": b"x" * 32, "checksum": 0}, ReadOutcome.OTHER_TOKENS),
        ({"checksum": 0, "codec": "int8"}, ReadOutcome.CORRUPT),
        ({"codec": "int8"}, ReadOutcome.UNKNOWN_CODEC),
        ({"num_bytes": BLOCK_BYTES + 1}, ABSENT),
    ],
)
def test_headers_are_compared_in_order(tmp_path: Path, changes: dict[str, Any], outcome: ReadOutcome) -> None:
    storage = open_disk(tmp_path)
    storage.recover()
    write(storage, block(4, 4))
    with_header(tmp_path, 4, **changes)
    assert read(storage, block(4, 4)) == [outcome]
    storage.close()


def test_zeroed_slots_and_a_file_that_ends_are_absent(tmp_path: Path) -> None:
    storage = open_disk(tmp_path)
    storage.recover()
    write(storage, *(block(slot, slot) for slot in range(4)))
    patch_slab(tmp_path, 0, bytes(ALIGNMENT))
    os.truncate(tmp_path / SLAB_FILE, 2 * SLOT_BYTES + ALIGNMENT + 100)
    blocks = [block(slot, slot) for slot in range(4)]
    assert read(storage, *blocks) == [ABSENT, OK, ABSENT, ABSENT]
    assert storage.fault is None
    storage.close()


# -- codecs


def test_blocks_are_encoded_if_that_makes_them_smaller(tmp_path: Path) -> None:
    storage = open_disk(tmp_path, codec=ZlibCodec())
    storage.recover()
    blocks = [block(0, 0), block(1, 1)]
    data = random.Random(0).randbytes(BLOCK_BYTES) + bytes(BLOCK_BYTES)
    storage.write(blocks, data)
    target = memoryview(bytearray(2 * BLOCK_BYTES))
    hashes = [each.token_hash for each in blocks]
    assert list(storage.read([0, 1], hashes, target)) == [OK, OK]
    assert target == data
    storage.check()

    storage = reopened(storage, tmp_path)  # without the codec
    assert list(storage.read([0, 1], hashes, target)) == [OK, ReadOutcome.UNKNOWN_CODEC]
    storage = reopened(storage, tmp_path, codec=ZlibCodec())
    assert list(storage.read([0, 1], hashes, target)) == [OK, OK]
    assert target == data
    patch_slab(tmp_path, SLOT_BYTES + ALIGNMENT, b"no zlib")
    assert list(storage.read([0, 1], hashes, target)) == [OK, ReadOutcome.CORRUPT]
    storage = reopened(storage, tmp_path, codec=type("Raw", (ZlibCodec,), {"name": "raw"})())
    write(storage, block(1, 1))
    assert read(storage, block(1, 1)) == [OK]
    storage.close()


# -- use


def test_wrong_calls_are_errors(tmp_path: Path) -> None:
    storage = open_disk(tmp_path, 4)
    with pytest.raises(BookkeepingError, match=r"recover\(\) first"):
        write(storage, block(0, 0))
    storage.recover()
    with pytest.raises(BookkeepingError, match="is open"):
        storage.recover()
    with pytest.raises(BookkeepingError, match="slots are 0 to 3"):
        write(storage, block(4, 4))
    with pytest.raises(BookkeepingError, match="twice"):
        write(storage, block(1, 1), block(1, 2))
    with pytest.raises(BookkeepingError, match="1 bytes for 1 blocks"):
        storage.write([block(0, 0)], b"x")
    write(storage)
    assert read(storage) == []
    storage.close()
    for call in (
        lambda: write(storage, block(0, 0)),
        lambda: read(storage, block(0, 0)),
        lambda: storage.forget([0]),
        lambda: storage.touch([0]),
        storage.check,
    ):
        with pytest.raises(BookkeepingError, match="is closed: open the folder again"):
            call()
    open_disk(tmp_path).close()  # never recovered


def test_threads_on_different_slots(tmp_path: Path) -> None:
    storage = open_disk(tmp_path, 64)
    storage.recover()

    def work(first: int) -> None:
        for turn in range(20):
            blocks = [block(slot, 1000 * turn + slot) for slot in range(first, first + 16)]
            write(storage, *blocks)
            assert read(storage, *blocks) == [OK] * 16
            storage.touch(range(first, first + 16))
            storage.forget([first + turn % 16])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(0, 64, 16)))
    storage.check()
    storage.close()


def test_the_engine_thread_never_waits_for_the_disk(tmp_path: Path) -> None:
    """While each transfer takes 50 ms, `touch` and `forget` take a few at most."""

    class Slow(FaultyIO):
        def pwritev(self, fd: int, buffers, offset: int, /) -> int:  # type: ignore[no-untyped-def]
            time.sleep(0.05)
            return super().pwritev(fd, buffers, offset)

    storage = open_disk(tmp_path, 256, io=Slow())
    storage.recover()
    write(storage, *(block(slot, slot) for slot in range(100)))

    def write_slowly() -> None:
        for turn in range(8):
            write(storage, block(200 + turn, 1000 + turn))

    writer = threading.Thread(target=write_slowly)
    writer.start()
    spent_s = []
    while writer.is_alive():
        began_s = time.perf_counter()
        storage.touch(range(100))
        storage.forget(range(100, 200))
        spent_s.append(time.perf_counter() - began_s)
        time.sleep(0.002)
    writer.join()
    storage.check()
    storage.close()
    spent_s.sort()
    print(f"{len(spent_s)} calls, p99 {1e3 * spent_s[len(spent_s) * 99 // 100]:.2f} ms")
    assert spent_s[len(spent_s) // 2] < 0.005
    assert spent_s[len(spent_s) * 9 // 10] < 0.03
