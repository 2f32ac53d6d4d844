"""`HostStorage`: KV blocks in host memory, checked by token hash and epoch."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from threading import Lock
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from sagellm.core.errors import BookkeepingError, CapacityError
from sagellm.core.protocols.kv_tiers import BlockFormat, Buffer, ReadOutcome, StoredBlock

_Bytes: TypeAlias = npt.NDArray[np.uint8]


class HostStorage:
    """Implements `BlockStorage`. Owns one buffer from its constructor until `close`.

    The system gives memory when a slot is first written, from the NUMA node of the thread that writes it.
    Nothing survives a restart, so `recover` returns nothing. A slot has the hash of its tokens, and an epoch
    that changes with each write and each `forget`: a slot that was rewritten while it was read is
    `OTHER_TOKENS`. There is no checksum.
    """

    def __init__(self, num_slots: int, block_format: BlockFormat) -> None:
        self._block_bytes = block_format.bytes_per_block
        self.fault: str | None = None
        if num_slots < 1 or self._block_bytes < 1:
            raise ValueError(f"a host tier needs a block of a byte, got {num_slots} x {self._block_bytes}")
        self.num_slots = num_slots
        size = num_slots * self._block_bytes
        try:
            buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise CapacityError(
                f"no {size} bytes of host memory for KV blocks ({error}): lower the size of the host tier"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages uses small ones
                buffer.madvise(mmap.MADV_HUGEPAGE)
        self._slots: _Bytes | None = np.frombuffer(buffer, np.uint8).reshape(num_slots, self._block_bytes)
        # Guards hashes and epochs; never held while a block is copied.
        self._lock = Lock()
        self._hashes: list[bytes | None] = [None] * num_slots
        self._epochs = [0] * num_slots

    def write(self, blocks: Sequence[StoredBlock], data: Buffer) -> None:
        slots = [block.slot for block in blocks]
        memory, source = self._views(data, slots)
        with self._lock:
            self._clear(slots)
            epochs = [self._epochs[slot] for slot in slots]
        for index, slot in enumerate(slots):
            np.copyto(memory[slot], source[index])
        with self._lock:
            for block, epoch in zip(blocks, epochs, strict=True):
                if self._epochs[block.slot] == epoch:  # nothing forgot the slot meanwhile
                    self._hashes[block.slot] = block.token_hash

    def read(
        self, slots: Sequence[int], token_hashes: Sequence[bytes], target: memoryview
    ) -> Sequence[ReadOutcome]:
        memory, place = self._views(target, slots)
        if len(token_hashes) != len(slots):
            raise BookkeepingError(f"{len(token_hashes)} hashes for {len(slots)} slots")
        with self._lock:
            epochs = [self._epochs[slot] for slot in slots]
            outcomes = list(map(self._outcome, slots, token_hashes))
        for index, slot in enumerate(slots):
            if outcomes[index] is ReadOutcome.OK:
                np.copyto(place[index], memory[slot])
        with self._lock:
            for index, slot in enumerate(slots):
                if outcomes[index] is ReadOutcome.OK and self._epochs[slot] != epochs[index]:
                    outcomes[index] = ReadOutcome.OTHER_TOKENS
        return outcomes

    def forget(self, slots: Iterable[int]) -> None:
        with self._lock:
            self._check_open()
            self._clear(slots)

    def touch(self, slots: Iterable[int]) -> None:
        """Does nothing: the time of last use is for a restart."""
        with self._lock:
            self._check_open()

    def sync(self) -> None:
        """Does nothing: nothing outlives this process."""

    def recover(self) -> Sequence[StoredBlock]:
        with self._lock:
            self._check_open()
        return ()

    def close(self) -> None:
        """The memory is free when the last call that still copies has ended. Again: nothing happens."""
        with self._lock:
            self._slots = None
            self._hashes = [None] * self.num_slots

    def check(self) -> None:
        """Raise `BookkeepingError` where hashes, epochs and memory do not have the same slots."""
        with self._lock:
            slots = self._check_open()
            sizes = {len(self._hashes), len(self._epochs), len(slots), self.num_slots}
            unwritten = [slot for slot, epoch in enumerate(self._epochs) if not epoch and self._hashes[slot]]
        if len(sizes) > 1 or unwritten:
            raise BookkeepingError(f"sizes {sorted(sizes)} differ, or {unwritten} hold blocks never written")

    # -- inside

    def _views(self, memory: Buffer, slots: Sequence[int]) -> tuple[_Bytes, _Bytes]:
        """The slots and the caller's blocks, as rows of bytes."""
        view = memoryview(memory).cast("B")
        if len(view) != len(slots) * self._block_bytes:
            raise BookkeepingError(f"{len(view)} bytes for {len(slots)} blocks of {self._block_bytes}")
        if slots and (min(slots) < 0 or max(slots) >= self.num_slots):
            raise BookkeepingError(f"slots are 0 to {self.num_slots - 1}, got {list(slots)}")
        with self._lock:
            own = self._check_open()
        return own, np.frombuffer(view, np.uint8).reshape(len(slots), self._block_bytes)

    def _check_open(self) -> _Bytes:
        if self._slots is None:
            raise BookkeepingError("the host storage is closed: make another")
        return self._slots

    def _clear(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._hashes[slot] = None
            self._epochs[slot] += 1

    def _outcome(self, slot: int, token_hash: bytes) -> ReadOutcome:
        held = self._hashes[slot]
        if held is None:
            return ReadOutcome.ABSENT
        return ReadOutcome.OK if held == token_hash else ReadOutcome.OTHER_TOKENS
