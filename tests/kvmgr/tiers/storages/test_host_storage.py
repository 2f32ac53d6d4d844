"""`HostStorage`: round trips, epochs, and a model test."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from sagellm.core.errors import BookkeepingError, CapacityError
from sagellm.core.protocols.kv_tiers import BlockFormat, BlockStorage, ReadOutcome
from sagellm.kvmgr.kv_pool.tiers.host import HostStorage
from tests.kvmgr.tiers.storages.stored_blocks import BLOCK_BYTES, FORMAT, block, read, write

OK, ABSENT, OTHER_TOKENS = ReadOutcome.OK, ReadOutcome.ABSENT, ReadOutcome.OTHER_TOKENS


@pytest.mark.parametrize("num_bytes", [1, 4095, 8192, 100_000])
def test_round_trip_of_any_size(num_bytes: int) -> None:
    storage = HostStorage(8, BlockFormat(FORMAT.digest, num_bytes))
    assert storage.recover() == ()
    blocks = [block(slot, slot) for slot in (0, 1, 2, 5, 4, 3)]
    write(storage, *blocks, num_bytes=num_bytes)
    assert read(storage, *reversed(blocks), num_bytes=num_bytes) == [OK] * 6
    storage.check()
    storage.close()


def test_what_is_not_the_block_is_a_miss() -> None:
    storage = HostStorage(4, FORMAT)
    write(storage, block(0, 0), block(1, 1))
    assert read(storage, block(0, 9), block(1, 1), block(2, 2)) == [OTHER_TOKENS, OK, ABSENT]
    storage.touch([0])
    storage.forget([0])
    assert read(storage, block(0, 0)) == [ABSENT]
    write(storage, block(0, 5))
    assert read(storage, block(0, 0), block(0, 5)) == [OTHER_TOKENS, OK]
    storage.check()
    storage.close()


class BetweenCopies:
    """Numpy for `HostStorage`, with a call before the next copy."""

    def __init__(self, act: Any) -> None:
        self.act = act

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def copyto(self, target: Any, source: Any) -> None:
        act, self.act = self.act, None
        np.copyto(target, source)
        if act:
            act()


def test_a_slot_that_is_rewritten_while_read(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = HostStorage(4, FORMAT)
    write(storage, block(0, 0), block(1, 1))
    between = BetweenCopies(lambda: write(storage, block(0, 0)))
    monkeypatch.setattr("sagellm.kvmgr.kv_pool.tiers.host.np", between)
    assert read(storage, block(0, 0), block(1, 1)) == [OTHER_TOKENS, OK]
    assert read(storage, block(0, 0), block(1, 1)) == [OK, OK]
    storage.close()


def test_a_slot_that_is_forgotten_while_written(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = HostStorage(4, FORMAT)
    monkeypatch.setattr("sagellm.kvmgr.kv_pool.tiers.host.np", BetweenCopies(lambda: storage.forget([1])))
    write(storage, block(0, 0), block(1, 1))
    assert read(storage, block(0, 0), block(1, 1)) == [OK, ABSENT]
    storage.check()
    storage.close()


def test_against_a_dict() -> None:
    rng = random.Random(5)
    storage, held = HostStorage(16, FORMAT), dict[int, int]()
    for number in range(400):
        slots = rng.sample(range(16), rng.randint(1, 5))
        match rng.choice(["write", "forget", "read"]):
            case "write":
                write(storage, *(block(slot, 100 * number + slot) for slot in slots))
                held |= {slot: 100 * number + slot for slot in slots}
            case "forget":
                storage.forget(slots)
                held = {slot: held[slot] for slot in held if slot not in slots}
            case _:
                outcomes = read(storage, *(block(slot, held.get(slot, 10**6)) for slot in slots))
                assert outcomes == [OK if slot in held else ABSENT for slot in slots]
        storage.check()
    storage.close()


def test_threads_on_different_slots() -> None:
    storage = HostStorage(64, FORMAT)

    def work(first: int) -> None:
        for turn in range(50):
            blocks = [block(slot, 1000 * turn + slot) for slot in range(first, first + 16)]
            write(storage, *blocks)
            assert read(storage, *blocks) == [OK] * 16

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(0, 64, 16)))
    storage.check()
    storage.close()


def test_wrong_calls_are_errors() -> None:
    storage: BlockStorage = HostStorage(4, FORMAT)
    assert isinstance(storage, HostStorage)
    with pytest.raises(BookkeepingError, match="slots are 0 to 3"):
        write(storage, block(-1, 4))
    with pytest.raises(BookkeepingError, match="1 bytes for 1 blocks"):
        storage.write([block(0, 0)], b"x")
    with pytest.raises(BookkeepingError, match="0 hashes for 1 slots"):
        storage.read([0], [], memoryview(bytearray(BLOCK_BYTES)))
    with pytest.raises(ValueError, match="needs a block"):
        HostStorage(0, FORMAT)
    with pytest.raises(CapacityError, match="lower the size of the host tier"):
        HostStorage(1 << 40, BlockFormat(b"d" * 16, 1 << 30))
    write(storage)
    assert read(storage) == []
    storage.close()
    storage.close()
    for call in (
        lambda: write(storage, block(0, 0)),
        lambda: read(storage, block(0, 0)),
        lambda: storage.forget([0]),
        lambda: storage.touch([0]),
        storage.recover,
        storage.check,
    ):
        with pytest.raises(BookkeepingError, match="is closed: make another"):
            call()
