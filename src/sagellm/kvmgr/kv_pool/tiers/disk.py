"""`DiskStorage`: KV blocks in a folder, verified when read, kept across restarts.

The folder holds a slab of slots (`disk_slab.py`) with blocks and their headers (`disk_blocks.py`), a
catalogue of them (`disk_catalogue.py`) and a lock (`disk_folder.py`). A write keeps an order, so that kill -9
at any instant leaves the old block, the new one or none:

1. the row of the old block is deleted,
2. header and payload are written,
3. the row of the new block is committed.

A row whose slot has the header of another block is a miss. A loss of power may tear a payload or lose
commits; header and checksum show that, too.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Condition, Lock
from typing import NamedTuple

from sagellm.core.errors import BookkeepingError, ConfigError, KVDataError
from sagellm.core.protocols.kv_tiers import BlockFormat, Buffer, KVCodec, ReadOutcome, StoredBlock
from sagellm.kvmgr.kv_pool.tiers.disk_blocks import RAW, BlockMove, SlabBlocks
from sagellm.kvmgr.kv_pool.tiers.disk_catalogue import CatalogueRow, DiskCatalogue
from sagellm.kvmgr.kv_pool.tiers.disk_folder import OwnedFolder
from sagellm.kvmgr.kv_pool.tiers.disk_slab import FreeSpace, Slab, SlabIO

log = logging.getLogger("sagellm.kv_tiers")
CATALOGUE_FILE = "catalogue.sqlite"
FLUSH_PERIOD_S = 1.0
"""What `touch` and `forget` changed reaches the catalogue with the first read or write after this time."""
DEFAULT_SPACE = FreeSpace()


class _Held(NamedTuple):
    """A block in the books. `num_bytes`: behind its header, as it is stored."""

    token_hash: bytes
    num_bytes: int


class DiskStorage:
    """Implements `BlockStorage`.

    Owns the folder from its constructor, which raises `ConfigError`, until `close`. `num_slots` may be less
    than asked for, if `space` allows no more. `fault`: why the disk is not used any more, set once by the
    first error; from then on writes raise `OSError` and reads are `IO_ERROR`. `now_s`: seconds since the
    epoch.

    Memory whose address is a multiple of 4096, and blocks whose size is one, go to the disk without a copy
    (`disk_slab.aligned_buffer`). With `verify` off, payloads are trusted and headers still checked.

    `touch` and `forget` change the books at once, and the catalogue later: a block that was forgotten shortly
    before a crash, without `sync`, may be recovered.
    """

    def __init__(
        self,
        folder: Path,
        num_slots: int,
        block_format: BlockFormat,
        *,
        codec: KVCodec | None = None,
        verify: bool = True,
        space: FreeSpace = DEFAULT_SPACE,
        now_s: Callable[[], float] = time.time,
        io: SlabIO = os,
    ) -> None:
        self._block_bytes = block_format.bytes_per_block
        if num_slots < 1 or self._block_bytes < 1:
            raise ConfigError(f"a disk tier needs a block of a byte, got {num_slots} x {self._block_bytes}")
        if codec is not None and codec.name == RAW:
            codec = None  # so that blocks need no copy
        self.fault: str | None = None
        self._folder_path = folder
        self._digest = block_format.digest
        self._now_s = now_s
        self._resources = ExitStack()
        with self._releasing(folder):
            self._folder = OwnedFolder(folder)
            self._resources.callback(self._folder.close)
            for suffix in ("-wal", "-shm"):
                self._folder.refuse_symlink(CATALOGUE_FILE + suffix)
            os.close(self._folder.open(CATALOGUE_FILE))  # SQLite keeps the mode of the file
            self._catalogue = DiskCatalogue(folder / CATALOGUE_FILE, block_format)
            self._resources.callback(self._catalogue.close)
            self._slab = Slab(self._folder, self._block_bytes, num_slots, space, io)
            self._resources.callback(self._slab.close)
            if self._catalogue.reset_reason:
                log.warning("%s starts empty: %s", folder, self._catalogue.reset_reason)
                self._slab.erase()
            self._catalogue.set_format(codec.name if codec else RAW, self._slab.num_slots)
        self._blocks = SlabBlocks(self._slab, block_format, codec, verify=verify)
        self._resources.callback(self._blocks.close)
        self.num_slots = self._slab.num_slots
        # The books. Their lock is never held while the disk is used; that of the catalogue is, and is taken
        # before it.
        self._books = Condition(Lock())
        self._catalogue_lock = Lock()
        self._stored: dict[int, _Held] = {}
        self._touched: dict[int, float] = {}
        self._forgotten: set[int] = set()
        self._writing: set[int] = set()
        self._forgotten_in_write: set[int] = set()
        self._num_calls = 0
        self._state = "new"
        self._flushed_s = now_s()

    # -- on worker threads

    def write(self, blocks: Sequence[StoredBlock], data: Buffer) -> None:
        slots = [block.slot for block in blocks]
        view = self._as_blocks(data, slots)
        with self._call(), self._claimed(slots) as written:
            if self.fault:
                raise OSError(errno.EIO, f"the disk tier is off: {self.fault}")
            moves = [BlockMove(place, block.slot, block.token_hash) for place, block in enumerate(blocks)]
            try:
                self._update_catalogue([], slots)
                sizes = self._blocks.write(moves, view)
                rows = [CatalogueRow(block, size) for block, size in zip(blocks, sizes, strict=True)]
                self._update_catalogue(rows, [])
            except OSError as error:
                self._fail("write", error)
                raise
            written.extend(rows)

    def read(
        self, slots: Sequence[int], token_hashes: Sequence[bytes], target: memoryview
    ) -> Sequence[ReadOutcome]:
        view = self._as_blocks(target, slots)
        if len(token_hashes) != len(slots):
            raise BookkeepingError(f"{len(token_hashes)} hashes for {len(slots)} slots")
        with self._call():
            if self.fault:
                return [ReadOutcome.IO_ERROR] * len(slots)
            outcomes = [ReadOutcome.ABSENT] * len(slots)
            moves: list[BlockMove] = []
            with self._books:
                held_by_slot = list(map(self._stored.get, slots))
            for place, held in enumerate(held_by_slot):
                if held is not None and held.token_hash != token_hashes[place]:
                    outcomes[place] = ReadOutcome.OTHER_TOKENS
                elif held is not None:
                    moves.append(BlockMove(place, slots[place], *held))
            found, error = self._blocks.read(moves, view)
            for place, outcome in found.items():
                outcomes[place] = outcome
            if error is not None:
                self._fail("read", error)
            self._flush_if_due()
            return outcomes

    # -- on the engine's thread

    def forget(self, slots: Iterable[int]) -> None:
        with self._books:
            self._check_open()
            for slot in slots:
                self._stored.pop(slot, None)
                self._touched.pop(slot, None)
                (self._forgotten_in_write if slot in self._writing else self._forgotten).add(slot)

    def touch(self, slots: Iterable[int]) -> None:
        with self._books:
            self._check_open()
            self._touched.update(dict.fromkeys(filter(self._stored.__contains__, slots), self._now_s()))

    def sync(self) -> None:
        if self.fault is None and (self._touched or self._forgotten):
            try:
                self._update_catalogue([], [])
            except OSError as error:
                self._fail("update", error)

    # -- from opening to closing

    def recover(self) -> Sequence[StoredBlock]:
        """What is there from before, used last first. To be called once, before anything else.

        Rows with a slot that the slab does not have, or of a block that another slot holds too, are dropped.
        """
        if self._state != "new":
            raise BookkeepingError(f"recover() is for a storage that is new, this one is {self._state}")
        self._state = "open"
        num_slots = min(self.num_slots, self._slab.num_found)
        blocks: dict[bytes, StoredBlock] = {}
        dropped: list[int] = []
        try:
            for block, num_bytes in self._catalogue.rows():
                is_sound = 0 <= block.slot < num_slots and 0 < num_bytes <= self._block_bytes
                if is_sound and block.token_hash not in blocks:
                    blocks[block.token_hash] = block
                    self._stored[block.slot] = _Held(block.token_hash, num_bytes)
                else:
                    dropped.append(block.slot)
            if dropped:
                log.warning("%s: dropped %d blocks behind its end or twice", self._folder_path, len(dropped))
                self._update_catalogue([], dropped)
        except OSError as error:
            self._fail("recover", error)
            self._stored.clear()
            return ()
        return list(blocks.values())

    def close(self) -> None:
        """Wait for the calls of other threads, write what is pending, let go. Again: nothing happens."""
        with self._books:
            if self._state == "closed":
                return
            is_open, self._state = self._state == "open", "closed"
            self._books.wait_for(lambda: not self._num_calls)
        try:
            if is_open and not self.fault:
                self._update_catalogue([], [])
        except OSError as error:
            self._fail("close", error)
        try:
            self._resources.close()
        except OSError as error:
            self._fail("close", error)

    def check(self) -> None:
        """Raise `BookkeepingError` where books, catalogue and slab disagree.

        Reads the header of each stored block; raises `OSError` if that fails. After a fault it compares the
        books alone. Not for use beside a `write`.
        """
        with self._books:
            self._check_open()
            stored = dict(self._stored)
            lost = self._touched.keys() - stored.keys()
            torn = (self._writing | self._forgotten) & stored.keys()
        if lost or torn or not all(0 <= slot < self.num_slots for slot in stored):
            raise BookkeepingError(f"slots {lost} were used and hold nothing, {torn} hold a block and none")
        if self.fault:
            return
        self._update_catalogue([], [])
        with self._catalogue_lock:
            rows = {block.slot: _Held(block.token_hash, size) for block, size in self._catalogue.rows()}
        if rows != stored:
            differing = sorted(slot for slot in rows | stored if rows.get(slot) != stored.get(slot))
            raise BookkeepingError(f"catalogue and books disagree on slots {differing}")
        if self._slab.num_bytes < self.num_slots * self._slab.slot_bytes:
            raise BookkeepingError(f"the slab has {self._slab.num_bytes} bytes for {self.num_slots} slots")
        for slot, held in stored.items():
            try:
                header = self._blocks.header(slot)
            except KVDataError as error:
                raise BookkeepingError(f"slot {slot}: {error}") from error
            if (header.format_digest, header.token_hash, header.num_bytes) != (self._digest, *held):
                raise BookkeepingError(f"slot {slot} has the header of another block")

    # -- inside

    @contextmanager
    def _releasing(self, folder: Path) -> Iterator[None]:
        """Release everything if the constructor fails. Errors of the disk become `ConfigError`."""
        try:
            yield
        except OSError as error:
            self._resources.close()
            raise ConfigError(
                f"{folder} cannot hold KV blocks: {error}. Name a folder on a disk with room, that user "
                f"{os.geteuid()} can write to"
            ) from error
        except BaseException:
            self._resources.close()
            raise

    def _as_blocks(self, memory: Buffer, slots: Sequence[int]) -> memoryview:
        """The caller's memory as bytes. Raises `BookkeepingError` for another size, or slots out of range."""
        view = memoryview(memory).cast("B")
        if len(view) != len(slots) * self._block_bytes:
            raise BookkeepingError(f"{len(view)} bytes for {len(slots)} blocks of {self._block_bytes}")
        if slots and (min(slots) < 0 or max(slots) >= self.num_slots):
            raise BookkeepingError(f"slots are 0 to {self.num_slots - 1}, got {list(slots)}")
        return view

    def _check_open(self) -> None:
        if self._state != "open":
            hint = "call recover() first" if self._state == "new" else "open the folder again"
            raise BookkeepingError(f"the storage in {self._folder_path} is {self._state}: {hint}")

    @contextmanager
    def _call(self) -> Iterator[None]:
        """A call of a worker thread, for whose end `close` waits."""
        with self._books:
            self._check_open()
            self._num_calls += 1
        try:
            yield
        finally:
            with self._books:
                self._num_calls -= 1
                self._books.notify_all()

    @contextmanager
    def _claimed(self, slots: Sequence[int]) -> Iterator[list[CatalogueRow]]:
        """Slots while they are written: they hold nothing.

        Afterwards they hold the rows of the list, but for those that `forget` named meanwhile.
        """
        with self._books:
            if len(set(slots)) < len(slots) or not self._writing.isdisjoint(slots):
                raise BookkeepingError(f"a slot is written twice at once: one of {list(slots)}")
            self._writing.update(slots)
            for slot in slots:
                self._stored.pop(slot, None)
                self._touched.pop(slot, None)
        rows: list[CatalogueRow] = []
        try:
            yield rows
        finally:
            with self._books:
                self._writing.difference_update(slots)
                forgotten = self._forgotten_in_write.intersection(slots)
                self._forgotten_in_write -= forgotten
                self._forgotten |= forgotten
                for block, num_bytes in rows:
                    if block.slot not in forgotten:
                        self._stored[block.slot] = _Held(block.token_hash, num_bytes)

    def _update_catalogue(self, rows: Sequence[CatalogueRow], cleared: Sequence[int]) -> None:
        """Commit what `touch` and `forget` changed, and this. Raises `OSError`."""
        with self._catalogue_lock:
            with self._books:
                forgotten, self._forgotten = self._forgotten, set()
                touched, self._touched = self._touched, {}
            with_row = self._catalogue.slots_with_row
            gone = [slot for slot in (*forgotten, *cleared) if slot in with_row]
            if rows or gone or touched:
                self._catalogue.commit(rows, gone, touched)
            self._flushed_s = self._now_s()

    def _flush_if_due(self) -> None:
        if abs(self._now_s() - self._flushed_s) >= FLUSH_PERIOD_S:
            self.sync()

    def _fail(self, doing: str, error: OSError) -> None:
        with self._books:
            if self.fault is not None:
                return
            self.fault = f"{doing} in {self._folder_path}: {error}"
        log.warning("the disk tier is off: %s", self.fault)
