"""Reads chunks from the blocks of an instance, and brings chunks into them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, cast

import numpy as np

from sagellm.comm.kv_transfer.chunks import ChunkSpan, cut_views
from sagellm.comm.kv_transfer.layouts import Agreement, reorder
from sagellm.comm.kv_transfer.options import CodecOf
from sagellm.core.checksums import checksums, copy_with_checksums
from sagellm.core.errors import KVDataError
from sagellm.core.protocols.kv_tiers import BlockBytes, Buffer, KVCodec
from sagellm.core.protocols.kv_transfer import BlockLayout, BlockViews

if TYPE_CHECKING:
    from sagellm.core.shared_pages import SharedPages

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
        self.shared_pages: SharedPages | None = getattr(memory, "shared_pages", None)

    @property
    def has_views(self) -> bool:
        return self._views is not None

    # -- at the sender

    def lies_in_shared_pages(self, agreed: Agreement) -> bool:
        """Whether the receiver may take chunks from there. Small pieces are gathered first: each is named."""
        return agreed.goes_unchanged and self.shared_pages is not None and not self._is_in_small_pieces

    def payload(
        self, ids: Sequence[Sequence[int]], chunks: Sequence[ChunkSpan], agreed: Agreement,
        reserved: Sequence[memoryview] | None,
    ) -> tuple[str, Sequence[memoryview], Sequence[int]]:  # fmt: skip
        """The codec, the bytes and the checksums of chunks.

        `ids`: the blocks of each chunk. Chunks whose bytes change come one by one. The bytes are in
        `reserved`, if there is such memory.
        """
        is_encoded = agreed.codec and not chunks[0].num_layers
        if is_encoded or agreed.is_reordered or self._views is None:
            made = self._encoded if is_encoded else self._whole
            return made(ids[0], agreed, None if reserved is None else reserved[0])
        pieces = [self.views(each, chunk) for each, chunk in zip(ids, chunks, strict=True)]
        if reserved is None:
            return RAW, list(chain.from_iterable(pieces)), checksums(pieces)
        payload = [memory[: chunk.num_bytes] for memory, chunk in zip(reserved, chunks, strict=True)]
        targets = [[memory] for memory in payload]
        if self._is_in_small_pieces and self._are_whole(ids, chunks):
            for each, memory in zip(ids, payload, strict=True):
                self._memory.read_blocks(each, memory)
            return RAW, payload, checksums(targets)
        return RAW, payload, copy_with_checksums(list(zip(targets, pieces, strict=True)))

    def _whole(
        self, ids: Sequence[int], agreed: Agreement, reserved: memoryview | None
    ) -> tuple[str, Sequence[memoryview], Sequence[int]]:
        gathered = [self._gathered(ids, agreed, reserved)]
        return RAW, gathered, checksums([gathered])

    def _encoded(
        self, ids: Sequence[int], agreed: Agreement, reserved: memoryview | None
    ) -> tuple[str, Sequence[memoryview], Sequence[int]]:
        whole = self._gathered(ids, agreed)
        encoded = memoryview(self._codec(agreed).encode(whole)).cast("B")
        is_smaller = len(encoded) < len(whole)
        codec, found = (agreed.codec, encoded) if is_smaller else (RAW, whole)
        if reserved is None:
            return codec, [found], checksums([[found]])
        reserved = reserved[: len(found)]
        return codec, [reserved], copy_with_checksums([([reserved], [found])])

    def _are_whole(self, ids: Sequence[Sequence[int]], chunks: Sequence[ChunkSpan]) -> bool:
        """Whether the chunks are of whole blocks."""
        num_bytes = sum(chunk.num_bytes for chunk in chunks)
        return num_bytes == sum(map(len, ids)) * self.bytes_per_block

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

    def views(self, ids: Sequence[int], chunk: ChunkSpan) -> Sequence[memoryview]:
        """The memory of a chunk in its blocks."""
        assert self._views is not None
        views = self._views(ids)
        if chunk.num_bytes == len(ids) * self.bytes_per_block:
            return views
        return cut_views(views, self._per_block, chunk.spans)

    def fill(
        self, ids: Sequence[Sequence[int]], chunks: Sequence[ChunkSpan],
        views: Sequence[Sequence[memoryview]], data: Sequence[Sequence[memoryview]],
    ) -> list[int]:  # fmt: skip
        """Copy chunks to their `views` in blocks; returns the checksum of each."""
        if self._is_in_small_pieces and self._are_whole(ids, chunks):
            for each, parts in zip(ids, data, strict=True):
                self._memory.write_blocks(each, parts[0] if len(parts) == 1 else b"".join(parts))
            return checksums(views)
        return copy_with_checksums(list(zip(views, data, strict=True)), past_cache=True)

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
