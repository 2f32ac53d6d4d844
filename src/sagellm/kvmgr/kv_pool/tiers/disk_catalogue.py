"""`DiskCatalogue`: which block is in which slot of a slab, in SQLite, across restarts."""

from __future__ import annotations

import errno
import json
import logging
import math
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from sagellm.core.protocols.kv_tiers import FORMAT_VERSION, BlockFormat, StoredBlock
from sagellm.core.types import Namespace

log = logging.getLogger("sagellm.kv_tiers")
_SCHEMA = (
    "CREATE TABLE format (version INTEGER, digest BLOB, bytes_per_block INTEGER, codec TEXT, slots INTEGER)",
    """CREATE TABLE blocks (slot INTEGER PRIMARY KEY, token_hash BLOB, parent BLOB, namespace TEXT,
       tokens BLOB, used_s REAL, num_bytes INTEGER)""",
)
_DETAILS = "CREATE TABLE IF NOT EXISTS format_details (name TEXT, value TEXT)"
"""What the digest of the format is of, for people; the first catalogues had no such table."""
ROWS = "SELECT slot, token_hash, parent, namespace, tokens, used_s, num_bytes FROM blocks"
"""The arguments of `parse_row`."""
_PAGES_PER_CHECKPOINT = 4000
"""Each checkpoint waits for the disk: a commit takes half as long on average as with 1000."""
_UNUSABLE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_TOOBIG}
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
        """All rows, those used last first. Rows with wrong types are deleted.

        None, and an empty catalogue, where it is damaged as a whole.
        """
        with _as_os_error(self._path):
            try:
                rows = self._sound_rows()
            except (sqlite3.DatabaseError, ValueError) as error:
                if not _is_unusable(error):
                    raise
                self._start_anew(f"its catalogue is damaged ({error})")
                rows = []
        self.slots_with_row = {row.block.slot for row in rows}
        return sorted(rows, key=lambda row: (-row.block.used_s, row.block.slot))

    def set_format(self, codec: str, num_slots: int) -> None:
        with _as_os_error(self._path), self._transaction():
            self._db.execute("UPDATE format SET codec = ?, slots = ?", (codec, num_slots))
            if self._format.details:
                self._db.execute(_DETAILS)
                self._db.execute("DELETE FROM format_details")
                self._db.executemany("INSERT INTO format_details VALUES (?, ?)", self._format.details.items())

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

    def _sound_rows(self) -> list[CatalogueRow]:
        """Rows by slot. Raises `ValueError` where SQLite would not find a row by its slot."""
        found = self._db.execute(f"{ROWS} ORDER BY slot").fetchall()
        slots = [values[0] for values in found]
        if any(slot >= after for slot, after in pairwise(slots)):
            raise ValueError("its rows are not in order")
        rows = [parse_row(*values) for values in found]
        if None in rows:
            damaged = [slot for slot, row in zip(slots, rows, strict=True) if row is None]
            log.warning("%s: dropped %d damaged rows", self._path, len(damaged))
            with self._transaction():
                self._db.executemany("DELETE FROM blocks WHERE slot = ?", ((slot,) for slot in damaged))
        return [row for row in rows if row is not None]

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
        db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        db.text_factory = partial(str, encoding="utf-8", errors="surrogateescape")  # damaged text is none
        return db

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


def parse_row(
    slot: int, token_hash: Any, parent: Any, namespace: Any, tokens: Any, used_s: Any, num_bytes: Any
) -> CatalogueRow | None:
    """The values of a row. None where types are wrong or they make no sense."""
    values = token_hash, parent, namespace, tokens, used_s, num_bytes
    if not token_hash or tuple(map(type, values)) != (bytes, bytes, str, bytes, float, int):
        return None
    if not math.isfinite(used_s):
        return None
    try:
        block = StoredBlock(slot, token_hash, parent, parse_namespace(namespace), tokens, used_s)
    except ValueError:
        return None
    return CatalogueRow(block, num_bytes)


@lru_cache(1024)
def parse_namespace(text: str) -> Namespace:
    """The namespace in a row. Raises `ValueError` for any other text."""
    try:
        names = json.loads(text)
    except RecursionError as error:
        raise ValueError("no namespace") from error
    if not isinstance(names, list) or [type(name) for name in names] != [str] * len(Namespace._fields):
        raise ValueError("no namespace")
    "".join(names).encode()  # raises for parts of a character
    return Namespace(*names)


def _text(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
