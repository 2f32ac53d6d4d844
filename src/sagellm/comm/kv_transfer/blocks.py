"""Reads chunks from the blocks of an instance, and brings chunks into them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import cast

import numpy as np

from sagellm.comm.kv_transfer.chunks import ChunkSpan, cut_views
from sagellm.comm.kv_transfer.layouts import Agreement, reorder
from sagellm.comm.kv_transfer.options import CodecOf
from sagellm.core.checksums import checksum, copy_with_checksum
from sagellm.core.errors import KVDataError
from sagellm.core.protocols.kv_tiers import BlockBytes, Buffer, KVCodec
from sagellm.core.protocols.kv_transfer import BlockLayout, BlockViews

RAW = "raw"
_SMALL_BYTES = 16 << 10
"""Of a piece: many smaller ones are copied faster by the memory of blocks than one by one."""


class InstanceBlocks:
    """The blocks of an instance, and the codec of its transfers, if any.

    Bytes are encoded as they are on the wire, whose layout may be that of the other side: each has its codec.
    Blocks without views (a GPU's) are copied once on their way, into memory from which a link sends.
    """

    def __init__(
        self, memory: BlockBytes, digest: bytes, layout: BlockLayout | None, codec_of: CodecOf | None = None
    ) -> None:
        self._memory, self.digest, self._layout = memory, digest, layout
        self._codec_of = None if codec_of is None else lru_cache(maxsize=16)(codec_of)
        self.codec_name = RAW if codec_of is None else self._codec().name
        self.bytes_per_block = memory.bytes_per_block
        has_views = getattr(memory, "has_views", False)
        self._views = cast(BlockViews, memory).views if has_views else None
        self._per_block = 0 if self._views is None else len(self._views([0]))
        self._is_in_small_pieces = memory.bytes_per_block < self._per_block * _SMALL_BYTES

    @property
    def has_views(self) -> bool:
        return self._views is not None

    # -- at the sender

    def payload(
        self, ids: Sequence[int], chunk: ChunkSpan, agreed: Agreement, reserved: memoryview | None
    ) -> tuple[str, Sequence[Buffer], int]:
        """The codec, the bytes and the checksum of a chunk, which has blocks `ids`.

        The bytes are in `reserved`, if there is such memory.
        """
        if agreed.codec and not chunk.num_layers:
            whole = self._gathered(ids, agreed)
            encoded = self._codec(agreed).encode(whole)
            is_smaller = memoryview(encoded).nbytes < len(whole)
            codec, found = (agreed.codec, encoded) if is_smaller else (RAW, whole)
            if reserved is None:
                return codec, [found], checksum([found])
            reserved = reserved[: memoryview(found).nbytes]
            return codec, [reserved], copy_with_checksum([reserved], [found])
        if agreed.is_reordered or self._views is None:
            gathered = self._gathered(ids, agreed, reserved)
            return RAW, [gathered], checksum([gathered])
        if reserved is None:
            views = self.views(ids, chunk)
            return RAW, views, checksum(views)
        reserved = reserved[: chunk.num_bytes]
        if self._is_in_small_pieces and chunk.num_bytes == len(ids) * self.bytes_per_block:
            self._memory.read_blocks(ids, reserved)
            return RAW, [reserved], checksum([reserved])
        return RAW, [reserved], copy_with_checksum([reserved], self.views(ids, chunk))

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

    def fill(self, ids: Sequence[int], chunk: ChunkSpan, views: Sequence[memoryview], data: Buffer) -> int:
        """Copy a chunk to its `views` in blocks; returns the checksum of it."""
        if self._is_in_small_pieces and chunk.num_bytes == len(ids) * self.bytes_per_block:
            self._memory.write_blocks(ids, data)
            return checksum(views)
        return copy_with_checksum(views, [data], past_cache=True)

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

    def decoded(self, codec: str, data: memoryview, num_bytes: int, agreed: Agreement) -> memoryview:
        """The blocks in a verified payload. Raises `KVDataError`."""
        if codec == RAW:
            return data
        if codec != self.codec_name:
            raise KVDataError(f"a chunk in codec {codec!r}, which was not agreed on")
        target = scratch(num_bytes)
        self._codec(agreed).decode(data, target)
        return target

    def _codec(self, agreed: Agreement | None = None) -> KVCodec:
        """For the layout on the wire. Raises `ConfigError` if the codec cannot encode these blocks."""
        assert self._codec_of is not None
        wire = None if agreed is None else agreed.wire
        return self._codec_of(self._layout if wire is None else wire)


def scratch(num_bytes: int) -> memoryview:
    """Memory that is not zeroed."""
    return np.empty(num_bytes, np.uint8).data
