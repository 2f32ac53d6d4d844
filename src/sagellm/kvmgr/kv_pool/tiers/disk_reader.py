"""`FolderReader`: the blocks in a disk tier's folder, read without owning it.

A server may use the folder meanwhile: SQLite's WAL gives each query the last commit, and a block that does
not verify counts only if its row is still the same.
"""

from __future__ import annotations

import os
import re
import sqlite3
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from sagellm.core.errors import ConfigError, KVDataError
from sagellm.core.protocols.kv_tiers import (
    FORMAT_VERSION,
    HEADER_BYTES,
    BlockFormat,
    BlockHeader,
    ReadOutcome,
)
from sagellm.kvmgr.kv_pool.tiers.disk import CATALOGUE_FILE
from sagellm.kvmgr.kv_pool.tiers.disk_blocks import verdict
from sagellm.kvmgr.kv_pool.tiers.disk_catalogue import ROWS, CatalogueRow, parse_row
from sagellm.kvmgr.kv_pool.tiers.disk_folder import LOCK_FILE, PrivateFolder
from sagellm.kvmgr.kv_pool.tiers.disk_slab import ALIGNMENT, SLAB_FILE, aligned_buffer, slot_bytes

LOCKS = Path("/proc/locks")
MAX_BLOCK_BYTES = 1 << 32
_PAGE_ROWS = 256
_MOST_ATTEMPTS = 3
_NO_BLOCKS = "holds no KV blocks: name the kv.dir of a server that has kv.disk_gb"
_NO_HEADER = bytes(ALIGNMENT)


class BlockLink(NamedTuple):
    """A block in its path. `namespace`: as JSON. `num_bytes`: as stored, without the header."""

    slot: int
    parent: bytes
    namespace: str
    used_s: float
    num_bytes: int


class BlockBytesRead(NamedTuple):
    """A block as it is stored. `header` and `payload` mean something only if the outcome is OK."""

    outcome: ReadOutcome
    header: bytes
    payload: memoryview


class FolderReader:
    """Reads catalogue and slab of a folder from its constructor until `close`.

    The constructor raises `ConfigError` for a folder without KV blocks, of another format version, or that
    is not private. `codec` and `num_slots` are those of the last server. `token_bytes`: of the tokens of a
    block, 0 without any. Methods raise `ConfigError` where the catalogue is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        self._db: sqlite3.Connection | None = None
        with closing(PrivateFolder(path)) as folder:
            try:
                self._open(folder)
            except BaseException:
                self.close()
                raise
        self._buffer = aligned_buffer(self.slot_bytes)

    def close(self) -> None:
        """A second call changes nothing."""
        if self._db is not None:
            self._db.close()
        if self._fd >= 0:
            os.close(self._fd)
        self._db, self._fd = None, -1

    @property
    def slab_bytes(self) -> int:
        """The size of the slab file; 0 without one."""
        return os.fstat(self._fd).st_size if self._fd >= 0 else 0

    @property
    def slot_bytes(self) -> int:
        return slot_bytes(self.format.bytes_per_block)

    def owner(self) -> str:
        """The process that uses the folder now.

        Empty for none, or where the system does not say. Reads Linux' list of locks, since taking the lock to
        find out could refuse a server.
        """
        try:
            lock = (self.path / LOCK_FILE).lstat()
            held = LOCKS.read_text(encoding="ascii", errors="replace")
            written = (self.path / LOCK_FILE).read_text(encoding="ascii", errors="replace").strip()
        except OSError:
            return ""
        device = f"{os.major(lock.st_dev):02x}:{os.minor(lock.st_dev):02x}"
        for pid, at, inode in re.findall(r"FLOCK\s+\S+\s+WRITE\s+(-?\d+)\s+(\S+):(\d+)\s", held):
            if int(inode) == lock.st_ino and (at == device or pid == written):
                return written or pid
        return ""

    # -- the catalogue

    def rows(self) -> Iterator[tuple[int, CatalogueRow | None]]:
        """Slots with their rows, by slot; None for a row that cannot be read.

        Each page of rows is a query of its own, so a server is not held up.
        """
        last = -(1 << 62)
        while page := self._query(f"{ROWS} WHERE slot > ? ORDER BY slot LIMIT ?", last, _PAGE_ROWS):
            for values in page:
                last = values[0]
                yield last, parse_row(*values)

    def row(self, slot: int) -> CatalogueRow | None:
        """The row of a slot now; None for none."""
        found = self._query(f"{ROWS} WHERE slot = ?", slot)
        return parse_row(*found[0]) if found else None

    def num_rows(self) -> int:
        """Slots that hold a block."""
        return int(self._query("SELECT count(*) FROM blocks")[0][0])

    def links(self) -> dict[bytes, BlockLink]:
        """All blocks by their hash, as of one instant.

        Of two with one hash, the one that was used last, as `DiskStorage.recover` chooses.
        """
        links: dict[bytes, BlockLink] = {}
        query = "SELECT token_hash, slot, parent, namespace, used_s, num_bytes FROM blocks"
        for token_hash, slot, parent, namespace, used_s, num_bytes in self._each(query):
            values = token_hash, parent, namespace, used_s, num_bytes
            if not token_hash or tuple(map(type, values)) != (bytes, bytes, str, float, int):
                continue
            link = BlockLink(slot, parent, sys.intern(namespace), used_s, num_bytes)
            other = links.get(token_hash)
            if other is None or (link.used_s, -link.slot) > (other.used_s, -other.slot):
                links[token_hash] = link
        return links

    # -- blocks

    def read(self, row: CatalogueRow) -> BlockBytesRead | None:
        """The block of a row, verified; valid until the next call.

        None if a server has changed the slot meanwhile. Errors of the disk are `IO_ERROR`.
        """
        for _ in range(_MOST_ATTEMPTS):
            found = self._read(row)
            if found.outcome is ReadOutcome.OK:
                return found
            now = self.row(row.block.slot)
            if now is None or now.block.token_hash != row.block.token_hash:
                return None
        return found

    def _read(self, row: CatalogueRow) -> BlockBytesRead:
        block, num_bytes = row
        empty = memoryview(b"")
        if not (block.slot >= 0 and 0 < num_bytes <= self.format.bytes_per_block) or self._fd < 0:
            return BlockBytesRead(ReadOutcome.ABSENT, b"", empty)
        size = ALIGNMENT + num_bytes
        try:
            got = os.preadv(self._fd, [self._buffer[:size]], block.slot * self.slot_bytes)
        except (OSError, OverflowError):
            return BlockBytesRead(ReadOutcome.IO_ERROR, b"", empty)
        if got < size or self._buffer[:ALIGNMENT] == _NO_HEADER:
            return BlockBytesRead(ReadOutcome.ABSENT, b"", empty)
        payload = self._buffer[ALIGNMENT:size]
        try:
            header = BlockHeader.unpack(self._buffer)
        except KVDataError:
            return BlockBytesRead(ReadOutcome.CORRUPT, b"", empty)
        outcome = verdict(header, payload, self.format, block.token_hash)
        if outcome is ReadOutcome.OK and header.num_bytes != num_bytes:
            outcome = ReadOutcome.CORRUPT
        return BlockBytesRead(outcome, bytes(self._buffer[:HEADER_BYTES]), payload)

    # -- inside

    def _open(self, folder: PrivateFolder) -> None:
        for suffix in ("", "-wal", "-shm"):
            folder.refuse_symlink(CATALOGUE_FILE + suffix)
        try:
            os.close(folder.open_to_read(CATALOGUE_FILE))
        except FileNotFoundError as error:
            raise ConfigError(f"{self.path} {_NO_BLOCKS}") from error
        except OSError as error:
            raise ConfigError(f"{self.path / CATALOGUE_FILE}: {error.strerror}") from error
        try:
            self._fd = folder.open_to_read(SLAB_FILE)
        except FileNotFoundError:
            pass  # all blocks are absent then
        except OSError as error:
            raise ConfigError(f"{self.path / SLAB_FILE}: {error.strerror}") from error
        self._db = self._connect()
        self._read_format()

    def _connect(self) -> sqlite3.Connection:
        """A connection that writes nothing.

        SQLite makes a file -shm beside a catalogue that no server uses, so a folder on a read-only disk is
        opened as one that never changes.
        """
        path = self.path / CATALOGUE_FILE
        is_changing = os.access(self.path, os.W_OK) or path.with_name(path.name + "-wal").exists()
        mode = "mode=ro" if is_changing else "immutable=1"
        return sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, isolation_level=None)

    def _read_format(self) -> None:
        version = [version for (version,) in self._query("SELECT version FROM format")]
        if version != [FORMAT_VERSION]:
            found = version[0] if version else "none"
            raise ConfigError(
                f"{self.path} has blocks of format version {found}, and this sagellm reads {FORMAT_VERSION}: "
                f"use the sagellm that wrote them, or empty it with `sagellm cache clear --dir`"
            )
        [(digest, num_bytes, codec, num_slots)] = self._query(
            "SELECT digest, bytes_per_block, codec, slots FROM format"
        )
        is_sound = isinstance(digest, bytes) and isinstance(num_bytes, int) and isinstance(num_slots, int)
        if not is_sound or not 0 < num_bytes <= MAX_BLOCK_BYTES or not isinstance(codec, str):
            raise self._damaged("its format makes no sense")
        details: Mapping[str, str] = {}
        if self._query("SELECT 1 FROM sqlite_master WHERE name = 'format_details'"):
            details = {str(name): str(value) for name, value in self._query("SELECT * FROM format_details")}
        self.format = BlockFormat(digest, num_bytes, details)
        self.codec: str = codec
        self.num_slots: int = num_slots
        first = self._query("SELECT length(tokens) FROM blocks LIMIT 1")
        self.token_bytes = first[0][0] if first and isinstance(first[0][0], int) else 0

    def _query(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        return list(self._each(query, *values))

    def _each(self, query: str, *values: Any) -> Iterator[tuple[Any, ...]]:
        assert self._db is not None
        with self._explained():
            yield from self._db.execute(query, values)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise self._damaged(str(error)) from error

    def _damaged(self, reason: str) -> ConfigError:
        return ConfigError(
            f"{self.path / CATALOGUE_FILE} is no catalogue of KV blocks that can be read ({reason}): empty "
            f"the folder with `sagellm cache clear --dir {self.path}`"
        )


def depths(links: Mapping[bytes, BlockLink]) -> dict[bytes, int]:
    """How many blocks the path up to each block has, by its hash.

    0: a part of its prefix is missing. Linear, also where damaged rows name each other as parents.
    """
    depth: dict[bytes, int] = {}
    for start in links:
        path, at = [], start
        while at in links and at not in depth:
            depth[at] = 0  # ends a cycle
            path.append(at)
            at = links[at].parent
        above, namespace = depth.get(at, 0), links[at].namespace if at in links else ""
        for token_hash in reversed(path):
            link = links[token_hash]
            is_whole = not link.parent or (above > 0 and namespace == link.namespace)
            above, namespace = above + 1 if is_whole else 0, link.namespace
            depth[token_hash] = above
    return depth


def check_folder(path: Path) -> None:
    """Raise `ConfigError` for a folder that is missing, not private, or without a catalogue."""
    with closing(PrivateFolder(path)):
        if not os.path.lexists(path / CATALOGUE_FILE):
            raise ConfigError(f"{path} {_NO_BLOCKS}")


def remove_blocks(path: Path) -> int:
    """Remove slab and catalogue; returns the bytes that are free again.

    The caller holds the lock of the folder. The catalogue, which has the tokens of prompts, goes as well; a
    server makes both anew.
    """
    num_bytes = 0
    for name in (SLAB_FILE, CATALOGUE_FILE, f"{CATALOGUE_FILE}-wal", f"{CATALOGUE_FILE}-shm"):
        if os.path.lexists(path / name):
            num_bytes += (path / name).lstat().st_blocks * 512
            (path / name).unlink()
    return num_bytes
