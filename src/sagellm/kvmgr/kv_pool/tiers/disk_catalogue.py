"""`DiskCatalogue`: which block is in which slot of a slab, in SQLite, across restarts."""

from __future__ import annotations

import errno
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from sagellm.core.errors import ConfigError
from sagellm.core.protocols.kv_tiers import FORMAT_VERSION, BlockFormat, StoredBlock
from sagellm.core.types import Namespace

_SCHEMA = (
    "CREATE TABLE format (version INTEGER, digest BLOB, bytes_per_block INTEGER, codec TEXT, slots INTEGER)",
    """CREATE TABLE blocks (slot INTEGER PRIMARY KEY, token_hash BLOB, parent BLOB, namespace TEXT,
       tokens BLOB, used_s REAL, num_bytes INTEGER)""",
)
_PAGES_PER_CHECKPOINT = 4000
"""Each checkpoint waits for the disk: a commit takes half as long on average as with 1000."""
_UNUSABLE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}
"""A damaged file, no database, or tables of another form: the catalogue starts anew."""
_ERRNO = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_CANTOPEN: errno.EACCES,
    sqlite3.SQLITE_PERM: errno.EACCES,
}


class CatalogueRow(NamedTuple):
    """A stored block and the bytes that it takes behind its header."""

    block: StoredBlock
    num_bytes: int


class DiskCatalogue:
    """Rows of stored blocks, and one row of their format.

    `reset_reason`: why what was there before could not be used, or empty. `slots_with_row` are the slots that
    have a row. Threads may use it one at a time. Errors of the database raise `OSError`.

    WAL with synchronous=NORMAL: a commit outlives the process at once. After a loss of power the last
    commits may be missing, and what is left is consistent.
    """

    def __init__(self, path: Path, block_format: BlockFormat) -> None:
        self.reset_reason = ""
        self.slots_with_row: set[int] = set()
        self._path = path
        self._format = block_format
        with _as_os_error(path):
            self._db = self._open()

    def rows(self) -> list[CatalogueRow]:
        """All rows, those used last first. None, and an empty catalogue, where it is damaged."""
        query = "SELECT slot, token_hash, parent, namespace, tokens, used_s, num_bytes FROM blocks"
        with _as_os_error(self._path):
            try:
                rows = [
                    CatalogueRow(StoredBlock(slot, token_hash, parent, _namespace(text), *rest), num_bytes)
                    for slot, token_hash, parent, text, *rest, num_bytes in self._db.execute(
                        f"{query} ORDER BY used_s DESC, slot"
                    )
                ]
            except (sqlite3.DatabaseError, ValueError, TypeError) as error:
                if not _is_unusable(error):
                    raise
                self._start_anew(f"its catalogue is damaged ({error})")
                rows = []
        self.slots_with_row = {row.block.slot for row in rows}
        return rows

    def set_format(self, codec: str, num_slots: int) -> None:
        with _as_os_error(self._path), self._transaction():
            self._db.execute("UPDATE format SET codec = ?, slots = ?", (codec, num_slots))

    def commit(
        self, rows: Iterable[CatalogueRow], cleared: Iterable[int], used_s: Mapping[int, float]
    ) -> None:
        """Clear slots, then set times of last use, then add rows: all or nothing."""
        rows, cleared = list(rows), list(cleared)
        with _as_os_error(self._path), self._transaction():
            execute = self._db.executemany
            execute("DELETE FROM blocks WHERE slot = ?", ((slot,) for slot in cleared))
            execute(
                "UPDATE blocks SET used_s = ? WHERE slot = ?", ((at, slot) for slot, at in used_s.items())
            )
            execute(
                "REPLACE INTO blocks (slot, token_hash, parent, namespace, tokens, used_s, num_bytes) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    (
                        block.slot,
                        block.token_hash,
                        block.parent,
                        json.dumps(block.namespace),
                        *block[4:],
                        size,
                    )
                    for block, size in rows
                ),
            )
        self.slots_with_row.difference_update(cleared)
        self.slots_with_row.update(block.slot for block, _ in rows)

    def close(self) -> None:
        with _as_os_error(self._path):
            self._db.close()

    # -- inside

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _open(self) -> sqlite3.Connection:
        db = self._connect()
        try:
            reason = self._mismatch(db)
        except sqlite3.DatabaseError as error:
            if not _is_unusable(error):
                db.close()
                raise
            reason = f"its catalogue is damaged or of another version ({error})"
        if not reason:
            return db
        db.close()
        return self._anew(reason)

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)

    def _mismatch(self, db: sqlite3.Connection) -> str:
        """How the blocks of this catalogue differ from ours; empty where they do not. Makes the tables."""
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute(f"PRAGMA wal_autocheckpoint = {_PAGES_PER_CHECKPOINT}")
        ours = (FORMAT_VERSION, self._format.digest, self._format.bytes_per_block)
        if not db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
            db.execute("BEGIN IMMEDIATE")
            for statement in _SCHEMA:
                db.execute(statement)
            db.execute("INSERT INTO format VALUES (?, ?, ?, '', 0)", ours)
            db.execute("COMMIT")
            return ""
        found = db.execute("SELECT version, digest, bytes_per_block FROM format").fetchone()
        if found is None:
            return "its catalogue names no format"
        for name, theirs, expected in zip(
            ("format version", "format", "block size"), found, ours, strict=True
        ):
            if theirs != expected:
                return f"it holds blocks of another {name}: {_text(theirs)}, not {_text(expected)}"
        return ""

    def _start_anew(self, reason: str) -> None:
        self._db.close()
        self._db = self._anew(reason)

    def _anew(self, reason: str) -> sqlite3.Connection:
        """An empty catalogue in place of the one that is there."""
        self.reset_reason = reason
        for suffix in ("-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        with self._path.open("r+b") as file:  # keeps its mode
            file.truncate(0)
        db = self._connect()
        self._mismatch(db)
        return db


def stored_blocks(path: Path) -> list[StoredBlock]:
    """The blocks in a catalogue, those used last first.

    Only reads; a server may be using it. Raises `ConfigError` for a file that is no catalogue, or none.
    """
    query = (
        "SELECT slot, token_hash, parent, namespace, tokens, used_s FROM blocks ORDER BY used_s DESC, slot"
    )
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            return [
                StoredBlock(slot, token_hash, parent, _namespace(text), *rest)
                for slot, token_hash, parent, text, *rest in db.execute(query)
            ]
    except (sqlite3.Error, ValueError, TypeError) as error:
        raise ConfigError(f"{path} is no catalogue of a disk tier: {error}; name a kv.dir") from error


@contextmanager
def _as_os_error(path: Path) -> Iterator[None]:
    """Errors of SQLite as `OSError`, with the number that fits best."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        raise OSError(_ERRNO.get(code, errno.EIO), str(error), str(path)) from error


def _is_unusable(error: Exception) -> bool:
    """Whether the content is at fault, and not the disk."""
    if not isinstance(error, sqlite3.Error):
        return True
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _UNUSABLE


def _namespace(text: str) -> Namespace:
    tenant, model, adapter, kv_dtype = json.loads(text)
    return Namespace(tenant, model, adapter, kv_dtype)


def _text(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
