"""`SlabBlocks`: KV blocks with headers in a slab, verified when they are read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NamedTuple, cast

import numpy as np
import xxhash

from sagellm.core.blocks import cdiv
from sagellm.core.errors import KVDataError
from sagellm.core.protocols.kv_tiers import (
    FORMAT_VERSION,
    BlockFormat,
    BlockHeader,
    Buffer,
    KVCodec,
    ReadOutcome,
)
from sagellm.kvmgr.kv_pool.tiers.disk_slab import ALIGNMENT, Scratch, Slab, aligned

RAW = "raw"
"""The codec of blocks that are stored as they are."""
CHUNK_BYTES = 4 << 20
"""Blocks in adjacent slots are moved together up to this size; a larger block is moved as a whole.

A disk moves 4 MB a fifth faster than four times 1 MB (`benchmarks/tier_bandwidth.py`).
"""
_MAX_RUN = 256
"""A call takes at most 1024 pieces of memory, and a block has up to three."""
_LEAST_BYTES = 1 << 20
_NUM_LANES = 2
_NUM_HELPERS = 4
_NO_HEADER = bytes(ALIGNMENT)


class BlockMove(NamedTuple):
    """A block to write or read.

    `place`: its number among the blocks of the caller's memory. `num_bytes`: of a block to read, as stored.
    """

    place: int
    slot: int
    token_hash: bytes
    num_bytes: int = 0


class _Memory(NamedTuple):
    """A run of blocks in memory: the page of each header, and each payload.

    `in_place`: the payloads are the caller's memory. Otherwise all is in `scratch`, as it is in the slots.
    """

    scratch: memoryview
    pages: list[memoryview]
    payloads: list[memoryview]
    in_place: bool


class SlabBlocks:
    """Blocks of one format in a slab. Threads may use different slots at the same time.

    Helper threads, from the first use until `close`, move every other run of a call.
    """

    def __init__(self, slab: Slab, block_format: BlockFormat, codec: KVCodec | None, *, verify: bool) -> None:
        self._slab = slab
        self._format = block_format
        self._size = block_format.bytes_per_block
        self._codec = codec
        self._verify = verify
        chunk_bytes = max(CHUNK_BYTES, slab.slot_bytes)
        # With a codec a run is one block, so that only the bytes that it takes are moved.
        self._max_run = 1 if codec else min(_MAX_RUN, chunk_bytes // slab.slot_bytes)
        self._scratch = Scratch(chunk_bytes + ALIGNMENT)
        self._helpers = ThreadPoolExecutor(_NUM_HELPERS, "kv-disk")

    def write(self, moves: Sequence[BlockMove], data: memoryview) -> list[int]:
        """Write blocks. Returns their sizes as stored, in bytes; raises `OSError`."""
        sizes = [0] * len(moves)

        def write_run(run: Sequence[BlockMove]) -> None:
            memory = self._memory(run, data)
            for move, page, payload in zip(run, memory.pages, memory.payloads, strict=True):
                block = data[move.place * self._size : (move.place + 1) * self._size]
                sizes[move.place] = self._put(block, move.token_hash, page, payload, in_place=memory.in_place)
            self._slab.write(run[0].slot, self._buffers(memory, sizes[run[-1].place]))
            self._scratch.give(memory.scratch)

        self._share(list(self._runs(moves)), write_run)
        return sizes

    def read(
        self, moves: Sequence[BlockMove], target: memoryview
    ) -> tuple[dict[int, ReadOutcome], OSError | None]:
        """Fill the places of blocks in the target.

        Returns the outcome by place, and the error after which nothing more was read.
        """
        outcomes = dict.fromkeys((move.place for move in moves), ReadOutcome.IO_ERROR)

        def read_run(run: Sequence[BlockMove]) -> None:
            memory = self._memory(run, target)
            num_bytes = self._slab.read(run[0].slot, self._buffers(memory, run[-1].num_bytes))
            for number, move in enumerate(run):
                block = target[move.place * self._size : (move.place + 1) * self._size]
                num_behind = num_bytes - number * self._slab.slot_bytes
                outcomes[move.place] = self._deliver(memory, number, num_behind, move.token_hash, block)
            self._scratch.give(memory.scratch)

        try:
            self._share(list(self._runs(moves)), read_run)
        except OSError as error:
            return outcomes, error
        return outcomes, None

    def header(self, slot: int) -> BlockHeader:
        """The header in a slot. Raises `KVDataError` for none, and `OSError`."""
        scratch = self._scratch.take()
        num_bytes = self._slab.read(slot, [scratch[:ALIGNMENT]])
        header = BlockHeader.unpack(scratch[:num_bytes])
        self._scratch.give(scratch)
        return header

    def close(self) -> None:
        self._helpers.shutdown()

    # -- runs of blocks

    def _share(
        self, runs: Sequence[Sequence[BlockMove]], move_run: Callable[[Sequence[BlockMove]], None]
    ) -> None:
        """Move runs in two threads: one is hashed while the disk moves another.

        Returns when nothing moves any more. Raises the first error, after which no run is begun.
        """
        left = deque(runs)

        def move_runs() -> None:
            while True:
                try:
                    run = left.popleft()
                except IndexError:
                    return
                try:
                    move_run(run)
                except BaseException:
                    left.clear()
                    raise

        helpers = [self._helpers.submit(move_runs) for _ in runs[1:_NUM_LANES]]
        try:
            move_runs()
        finally:
            begun = [helper for helper in helpers if not helper.cancel()]
            wait(begun)
        for helper in begun:
            helper.result()

    def _runs(self, moves: Sequence[BlockMove]) -> Iterator[list[BlockMove]]:
        """Groups of blocks for one transfer: adjacent on both sides, up to a chunk.

        They are smaller, down to a megabyte, where a call has too few blocks for all threads.
        """
        least = max(1, _LEAST_BYTES // self._slab.slot_bytes)
        most = min(self._max_run, max(least, cdiv(len(moves), _NUM_LANES)))
        run: list[BlockMove] = []
        for move in moves:
            if run:
                last = run[-1]
                is_next = (move.place - last.place, move.slot - last.slot) == (1, 1)
                if not is_next or len(run) == most:
                    yield run
                    run = []
            run.append(move)
        if run:
            yield run

    def _memory(self, run: Sequence[BlockMove], blocks: memoryview) -> _Memory:
        """The caller's memory where the disk takes that, else a scratch buffer."""
        scratch = self._scratch.take()
        size, slot_bytes = self._size, self._slab.slot_bytes
        in_place = self._codec is None and self._slab.takes(blocks, size)
        if in_place:
            starts = range(0, len(run) * ALIGNMENT, ALIGNMENT)
            payloads = [blocks[move.place * size : (move.place + 1) * size] for move in run]
        else:
            starts = range(0, len(run) * slot_bytes, slot_bytes)
            payloads = [scratch[start + ALIGNMENT : start + slot_bytes] for start in starts]
        return _Memory(scratch, [scratch[start : start + ALIGNMENT] for start in starts], payloads, in_place)

    def _buffers(self, memory: _Memory, last_bytes: int) -> list[memoryview]:
        """What is moved between memory and slots.

        A block that has no other behind it is moved up to `last_bytes`.
        """
        if not memory.in_place:
            length = (len(memory.pages) - 1) * self._slab.slot_bytes + ALIGNMENT + aligned(last_bytes)
            return [memory.scratch[:length]]
        padding = aligned(self._size) - self._size
        rest = [memory.scratch[-ALIGNMENT:][:padding]] if padding else []
        pairs = zip(memory.pages, memory.payloads, strict=True)
        return [view for page, payload in pairs for view in (page, payload, *rest)]

    # -- blocks

    def _put(
        self, block: memoryview, token_hash: bytes, page: memoryview, payload: memoryview, *, in_place: bool
    ) -> int:
        """Fill page and payload of a block. Returns its size as stored."""
        codec, stored = RAW, cast(Buffer, block)
        if self._codec is not None:
            encoded = self._codec.encode(block)
            if len(encoded) < len(block):
                codec, stored = self._codec.name, encoded
        header = BlockHeader(
            self._format.digest, token_hash, codec, len(stored), xxhash.xxh3_64_intdigest(stored)
        )
        page[:] = header.pack().ljust(ALIGNMENT, b"\0")
        if not in_place:
            _copy(payload[: len(stored)], stored)
        return len(stored)

    def _deliver(
        self, memory: _Memory, number: int, num_bytes: int, token_hash: bytes, block: memoryview
    ) -> ReadOutcome:
        """Verify a block, and bring it to its place. `num_bytes` were read of its slot."""
        if num_bytes < ALIGNMENT:
            return ReadOutcome.ABSENT
        page, payload = memory.pages[number], memory.payloads[number][: num_bytes - ALIGNMENT]
        try:
            header = BlockHeader.unpack(page)
        except KVDataError:
            return ReadOutcome.ABSENT if page == _NO_HEADER else ReadOutcome.CORRUPT
        outcome = verdict(header, payload, self._format, token_hash, verify=self._verify)
        stored = payload[: header.num_bytes]
        if outcome is ReadOutcome.OK and header.codec != RAW:
            return self._decode(header.codec, stored, block)
        if outcome is ReadOutcome.OK and not memory.in_place:
            _copy(block, stored)
        return outcome

    def _decode(self, codec: str, stored: memoryview, block: memoryview) -> ReadOutcome:
        if self._codec is None or codec != self._codec.name:
            return ReadOutcome.UNKNOWN_CODEC
        try:
            self._codec.decode(stored, block)
        except KVDataError:
            return ReadOutcome.CORRUPT
        return ReadOutcome.OK


def verdict(
    header: BlockHeader, payload: memoryview, expected: BlockFormat, token_hash: bytes, *, verify: bool = True
) -> ReadOutcome:
    """Compare version, format, tokens, size and checksum, in this order.

    `payload`: what is stored behind the header, or more. Without `verify` there is no checksum.
    """
    if header.version != FORMAT_VERSION:
        return ReadOutcome.OTHER_VERSION
    if header.format_digest != expected.digest:
        return ReadOutcome.OTHER_FORMAT
    if header.token_hash != token_hash:
        return ReadOutcome.OTHER_TOKENS
    if header.num_bytes > len(payload):
        return ReadOutcome.ABSENT
    if verify and xxhash.xxh3_64_intdigest(payload[: header.num_bytes]) != header.checksum:
        return ReadOutcome.CORRUPT
    if header.codec == RAW and header.num_bytes != expected.bytes_per_block:
        return ReadOutcome.CORRUPT
    return ReadOutcome.OK


def _copy(target: memoryview, source: Buffer) -> None:
    """Copy bytes without the interpreter's lock, which slices of memoryviews hold."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
