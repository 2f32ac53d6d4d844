"""`KeyedTier` and `KeyedRemote`: what is delivered has the bytes of its key, whatever happens to the disk."""

from __future__ import annotations

import errno
import logging
import random
import shutil
import subprocess
import tempfile
import threading
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sagellm.core.clock import ManualClock
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.eviction import EvictionPolicy
from sagellm.core.protocols.kv_tiers import BlockFormat
from sagellm.engines.build_kv import make_policy
from sagellm.engines.guests import keyed_blocks
from sagellm.engines.guests.keyed_blocks import KeyedBlocks, KeyedRemote, KeyedTier
from sagellm.kvmgr.kv_pool.tiers.remote import RemoteOptions, RemoteStore
from tests.kvmgr.tiers.storages.stored_blocks import (
    BLOCK_BYTES,
    FORMAT,
    FaultyIO,
    open_disk,
    payload,
    token_hash,
)

NUM_SLOTS = 8
CLOCK = ManualClock()


def lru() -> EvictionPolicy:
    return make_policy("lru", capacity=NUM_SLOTS, clock=CLOCK)


def opened(folder: Path, num_slots: int = NUM_SLOTS, **options: object) -> KeyedTier:
    return KeyedTier(open_disk(folder, num_slots, **options), BLOCK_BYTES, lru, CLOCK)


def put(blocks: KeyedBlocks, *numbers: int) -> list[bool]:
    keys = list(map(token_hash, numbers))

    def fill(place: int, memory: memoryview) -> None:
        memory[:] = payload(keys[place])

    return blocks.put(keys, fill)


def get(blocks: KeyedBlocks, *numbers: int) -> list[bool]:
    """Read blocks; what is delivered must be right, and be what is said to be found."""
    keys, delivered = list(map(token_hash, numbers)), [False] * len(numbers)

    def deliver(place: int, memory: memoryview) -> None:
        assert memory == payload(keys[place])
        delivered[place] = True

    assert blocks.get(keys, deliver) == delivered
    return delivered


def there(blocks: KeyedBlocks, *numbers: int) -> list[bool]:
    return list(blocks.contains(list(map(token_hash, numbers))))


def damage(folder: Path, blocks: KeyedTier, number: int) -> None:
    """Change a byte of a stored block on the disk."""
    [slot] = blocks.tier.index.block_ids(blocks._lookup(token_hash(number)))
    with (folder / "slab").open("r+b") as slab:
        slab.seek(slot * (BLOCK_BYTES + 4096) + 4096 + 100)
        byte = slab.read(1)
        slab.seek(-1, 1)
        slab.write(bytes([byte[0] ^ 1]))


class KeyedTierMachine(RuleBasedStateMachine):
    """Calls, restarts and damage in any order, beside a set of what may be there."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.blocks = opened(self.folder)
        self.put_before: set[int] = set()
        self.damaged: set[int] = set()
        self.num_misses = 0

    def resident(self) -> set[int]:
        numbers = sorted(self.put_before)
        return {
            number for number, is_there in zip(numbers, there(self.blocks, *numbers), strict=True) if is_there
        }

    @rule(numbers=st.lists(st.integers(0, 15), max_size=NUM_SLOTS // 2))
    def put(self, numbers: list[int]) -> None:
        before = self.resident()
        assert put(self.blocks, *numbers) == [True] * len(numbers)
        self.put_before.update(numbers)
        assert self.resident() >= set(numbers)
        self.damaged &= before & self.resident()

    @rule(numbers=st.lists(st.integers(0, 15), max_size=6))
    def get(self, numbers: list[int]) -> None:
        resident = self.resident()
        hit_damage = self.damaged & set(numbers)
        assert get(self.blocks, *numbers) == [n in resident and n not in self.damaged for n in numbers]
        self.num_misses += sum(number in hit_damage for number in numbers)
        assert self.resident() == resident - hit_damage
        assert sum(self.blocks.misses().values()) == self.num_misses
        self.damaged -= hit_damage

    @rule(numbers=st.lists(st.integers(0, 15), max_size=6))
    def use(self, numbers: list[int]) -> None:
        self.blocks.use(list(map(token_hash, numbers)))

    @precondition(lambda self: self.resident() - self.damaged)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.resident() - self.damaged)))
        damage(self.folder, self.blocks, number)
        self.damaged.add(number)

    @rule()
    def restart(self) -> None:
        resident = self.resident()
        self.blocks.close()
        self.blocks = opened(self.folder)
        self.num_misses = 0
        assert self.blocks.num_recovered == len(resident)
        assert self.resident() == resident

    @rule()
    def clear(self) -> None:
        self.blocks.clear()
        assert not self.resident()
        self.put_before.clear()
        self.damaged.clear()

    @invariant()
    def books_agree(self) -> None:
        self.blocks.check()
        assert len(self.resident()) <= NUM_SLOTS

    def teardown(self) -> None:
        self.blocks.close()
        shutil.rmtree(self.folder)


KeyedTierMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
TestKeyedTier = KeyedTierMachine.TestCase


def test_the_end_of_a_prompt_goes_before_its_beginning(tmp_path: Path) -> None:
    blocks = opened(tmp_path)
    put(blocks, *range(4))
    put(blocks, *range(10, 14))
    blocks.use(list(map(token_hash, range(4))))
    put(blocks, 20, 21)
    assert there(blocks, *range(10, 14)) == [True, True, False, False]
    assert there(blocks, *range(4)) == [True] * 4
    blocks.close()
    blocks = opened(tmp_path)
    put(blocks, 30, 31, 32)
    assert there(blocks, 10, 11, 3, 2) == [False, False, False, True], "the order outlives a restart"
    blocks.close()


def test_a_call_larger_than_half_of_the_tier_stores_its_first_blocks(tmp_path: Path) -> None:
    blocks = opened(tmp_path)
    assert put(blocks, *range(12)) == [True] * 4 + [False] * 8
    blocks.check()
    blocks.close()


def test_small_chunks_move_all_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed_blocks, "CHUNK_BYTES", 2 * BLOCK_BYTES)
    blocks = opened(tmp_path, 32)
    assert all(put(blocks, *range(7)))
    assert all(get(blocks, *range(7)))
    blocks.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_disk_that_fails_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    io = FaultyIO()
    blocks = opened(tmp_path, io=io)
    put(blocks, 1)
    io.arm(0, number)
    with caplog.at_level(logging.WARNING):
        assert put(blocks, 1, 2, 3) == [True, False, False]
        for _ in range(3):
            assert put(blocks, 4) == get(blocks, 1) == there(blocks, 1) == [False]
            blocks.use([token_hash(1)])
    assert blocks.fault
    assert len(caplog.records) == 1
    blocks.check()
    blocks.close()
    blocks = opened(tmp_path)
    assert get(blocks, 1, 2) == [True, False]
    blocks.close()


def test_a_caller_that_fails_holds_nothing(tmp_path: Path) -> None:
    """An error of `fill` or `deliver` reaches the caller; nothing stays pinned."""
    blocks = opened(tmp_path)
    put(blocks, 1, 2)

    def fails(place: int, memory: memoryview) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        blocks.get([token_hash(1)], fails)
    with pytest.raises(ZeroDivisionError):
        blocks.put([token_hash(1), token_hash(3)], fails)
    assert there(blocks, 1, 2, 3) == [True, True, False]
    blocks.check()
    blocks.clear()
    assert there(blocks, 1, 2) == [False, False]
    blocks.close()


def test_closed_it_finds_nothing(tmp_path: Path) -> None:
    blocks = opened(tmp_path)
    put(blocks, 1)
    blocks.close()
    blocks.close()
    assert put(blocks, 2) == get(blocks, 1) == there(blocks, 1) == [False]
    blocks.use([token_hash(1)])
    blocks.clear()


def test_threads_read_only_what_is_right(tmp_path: Path) -> None:
    """Readers, writers and one that clears, on fewer slots than keys; then it closes under them."""
    blocks, failures, counts = opened(tmp_path, 32), [], [0, 0]

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for step in range(150):
                numbers = [rng.randrange(60) for _ in range(rng.randint(1, 6))]
                counts[0] += sum(put(blocks, *numbers) if seed % 2 else get(blocks, *numbers))
                counts[1] += sum(there(blocks, *numbers))
                if seed == 4 and step % 50 == 49:
                    blocks.clear()
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads[:3]:
        thread.join()
    blocks.close()
    for thread in threads:
        thread.join()
    assert not failures
    assert min(counts) > 0
    blocks.check()


def test_the_shared_store_has_the_same_interface(tmp_path: Path) -> None:
    pytest.importorskip("redis")
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed")
    address = tmp_path / "socket"
    options = "--port", "0", "--unixsocket", str(address), "--save", "", "--dir", str(tmp_path)
    with subprocess.Popen([program, *options], stdout=subprocess.DEVNULL) as server:
        try:
            for _ in range(500):
                if address.exists():
                    break
                threading.Event().wait(0.01)
            made = partial(RemoteStore, RemoteOptions(f"unix://{address}"))
            one, two = (KeyedRemote(made(FORMAT), BLOCK_BYTES) for _ in range(2))
            other = KeyedRemote(made(BlockFormat(b"other weights....", BLOCK_BYTES)), BLOCK_BYTES)
            assert put(one, *range(5)) == [True] * 5
            assert put(two, 3, 9) == [True, True]
            assert get(two, 0, 9, 7, 4) == [True, True, False, True]
            assert there(two, 0, 7) == [True, False]
            assert get(other, 0) == there(other, 0) == [False]
            two.use([token_hash(0)])
            assert not two.misses()
            with pytest.raises(ConfigError, match="FLUSHDB"):
                two.clear()
        finally:
            server.kill()
    assert put(two, 1) == get(two, 1) == there(two, 1) == [False]
    for store in (one, two, other):
        store.close()
