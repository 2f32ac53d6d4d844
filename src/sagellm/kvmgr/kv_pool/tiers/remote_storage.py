"""`RemoteStorage`: a `RemoteStore` as the storage of a tier."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from sagellm.core.protocols.kv_tiers import Buffer, ReadOutcome, StoredBlock
from sagellm.kvmgr.kv_pool.tiers.remote import PutOutcome, RemoteStore

log = logging.getLogger("sagellm.tiers")
MAX_QUEUED_BYTES = 256 << 20
"""Bytes of host memory for blocks that wait to be put; further blocks are dropped."""
CLOSE_S = 2.0
"""`close` waits so long for blocks that are still to be put."""
_KEPT = (PutOutcome.STORED, PutOutcome.PRESENT)


class RemoteStorage:
    """Implements `BlockStorage` over a server that instances share.

    Slots are numbers for the index of the tier; the server knows blocks by the hash of their tokens, so
    `touch` does nothing and `recover` finds nothing. `write` copies blocks to a queue and never waits for the
    network. What finds the queue full, or is not taken by the server, is lost (`take_lost`).

    A slot has an epoch, which changes with each write and each `forget`: a loss that is known when the slot
    has another block says nothing of that one.
    """

    def __init__(self, store: RemoteStore, num_slots: int, max_queued_bytes: int = MAX_QUEUED_BYTES) -> None:
        self.store, self.num_slots = store, num_slots
        self.num_lost = 0
        self._max_queued_bytes = max_queued_bytes
        self._thread = ThreadPoolExecutor(1, "sagellm-kv-put")
        self._num_queued_bytes = 0
        self._is_closed = False
        self._changed = threading.Condition()
        """Guards the two above and the epochs; notified when blocks leave the queue."""
        self._epochs = [0] * num_slots
        self._lost: deque[tuple[int, int]] = deque()

    @property
    def fault(self) -> str | None:
        return self.store.fault

    @property
    def num_stored(self) -> int:
        """Blocks that the server has taken from this instance."""
        return self.store.num_puts[PutOutcome.STORED]

    def write(self, blocks: Sequence[StoredBlock], data: Buffer) -> None:
        num_bytes = memoryview(data).nbytes
        with self._changed:
            epochs = self._next_epochs([block.slot for block in blocks])
            has_room = self._num_queued_bytes + num_bytes <= self._max_queued_bytes and not self._is_closed
            if has_room:
                self._num_queued_bytes += num_bytes
                self._thread.submit(self._put, blocks, epochs, bytes(data))
        if not has_room:
            self._lose([(block.slot, epoch) for block, epoch in zip(blocks, epochs, strict=True)])

    def read(
        self, slots: Sequence[int], token_hashes: Sequence[bytes], target: memoryview
    ) -> Sequence[ReadOutcome]:
        return self.store.get(token_hashes, target)

    def take_lost(self) -> list[int]:
        """The slots whose blocks are not on the server, since the last call. For the engine's thread."""
        lost = [self._lost.popleft() for _ in range(len(self._lost))]
        with self._changed:
            return [slot for slot, epoch in lost if self._epochs[slot] == epoch]

    def flush(self, timeout_s: float) -> bool:
        """Wait until the queue is empty; False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_queued_bytes, timeout_s)

    def forget(self, slots: Iterable[int]) -> None:
        """The slots are for other blocks now. On the server, blocks end by its TTL and memory limit."""
        with self._changed:
            self._next_epochs(slots)

    def touch(self, slots: Iterable[int]) -> None:
        """Does nothing: the server sees each use."""

    def sync(self) -> None:
        """Does nothing: see `forget`."""

    def recover(self) -> Sequence[StoredBlock]:
        return ()

    def close(self) -> None:
        """Put what is queued for at most `CLOSE_S`, and close the connections. Again: nothing happens."""
        self.flush(CLOSE_S)
        with self._changed:
            self._is_closed = True
        self.store.close()
        self._thread.shutdown(wait=True)

    def _next_epochs(self, slots: Iterable[int]) -> list[int]:
        epochs = []
        for slot in slots:
            self._epochs[slot] += 1
            epochs.append(self._epochs[slot])
        return epochs

    def _put(self, blocks: Sequence[StoredBlock], epochs: Sequence[int], data: bytes) -> None:
        outcomes: Sequence[PutOutcome] = [PutOutcome.IO_ERROR] * len(blocks)
        try:
            outcomes = self.store.put(blocks, data)
        except Exception:  # the thread goes on, and these blocks are lost
            log.exception("putting %d blocks into the remote KV store failed", len(blocks))
        ends = zip(blocks, epochs, outcomes, strict=True)
        self._lose([(block.slot, epoch) for block, epoch, outcome in ends if outcome not in _KEPT])
        with self._changed:
            self._num_queued_bytes -= len(data)
            self._changed.notify_all()

    def _lose(self, lost: Sequence[tuple[int, int]]) -> None:
        self._lost.extend(lost)
        with self._changed:
            self.num_lost += len(lost)
