"""Portable files of KV blocks: whatever is cut or flipped, no wrong block enters a folder."""

from __future__ import annotations

import errno
import io
import os
import random
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.core.errors import KVDataError
from sagellm.core.protocols.kv_tiers import ReadOutcome
from sagellm.kvmgr.kv_pool.tiers import disk_transfer
from sagellm.kvmgr.kv_pool.tiers.block_file import BlockFileReader
from sagellm.kvmgr.kv_pool.tiers.disk_reader import BlockLink, FolderReader, depths
from sagellm.kvmgr.kv_pool.tiers.disk_slab import ALIGNMENT, SLAB_FILE, FreeSpace
from sagellm.kvmgr.kv_pool.tiers.disk_transfer import export_blocks, import_blocks
from sagellm.kvmgr.prefix_cache.fingerprint import block_hash
from tests.kvmgr.tiers.storages.chained_folder import DETAILED, make_folder, path_blocks, two_tenants
from tests.kvmgr.tiers.storages.stored_blocks import BLOCK_BYTES, open_disk, read


def exported(folder: Path) -> bytes:
    make_folder(folder)
    file = io.BytesIO()
    with closing(FolderReader(folder)) as reader:
        export_blocks(reader, file, block_hash)
    return file.getvalue()


def imported(data: bytes, folder: Path, num_slots: int = 16) -> int:
    """How many blocks a new folder has after an import; each is one of those that were exported."""
    error = None
    try:
        import_blocks(BlockFileReader(io.BytesIO(data), "file"), folder, block_hash)
    except KVDataError as raised:
        error = raised
    if not folder.exists():
        assert error is not None
        return 0
    with closing(FolderReader(folder)) as reader:
        block_format = reader.format
    storage = open_disk(folder, num_slots, block_format=block_format)
    blocks = storage.recover()
    known = {(block.token_hash, block.parent, block.tokens, block.namespace) for block in two_tenants()}
    assert {(block.token_hash, block.parent, block.tokens, block.namespace) for block in blocks} <= known
    assert read(storage, *blocks) == [ReadOutcome.OK] * len(blocks)
    storage.check()
    storage.close()
    return len(blocks)


def test_parents_come_first_and_the_paths_used_last(tmp_path: Path) -> None:
    seen: list[bytes] = []
    for found in BlockFileReader(io.BytesIO(exported(tmp_path / "kv")), "file").blocks():
        assert not found.block.parent or found.block.parent in seen
        seen.append(found.block.token_hash)
    by_hash = {block.token_hash: block for block in two_tenants()}
    assert [by_hash[each].used_s for each in seen] == [1000.0] * 2 + [2000.0] * 2 + [1500.0] * 4 + [
        1000.0
    ] * 2


def test_every_cut_is_seen(tmp_path: Path) -> None:
    data = exported(tmp_path / "kv")
    rng = random.Random(0)
    cuts = [0, 7, 8, 10, 300, len(data) - 1, len(data) - 8, len(data) - 12, *rng.sample(range(len(data)), 20)]
    for cut in cuts:
        with pytest.raises(KVDataError, match="export"):
            list(BlockFileReader(io.BytesIO(data[:cut]), "file").blocks())
        assert imported(data[:cut], tmp_path / f"cut {cut}") <= 10


def test_flipped_bits_never_make_a_block(tmp_path: Path) -> None:
    data = exported(tmp_path / "kv")
    rng = random.Random(1)
    heads = [place for place in range(len(data)) if data[place : place + 8] == b"sageKVb1"]
    places = [*range(0, 60, 4), *rng.sample(range(len(data)), 20)]
    places += [start + rng.randrange(-150, 512) for start in heads for _ in range(3)]
    counts: list[int] = []
    for place in places:
        damaged = bytearray(data)
        damaged[place] ^= 1 << rng.randrange(8)
        counts.append(imported(bytes(damaged), tmp_path / f"flip {len(counts)}"))
    assert min(counts) < 10


@pytest.mark.parametrize(
    "head",
    [b"[]", b"{}", b"[" * 100_000, b'{"format_version": 1}', b"\xff", b"1" * 5000],
)
def test_a_head_of_nonsense(head: bytes) -> None:
    data = b"sageKVf1" + len(head).to_bytes(4, "little") + head
    with pytest.raises(KVDataError, match="is damaged behind 0 whole blocks"):
        BlockFileReader(io.BytesIO(data), "file")


def test_a_file_that_claims_more_memory_than_there_is(tmp_path: Path) -> None:
    data = exported(tmp_path / "kv")
    head_bytes = int.from_bytes(data[8:12], "little")
    head = data[12 : 12 + head_bytes].replace(b": 8192", b": 8192000000000")
    with pytest.raises(KVDataError, match="is damaged"):
        BlockFileReader(io.BytesIO(data[:8] + len(head).to_bytes(4, "little") + head), "file")
    with pytest.raises(KVDataError, match="is damaged"):
        BlockFileReader(io.BytesIO(data[:8] + b"\xff" * 4), "file")


@pytest.mark.parametrize(("claimed", "num_slots"), [(10, 10), (10**12, 12), (4, 4)])
def test_a_new_folder_grows_with_the_blocks_that_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, claimed: int, num_slots: int
) -> None:
    """Whatever the head of the file says."""
    slot_bytes = ALIGNMENT + BLOCK_BYTES
    monkeypatch.setattr(disk_transfer, "GROWTH_BYTES", 3 * slot_bytes)
    data = exported(tmp_path / "kv")
    head_bytes = int.from_bytes(data[8:12], "little")
    head = data[12 : 12 + head_bytes].replace(b'"num_blocks": 10', b'"num_blocks": %d' % claimed)
    data = data[:8] + len(head).to_bytes(4, "little") + head + data[12 + head_bytes :]
    assert imported(data, tmp_path / "new", num_slots) == min(claimed, 10)
    assert (tmp_path / "new" / SLAB_FILE).stat().st_size == num_slots * slot_bytes


def test_a_full_disk_ends_the_growth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slot_bytes = ALIGNMENT + BLOCK_BYTES
    monkeypatch.setattr(disk_transfer, "GROWTH_BYTES", 3 * slot_bytes)
    data = exported(tmp_path / "kv")

    def usable(self: FreeSpace, fd: int) -> int:
        return 4 * slot_bytes - os.fstat(fd).st_size

    monkeypatch.setattr(FreeSpace, "usable", usable)
    report = import_blocks(BlockFileReader(io.BytesIO(data), "file"), tmp_path / "new", block_hash)
    assert report.num_blocks == 4
    assert report.skipped[disk_transfer.NO_ROOM] == 6


def test_an_import_on_a_full_disk_cuts_no_stored_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the file system preallocates no space, most of the slab may have none."""

    def unsupported(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "no")

    data = exported(tmp_path / "kv")
    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    there = make_folder(tmp_path / "sparse", path_blocks("c", [9], slot=15))
    monkeypatch.setattr(FreeSpace, "usable", lambda self, fd: 0)
    with pytest.raises(OSError, match="free space"):
        import_blocks(BlockFileReader(io.BytesIO(data), "file"), tmp_path / "sparse", block_hash)
    storage = open_disk(tmp_path / "sparse", 16, block_format=DETAILED)
    assert storage.recover() == there
    assert read(storage, *there) == [ReadOutcome.OK]
    storage.close()


def _naive_depth(links: dict[bytes, BlockLink], token_hash: bytes) -> int:
    """The slow twin of `depths`: walks up from each block."""
    num_blocks = 0
    while num_blocks <= len(links):
        num_blocks += 1
        link = links[token_hash]
        if not link.parent:
            return num_blocks
        above = links.get(link.parent)
        if above is None or above.namespace != link.namespace:
            return 0
        token_hash = link.parent
    return 0


@given(
    st.lists(st.tuples(st.integers(0, 12), st.sampled_from("ab")), max_size=12),
    st.randoms(use_true_random=False),
)
def test_depths_are_those_of_the_slow_twin(rows: list[tuple[int, str]], rng: random.Random) -> None:
    names = [bytes([number]) for number in range(1, len(rows) + 1)]
    links = {
        name: BlockLink(0, bytes([parent]) if parent else b"", namespace, 0.0, 1)
        for name, (parent, namespace) in zip(names, rows, strict=True)
    }
    assert depths(links) == {name: _naive_depth(links, name) for name in links}


def test_depths_take_linear_time() -> None:
    """A path of 200,000 blocks, from its end: a walk for each would take hours."""
    names = [number.to_bytes(4, "little") for number in range(1, 200_001)]
    links = {
        name: BlockLink(0, parent, "", 0.0, 1) for name, parent in zip(names, [b"", *names[:-1]], strict=True)
    }
    assert depths(dict(reversed(links.items())))[names[-1]] == 200_000


def test_the_format_of_files_and_folders(tmp_path: Path) -> None:
    reader = BlockFileReader(io.BytesIO(exported(tmp_path / "kv")), "file")
    assert reader.format == DETAILED
    assert reader.format.details == DETAILED.details
    assert (reader.codec, reader.num_blocks, reader.token_bytes) == ("raw", 10, 16)
