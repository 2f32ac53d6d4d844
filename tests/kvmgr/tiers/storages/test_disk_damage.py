"""A restart over a catalogue with flipped bits: it starts, and what it finds is right."""

from __future__ import annotations

import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from sagellm.core.blocks import Tier
from sagellm.core.types import Tokens
from sagellm.kvmgr.kv_pool.free_list import FreeListPool
from sagellm.kvmgr.kv_pool.tiers.disk import CATALOGUE_FILE
from sagellm.kvmgr.kv_pool.tiers.tier import KVTier
from sagellm.kvmgr.prefix_cache.fingerprint import block_hash
from sagellm.kvmgr.prefix_cache.radix import RadixIndex
from tests.kvmgr.tiers.storages.chained_folder import BLOCK_TOKENS, DETAILED, make_folder, path_blocks
from tests.kvmgr.tiers.storages.stored_blocks import open_disk, read, write

PATHS = (("a", [1, 2, 3, 4]), ("a", [1, 2, 7, 8]), ("b", [1, 2, 3, 4]))
"""Those of `make_folder`: ten blocks in slots 0 to 9."""
HEADER_BYTES = 100
"""Of an SQLite database; a few of its bits make SQLite open the file read-only."""
COLUMNS = ("token_hash", "parent", "namespace", "tokens", "used_s", "num_bytes")


def check_start(folder: Path) -> int:
    """Start a server on a damaged folder, write a block, and start again; returns the blocks found first."""
    num_found = []
    for number in (20, 30):
        with closing(open_disk(folder, block_format=DETAILED)) as storage:
            index, pool = RadixIndex(BLOCK_TOKENS), FreeListPool(storage.num_slots, BLOCK_TOKENS)
            tier = KVTier(Tier.NVME, index, pool, storage)
            num_found.append(tier.recover(block_hash))
            tier.check()
            for tenant, numbers in PATHS:
                path = path_blocks(tenant, numbers)
                tokens = Tokens.frombytes(b"".join(block.tokens for block in path))
                slots = index.block_ids(tier.lookup(tokens, path[0].namespace))
                read(storage, *(block._replace(slot=slot) for block, slot in zip(path, slots, strict=False)))
            write(storage, *path_blocks("c", [number], slot=number // 2))
            assert not tier.fault
    return num_found[0]


@given(slot=st.integers(0, 9), column=st.sampled_from(COLUMNS), bit=st.integers(0, 1 << 10))
def test_a_flipped_bit_in_a_value(slot: int, column: str, bit: int) -> None:
    """Only blocks behind this one are lost with it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_folder(folder)
        with sqlite3.connect(folder / CATALOGUE_FILE) as catalogue:
            query = f"SELECT CAST({column} AS BLOB), typeof({column}) FROM blocks WHERE slot = ?"
            [(data, kind)] = catalogue.execute(query, (slot,)).fetchall()
            flipped = bytearray(data or b"\0")
            flipped[bit // 8 % len(flipped)] ^= 1 << bit % 8
            update = f"UPDATE blocks SET {column} = CAST(? AS {kind}) WHERE slot = ?"
            catalogue.execute(update, (bytes(flipped), slot))
        catalogue.close()
        assert check_start(folder) >= 4


@given(places=st.lists(st.integers(0, 1 << 20), min_size=1, max_size=3))
def test_flipped_bits_in_the_file(places: list[int]) -> None:
    """Anywhere behind the header of the database, also in the lengths and types of values."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_folder(folder)
        data = bytearray((folder / CATALOGUE_FILE).read_bytes())
        for place in places:
            data[HEADER_BYTES + place // 8 % (len(data) - HEADER_BYTES)] ^= 1 << place % 8
        (folder / CATALOGUE_FILE).write_bytes(data)
        check_start(folder)
