"""`verify_folder` and `export_blocks` beside a server that writes: no false alarm, no wrong block."""

from __future__ import annotations

import io
import random
import threading
from contextlib import closing
from pathlib import Path

from sagellm.core.protocols.kv_tiers import ReadOutcome
from sagellm.kvmgr.kv_pool.tiers.block_file import BlockFileReader
from sagellm.kvmgr.kv_pool.tiers.disk_reader import FolderReader
from sagellm.kvmgr.kv_pool.tiers.disk_transfer import export_blocks
from sagellm.kvmgr.kv_pool.tiers.disk_verify import verify_folder
from sagellm.kvmgr.prefix_cache.fingerprint import block_hash
from tests.kvmgr.tiers.storages.chained_folder import DETAILED, path_blocks
from tests.kvmgr.tiers.storages.stored_blocks import open_disk, payload, write


def test_a_server_that_writes_gives_no_false_alarm(tmp_path: Path) -> None:
    storage = open_disk(tmp_path / "kv", 12, block_format=DETAILED)
    storage.recover()
    first = [path_blocks("a", [10 * k, 10 * k + 1, 10 * k + 2], slot=3 * k)[0:3] for k in range(4)]
    for path in first:
        write(storage, *path)
    ends = threading.Event()

    def rewrite() -> None:
        """Replace whole paths, and repair blocks in place, as tiers do."""
        rng, number = random.Random(0), 100
        while not ends.is_set():
            place = rng.randrange(4)
            if rng.random() < 0.5:
                write(storage, rng.choice(first[place]))
            else:
                storage.forget(range(3 * place, 3 * place + 3))
                first[place] = path_blocks("a", [number, number + 1, number + 2], slot=3 * place)
                write(storage, *first[place])
                number += 3

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        with closing(FolderReader(tmp_path / "kv")) as reader:
            for _ in range(30):
                causes = verify_folder(reader, block_hash).causes
                assert causes.keys() <= {"no_prefix"}, causes
                file = io.BytesIO()
                export_blocks(reader, file, block_hash)
                file.seek(0)
                for found in BlockFileReader(file, "file").blocks():
                    assert bytes(found.payload) == payload(found.block.token_hash)
    finally:
        ends.set()
        writer.join()
    storage.check()
    storage.close()
    with closing(FolderReader(tmp_path / "kv")) as reader:
        assert not verify_folder(reader, block_hash).bad


def test_blocks_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    storage = open_disk(tmp_path / "kv", 4, block_format=DETAILED)
    storage.recover()
    write(storage, *path_blocks("a", [1, 2]))
    storage.close()
    with closing(FolderReader(tmp_path / "kv")) as reader:
        row = next(row for _, row in reader.rows() if row is not None)
        beyond = row._replace(block=row.block._replace(slot=1 << 61))
        read = reader._read(beyond)
    assert read.outcome in (ReadOutcome.IO_ERROR, ReadOutcome.ABSENT)
