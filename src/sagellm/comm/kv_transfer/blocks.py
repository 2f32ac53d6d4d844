"""Reads chunks from the blocks of an instance, and brings chunks into them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import xxhash

from sagellm.comm.kv_transfer.chunks import ChunkSpan, cut_views
from sagellm.comm.kv_transfer.layouts import Agreement, reorder
from sagellm.core.errors import KVDataError
from sagellm.core.protocols.kv_tiers import BlockBytes, Buffer, KVCodec
from sagellm.core.protocols.kv_transfer import BlockViews

RAW = "raw"


class InstanceBlocks:
    """The blocks of an instance, and the codec of its transfers, if any.

    Blocks without views (a GPU's) are copied once on their way, into memory from which a link sends.
    """

    def __init__(self, memory: BlockBytes, digest: bytes, codec: KVCodec | None = None) -> None:
        self._memory, self.digest, self.codec = memory, digest, codec
        self.bytes_per_block = memory.bytes_per_block
        has_views = getattr(memory, "has_views", False)
        self._views = cast(BlockViews, memory).views if has_views else None
        self._per_block = 0 if self._views is None else len(self._views([0]))

    @property
    def has_views(self) -> bool:
        return self._views is not None

    # -- at the sender

    def payload(
        self, ids: Sequence[int], chunk: ChunkSpan, agreed: Agreement, reserved: memoryview | None
    ) -> tuple[str, Sequence[Buffer]]:
        """The codec and the bytes of a chunk, which has blocks `ids`.

        They are in `reserved`, if there is such memory.
        """
        if agreed.codec and not chunk.num_layers:
            whole = self._gathered(ids, agreed)
            assert self.codec is not None
            encoded = self.codec.encode(whole)
            is_smaller = memoryview(encoded).nbytes < len(whole)
            codec, found = (agreed.codec, encoded) if is_smaller else (RAW, whole)
            if reserved is None:
                return codec, [found]
            reserved = reserved[: memoryview(found).nbytes]
            copy_bytes(reserved, found)
            return codec, [reserved]
        if agreed.is_reordered or self._views is None:
            return RAW, [self._gathered(ids, agreed, reserved)]
        if reserved is None:
            return RAW, self.views(ids, chunk)
        reserved = reserved[: chunk.num_bytes]
        if chunk.num_bytes == len(ids) * self.bytes_per_block:
            self._memory.read_blocks(ids, reserved)
        else:
            fill(reserved, self.views(ids, chunk))
        return RAW, [reserved]

    def _gathered(
        self, ids: Sequence[int], agreed: Agreement, target: memoryview | None = None
    ) -> memoryview:
        """Whole blocks as they are on the wire."""
        if target is None:
            target = scratch(len(ids) * agreed.wire_bytes)
        target = target[: len(ids) * agreed.wire_bytes]
        if not agreed.is_reordered:
            self._memory.read_blocks(ids, target)
            return target
        own = scratch(len(ids) * self.bytes_per_block)
        self._memory.read_blocks(ids, own)
        assert agreed.source is not None
        assert agreed.wire is not None
        reorder(agreed.source, own, agreed.wire, target)
        return target

    # -- at the receiver

    def views(self, ids: Sequence[int], chunk: ChunkSpan) -> list[memoryview]:
        """The memory of a chunk in its blocks."""
        assert self._views is not None
        return cut_views(self._views(ids), self._per_block, chunk.spans)

    def write(self, ids: Sequence[int], agreed: Agreement, data: Buffer) -> None:
        """Bring whole blocks from the wire, or the heads that came, into blocks."""
        if not agreed.is_partial:
            self._memory.write_blocks(ids, data)
            return
        own = scratch(len(ids) * self.bytes_per_block)
        self._memory.read_blocks(ids, own)
        assert agreed.wire is not None
        assert agreed.target is not None
        reorder(agreed.wire, data, agreed.target, own)
        self._memory.write_blocks(ids, own)

    def decoded(self, codec: str, data: memoryview, num_bytes: int) -> memoryview:
        """The blocks in a verified payload. Raises `KVDataError`."""
        if codec == RAW:
            return data
        if self.codec is None or codec != self.codec.name:
            raise KVDataError(f"a chunk in codec {codec!r}, which was not agreed on")
        target = scratch(num_bytes)
        self.codec.decode(data, target)
        return target


def scratch(num_bytes: int) -> memoryview:
    """Memory that is not zeroed."""
    return np.empty(num_bytes, np.uint8).data


def checksum(parts: Sequence[Buffer]) -> int:
    """xxh3, 64 bits, of the parts one behind the other."""
    if len(parts) == 1:
        return xxhash.xxh3_64_intdigest(parts[0])
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.intdigest()


def copy_bytes(target: memoryview, source: Buffer) -> None:
    """Copy without the interpreter's lock, which slices of memoryviews hold."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def fill(target: memoryview, parts: Sequence[memoryview]) -> None:
    """Copy parts one behind the other."""
    at = 0
    for part in parts:
        target[at : at + len(part)] = part
        at += len(part)


def fill_views(targets: Sequence[memoryview], data: memoryview) -> None:
    """Cut data into parts."""
    at = 0
    for target in targets:
        target[:] = data[at : at + len(target)]
        at += len(target)
