"""`export_blocks` and `import_blocks`: between a disk tier's folder and a portable file."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from sagellm.core.errors import ConfigError, KVDataError
from sagellm.core.protocols.kv_tiers import BlockFormat, BlockHash, ReadOutcome
from sagellm.kvmgr.kv_pool.tiers.block_file import BlockFileReader, BlockFileWriter, FileBlock
from sagellm.kvmgr.kv_pool.tiers.disk import CATALOGUE_FILE, DEFAULT_SPACE
from sagellm.kvmgr.kv_pool.tiers.disk_blocks import RAW, verdict
from sagellm.kvmgr.kv_pool.tiers.disk_catalogue import CatalogueRow, DiskCatalogue
from sagellm.kvmgr.kv_pool.tiers.disk_folder import LOCK_FILE, OwnedFolder
from sagellm.kvmgr.kv_pool.tiers.disk_reader import BlockLink, FolderReader, depths
from sagellm.kvmgr.kv_pool.tiers.disk_slab import ALIGNMENT, Slab, aligned, aligned_buffer, slot_bytes
from sagellm.kvmgr.kv_pool.tiers.disk_verify import NO_PREFIX

PRESENT = "present"
"""The folder has the block; it stays as it is."""
NO_ROOM = "no_room"
"""No slot is free; nothing is evicted for an import."""
CHANGED = "changed"
"""A server replaced the block while it was exported."""
GROWTH_BYTES = 64 << 20
"""Of a new folder, at least."""
_ROWS_PER_COMMIT = 64
_MAX_SHOWN = 80

Progress = Callable[[int, int], None]
"""Gets the blocks done and their total."""


@dataclass(slots=True)
class CopyReport:
    """`num_blocks` blocks of `num_bytes` bytes, as stored, were written; others were `skipped`, by cause."""

    num_blocks: int = 0
    num_bytes: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    codec: str = RAW


def export_blocks(
    reader: FolderReader, file: BinaryIO, block_hash: BlockHash, progress: Progress = lambda done, total: None
) -> CopyReport:
    """Write the blocks whose whole prefix is there and verifies.

    Those that were used last come first, each behind its prefix, so an import into a small folder takes them.
    """
    links = reader.links()
    depth = depths(links)
    total = sum(map(bool, depth.values()))
    writer = BlockFileWriter(file, reader.format, reader.codec, reader.token_bytes, total)
    report, written = CopyReport(codec=reader.codec), set[bytes]()
    report.skipped[NO_PREFIX] += len(links) - total
    for number, (token_hash, slot) in enumerate(_in_order(links, depth), 1):
        row = reader.row(slot)
        if row is None or row.block.token_hash != token_hash:
            report.skipped[CHANGED] += 1
        elif row.block.parent and row.block.parent not in written:
            report.skipped[NO_PREFIX] += 1
        elif len(row.block.tokens) != reader.token_bytes or block_hash(row.block) != token_hash:
            report.skipped[ReadOutcome.OTHER_TOKENS.value] += 1
        else:
            read = reader.read(row)
            if read is None or read.outcome is not ReadOutcome.OK:
                report.skipped[CHANGED if read is None else read.outcome.value] += 1
            else:
                writer.write(row.block, read.header, read.payload)
                written.add(token_hash)
                report.num_bytes += row.num_bytes
        progress(number, total)
    writer.finish()
    report.num_blocks = writer.num_blocks
    return report


def _in_order(links: dict[bytes, BlockLink], depth: dict[bytes, int]) -> Iterator[tuple[bytes, int]]:
    """Hash and slot of blocks with a whole prefix, used last first, behind it."""
    emitted = set[bytes]()
    for start in sorted(links, key=lambda token_hash: -links[token_hash].used_s):
        path, at = [], start
        while depth.get(at) and at not in emitted:
            emitted.add(at)
            path.append(at)
            at = links[at].parent
        for token_hash in reversed(path):
            yield token_hash, links[token_hash].slot


def import_blocks(
    source: BlockFileReader,
    path: Path,
    block_hash: BlockHash,
    num_slots: int = 0,
    progress: Progress = lambda done, total: None,
) -> CopyReport:
    """Write the blocks of a file to free slots of a folder.

    Each is verified, and behind its prefix. The folder is made if it is missing, with `num_slots` slots, or
    grows with the blocks that come. It grows to `num_slots` and never shrinks. What it holds stays. Raises
    `ConfigError` for a folder that a server uses or that holds something else; `KVDataError` for one with
    blocks of another format, and where the file is damaged: then the blocks before that place are imported;
    `OSError`.
    """
    if (
        path.is_dir()
        and not (path / CATALOGUE_FILE).exists()
        and {each.name for each in path.iterdir()} - {LOCK_FILE}
    ):
        raise ConfigError(f"{path} holds other files and no KV blocks: name an empty folder, or a new one")
    with closing(OwnedFolder(path)) as folder, closing(_Target(source, folder, num_slots)) as target:
        for found in source.blocks():
            target.take(found, block_hash)
            progress(source.num_read + 1, max(source.num_blocks, source.num_read + 1))
        return target.report


class _Target:
    """The folder that blocks are written to, until `close` commits the last of them."""

    def __init__(self, source: BlockFileReader, folder: OwnedFolder, num_slots: int) -> None:
        self._format, self._token_bytes = source.format, source.token_bytes
        self._namespace_of: dict[bytes, str] = {}
        used, codec = set[int](), source.codec
        if (folder.path / CATALOGUE_FILE).exists():
            with closing(FolderReader(folder.path)) as reader:
                codec = self._codec_of_both(reader, source)
                links = reader.links()
                whole = depths(links)
                self._namespace_of = {key: link.namespace for key, link in links.items() if whole[key]}
                used = {slot for slot, _ in reader.rows()}
                num_slots = max(num_slots, reader.num_slots)
        self.report = CopyReport(codec=codec)
        with ExitStack() as opened:
            for suffix in ("-wal", "-shm"):
                folder.refuse_symlink(CATALOGUE_FILE + suffix)
            os.close(folder.open(CATALOGUE_FILE))  # SQLite keeps the mode of the file
            self._catalogue = DiskCatalogue(folder.path / CATALOGUE_FILE, source.format)
            opened.callback(self._catalogue.close)
            block_bytes = source.format.bytes_per_block
            self._growth = max(1, GROWTH_BYTES // slot_bytes(block_bytes))
            self._most = num_slots or max(1, source.num_blocks)
            wanted = num_slots or min(self._growth, self._most)
            self._slab = Slab(folder, block_bytes, wanted, DEFAULT_SPACE, os)
            opened.callback(self._slab.close)
            self._catalogue.set_format(codec, self._slab.num_slots)
            self._resources = opened.pop_all()
        self._free = iter([slot for slot in range(self._slab.num_slots) if slot not in used])
        self._free_slot: int | None = None
        self._buffer = aligned_buffer(self._slab.slot_bytes)
        self._rows: list[CatalogueRow] = []

    def take(self, found: FileBlock, block_hash: BlockHash) -> None:
        """Write a block, or count why not."""
        block = found.block
        if cause := self._refusal(found, block_hash):
            self.report.skipped[cause] += 1
            return
        slot = self._free_slot
        assert slot is not None
        num_bytes = len(found.payload)
        page = self._buffer[:ALIGNMENT]
        page[:] = found.header_bytes.ljust(ALIGNMENT, b"\0")
        self._buffer[ALIGNMENT : ALIGNMENT + num_bytes] = found.payload
        self._slab.write(slot, [self._buffer[: ALIGNMENT + aligned(num_bytes)]])
        self._rows.append(CatalogueRow(block._replace(slot=slot), num_bytes))
        self._free_slot = None
        self._namespace_of[block.token_hash] = json.dumps(block.namespace)
        self.report.num_blocks += 1
        self.report.num_bytes += num_bytes
        if len(self._rows) >= _ROWS_PER_COMMIT:
            self._commit()

    def close(self) -> None:
        with self._resources:
            self._commit()

    def _commit(self) -> None:
        self._catalogue.commit(self._rows, [], {})
        self._rows = []

    def _next_free(self) -> int | None:
        """A free slot; None where the folder is as large as it may be.

        A new folder grows by a quarter or `GROWTH_BYTES`: the number of blocks in the head of a file may be
        wrong, and is not known to be until its end.
        """
        first = self._slab.num_slots
        if (slot := next(self._free, None)) is not None or first >= self._most:
            return slot
        self._slab.grow(min(self._most, first + max(self._growth, first // 4)))
        if self._slab.num_slots == first:
            self._most = first  # the disk has no more
            return None
        self._catalogue.set_format(self.report.codec, self._slab.num_slots)
        self._free = iter(range(first, self._slab.num_slots))
        return next(self._free)

    def _refusal(self, found: FileBlock, block_hash: BlockHash) -> str:
        """Why a block is not written; empty if it can be."""
        block, header = found.block, found.header
        if block.token_hash in self._namespace_of:
            return PRESENT
        if self._free_slot is None:
            self._free_slot = self._next_free()
        if self._free_slot is None:
            return NO_ROOM
        if block.parent and self._namespace_of.get(block.parent) != json.dumps(block.namespace):
            return NO_PREFIX
        if len(block.tokens) != self._token_bytes or block_hash(block) != block.token_hash:
            return ReadOutcome.OTHER_TOKENS.value
        outcome = verdict(header, found.payload, self._format, block.token_hash)
        if outcome is not ReadOutcome.OK:
            return str(outcome.value)
        if header.codec not in (RAW, self.report.codec):
            return ReadOutcome.UNKNOWN_CODEC.value
        return ""

    def _codec_of_both(self, reader: FolderReader, source: BlockFileReader) -> str:
        """The codec that a server needs for folder and file."""
        if reader.format != source.format:
            raise KVDataError(
                f"{source.name} holds KV of another format than {reader.path}: "
                f"{_differences(source.format, reader.format)}. Import it into a new folder"
            )
        if RAW in (source.codec, reader.codec) or source.codec == reader.codec:
            return source.codec if reader.codec == RAW else reader.codec
        raise KVDataError(
            f"{source.name} has blocks stored as {source.codec}, {reader.path} as {reader.codec}, and no "
            f"server reads both. Import it into a new folder"
        )


def _differences(theirs: BlockFormat, ours: BlockFormat) -> str:
    """What is known of how two formats differ."""
    differing = [
        f"{name.replace('_', ' ')} {value[:_MAX_SHOWN]}, here {ours.details[name][:_MAX_SHOWN]}"
        for name, value in theirs.details.items()
        if ours.details.get(name, value) != value
    ]
    if theirs.bytes_per_block != ours.bytes_per_block:
        differing.append(f"blocks of {theirs.bytes_per_block:,} bytes, here {ours.bytes_per_block:,}")
    return "; ".join(differing) or "weights, tokenizer, dtype, layout or block size (not recorded which)"
