"""`DiskStorage.recover`: warm restarts, and folders that were changed meanwhile."""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from sagellm.core.blocks import Tier
from sagellm.core.protocols.kv_tiers import BlockFormat, ReadOutcome
from sagellm.kvmgr.kv_pool.free_list import FreeListPool
from sagellm.kvmgr.kv_pool.tiers.disk import CATALOGUE_FILE
from sagellm.kvmgr.kv_pool.tiers.disk_slab import ALIGNMENT, SLAB_FILE
from sagellm.kvmgr.kv_pool.tiers.tier import KVTier
from sagellm.kvmgr.prefix_cache.fingerprint import block_hash
from sagellm.kvmgr.prefix_cache.radix import RadixIndex
from tests.kvmgr.tiers.storages.chained_folder import BLOCK_TOKENS, DETAILED, make_folder
from tests.kvmgr.tiers.storages.stored_blocks import (
    BLOCK_BYTES,
    FORMAT,
    block,
    open_disk,
    read,
    reopened,
    token_hash,
    write,
)

OK, ABSENT = ReadOutcome.OK, ReadOutcome.ABSENT
SLOT_BYTES = ALIGNMENT + BLOCK_BYTES


def test_warm_restart(tmp_path: Path) -> None:
    now_s = [100.0]
    storage = open_disk(tmp_path, now_s=lambda: now_s[0])
    storage.recover()
    blocks = [block(slot, slot, used_s=float(slot)) for slot in range(5)]
    write(storage, *blocks)
    storage.touch([0, 9])
    storage.forget([4])
    storage.close()
    storage.close()

    storage = open_disk(tmp_path)
    expected = [blocks[0]._replace(used_s=100.0), blocks[3], blocks[2], blocks[1]]
    assert list(storage.recover()) == expected
    assert read(storage, *blocks) == [OK] * 4 + [ABSENT]
    storage.check()
    storage.close()


def test_touches_reach_the_catalogue_with_later_reads(tmp_path: Path) -> None:
    now_s = [100.0]
    storage = open_disk(tmp_path, now_s=lambda: now_s[0])
    storage.recover()
    write(storage, block(0, 0))
    storage.touch([0])
    used_s = "SELECT used_s FROM blocks"
    with sqlite3.connect(tmp_path / CATALOGUE_FILE) as catalogue:
        read(storage, block(0, 0))
        assert catalogue.execute(used_s).fetchall() == [(1.0,)]
        now_s[0] += 2
        read(storage, block(0, 0))
        assert catalogue.execute(used_s).fetchall() == [(100.0,)]
    catalogue.close()
    storage.close()


def test_what_was_cleared_is_gone_after_kill_9(tmp_path: Path) -> None:
    make_folder(tmp_path / "kv")
    storage = open_disk(tmp_path / "kv", block_format=DETAILED)
    tier = KVTier(Tier.NVME, RadixIndex(BLOCK_TOKENS), FreeListPool(16, BLOCK_TOKENS), storage)
    assert tier.recover(block_hash) == 10
    assert tier.clear() == 10
    shutil.copytree(tmp_path / "kv", tmp_path / "as it was")
    storage.close()
    storage = open_disk(tmp_path / "as it was", block_format=DETAILED)
    assert storage.recover() == []
    storage.close()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"block_format": BlockFormat(b"other weights...", BLOCK_BYTES)}, "another format"),
        ({"block_format": BlockFormat(FORMAT.digest, 2 * BLOCK_BYTES)}, "another block size"),
    ],
)
def test_another_format_resets_the_slab(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any], reason: str
) -> None:
    storage = open_disk(tmp_path)
    storage.recover()
    write(storage, *(block(slot, slot) for slot in range(16)))
    storage.close()
    storage = open_disk(tmp_path, **options)
    assert storage.recover() == []
    assert [record.getMessage() for record in caplog.records if reason in record.getMessage()]
    assert not any((tmp_path / SLAB_FILE).read_bytes())
    storage.check()
    storage.close()


def test_an_older_version_resets_the_slab(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage = open_disk(tmp_path)
    storage.recover()
    write(storage, block(0, 0))
    storage.close()
    with sqlite3.connect(tmp_path / CATALOGUE_FILE) as catalogue:
        catalogue.execute("UPDATE format SET version = 0")
    catalogue.close()
    storage = open_disk(tmp_path)
    assert storage.recover() == []
    assert "another format version" in caplog.text
    storage.close()


@pytest.mark.parametrize("damage", ["no database", "other tables", "no rows"])
def test_a_damaged_catalogue_starts_empty(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    storage = open_disk(tmp_path)
    storage.recover()
    write(storage, block(0, 0), block(1, 1))
    storage.close()
    if damage == "no database":
        (tmp_path / CATALOGUE_FILE).write_bytes(b"no database" * 1000)
    else:
        statement = {
            "other tables": "ALTER TABLE format DROP COLUMN digest",
            "no rows": "DELETE FROM format",
        }[damage]
        with sqlite3.connect(tmp_path / CATALOGUE_FILE) as catalogue:
            catalogue.execute(statement)
        catalogue.close()
    storage = open_disk(tmp_path)
    assert storage.recover() == []
    assert read(storage, block(0, 0)) == [ABSENT]
    write(storage, block(0, 7))
    storage.check()
    storage = reopened(storage, tmp_path)
    assert read(storage, block(0, 7)) == [OK]
    storage.close()
    assert (tmp_path / CATALOGUE_FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "damage",
    [
        "token_hash = NULL", "token_hash = 'text'", "parent = 5", "parent = NULL", "namespace = NULL",
        "namespace = '[1'", "namespace = x'ff'", "namespace = CAST(x'5b22ff225d' AS TEXT)",
        """namespace = '["\\ud800", "", "", ""]'""", "tokens = NULL", "tokens = 'text'", "used_s = NULL",
        "used_s = 'text'", "used_s = 1e999", "num_bytes = NULL", "num_bytes = 0.5",
        "num_bytes = 'text'", "num_bytes = -1",
    ],
)  # fmt: skip
def test_a_damaged_row_is_dropped_and_no_other(tmp_path: Path, damage: str) -> None:
    storage = open_disk(tmp_path)
    storage.recover()
    write(storage, block(0, 0), block(1, 1))
    storage.close()
    with sqlite3.connect(tmp_path / CATALOGUE_FILE) as catalogue:
        catalogue.execute(f"UPDATE blocks SET {damage} WHERE slot = 1")
    catalogue.close()
    storage = open_disk(tmp_path)
    assert list(storage.recover()) == [block(0, 0)]
    storage.check()
    write(storage, block(1, 2))
    storage = reopened(storage, tmp_path)
    assert read(storage, block(0, 0), block(1, 2)) == [OK, OK]
    storage.check()
    storage.close()


def test_rows_that_cannot_be_right_are_dropped(tmp_path: Path) -> None:
    storage = open_disk(tmp_path)
    storage.recover()
    write(storage, *(block(slot, slot) for slot in range(4)))
    storage.close()
    with sqlite3.connect(tmp_path / CATALOGUE_FILE) as catalogue:
        catalogue.execute("UPDATE blocks SET slot = 99 WHERE slot = 0")
        catalogue.execute("UPDATE blocks SET slot = -1 WHERE slot = 1")
        catalogue.execute("UPDATE blocks SET token_hash = ?, used_s = 0 WHERE slot = 2", (token_hash(3),))
    catalogue.close()
    storage = open_disk(tmp_path)
    assert list(storage.recover()) == [block(3, 3)]
    storage.check()
    storage.close()


def test_rows_behind_a_truncated_slab_are_dropped(tmp_path: Path) -> None:
    storage = open_disk(tmp_path)
    storage.recover()
    blocks = [block(slot, slot) for slot in range(4)]
    write(storage, *blocks)
    storage.close()
    os.truncate(tmp_path / SLAB_FILE, 3 * SLOT_BYTES - 1)
    storage = open_disk(tmp_path)
    assert list(storage.recover()) == blocks[:2]
    assert read(storage, *blocks) == [OK, OK, ABSENT, ABSENT]
    storage.check()
    storage.close()


def test_another_size_keeps_what_fits(tmp_path: Path) -> None:
    storage = open_disk(tmp_path, 4)
    storage.recover()
    blocks = [block(slot, slot) for slot in range(4)]
    write(storage, *blocks)
    storage = reopened(storage, tmp_path, num_slots=8)
    assert read(storage, *blocks) == [OK] * 4
    write(storage, block(7, 7))
    storage.close()
    storage = open_disk(tmp_path, 2)
    assert list(storage.recover()) == blocks[:2]
    assert (tmp_path / SLAB_FILE).stat().st_size == 2 * SLOT_BYTES
    storage.check()
    storage.close()


def test_a_stale_catalogue_never_gives_a_wrong_block(tmp_path: Path) -> None:
    folder, old = tmp_path / "tier", tmp_path / "old"
    storage = open_disk(folder)
    storage.recover()
    blocks = [block(slot, slot) for slot in range(4)]
    write(storage, *blocks)
    storage.close()
    shutil.copy(folder / CATALOGUE_FILE, old)
    storage = reopened(storage, folder)
    write(storage, block(0, 10), block(1, 11))
    storage.close()
    shutil.copy(old, folder / CATALOGUE_FILE)
    storage = open_disk(folder)
    assert set(storage.recover()) == set(blocks)
    assert read(storage, *blocks) == [ReadOutcome.OTHER_TOKENS] * 2 + [OK] * 2
    storage.close()


def test_the_slab_of_another_folder(tmp_path: Path) -> None:
    for name, first in (("a", 0), ("b", 100)):
        storage = open_disk(tmp_path / name)
        storage.recover()
        write(storage, *(block(slot, first + slot) for slot in range(4)))
        storage.close()
    shutil.copy(tmp_path / "b" / SLAB_FILE, tmp_path / "a" / SLAB_FILE)
    storage = open_disk(tmp_path / "a")
    blocks = [block(slot, slot) for slot in range(4)]
    assert set(storage.recover()) == set(blocks)
    assert read(storage, *blocks) == [ReadOutcome.OTHER_TOKENS] * 4
    storage.close()
