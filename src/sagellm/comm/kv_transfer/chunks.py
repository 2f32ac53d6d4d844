"""Cuts blocks into chunks. Both sides make the same list; a chunk is a number in it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from sagellm.core.protocols.kv_transfer import BlockLayout

Span = tuple[int, int]
"""Bytes `[start, stop)` of a block."""


class ChunkSpan(NamedTuple):
    """Blocks `[first, stop)` of a transfer, of each the bytes `spans`: `num_bytes` in all.

    `num_layers`: how many layers must be computed before it can be sent.
    """

    first: int
    stop: int
    spans: tuple[Span, ...]
    num_bytes: int
    num_layers: int = 0

    @classmethod
    def of(cls, first: int, stop: int, spans: tuple[Span, ...], num_layers: int = 0) -> ChunkSpan:
        num_bytes = (stop - first) * sum(end - start for start, end in spans)
        return cls(first, stop, spans, num_bytes, num_layers)


def cut(num_blocks: int, block_bytes: int, chunk_bytes: int, *, has_views: bool) -> list[ChunkSpan]:
    """Runs of whole blocks, of at most `chunk_bytes`.

    A larger block is cut into such parts where both sides have views, and is a chunk by itself otherwise.
    """
    per_chunk = max(1, chunk_bytes // block_bytes)
    step = chunk_bytes if has_views and block_bytes > chunk_bytes else block_bytes
    return [
        ChunkSpan.of(first, min(first + per_chunk, num_blocks), ((start, min(start + step, block_bytes)),))
        for first in range(0, num_blocks, per_chunk)
        for start in range(0, block_bytes, step)
    ]


def cut_by_layer(num_blocks: int, layout: BlockLayout, chunk_bytes: int) -> list[ChunkSpan]:
    """Runs of blocks of the first layer, then of the second, and so on."""
    chunks: list[ChunkSpan] = []
    for layer in range(layout.num_layers):
        spans = layer_spans(layout, layer)
        per_chunk = max(1, chunk_bytes // sum(stop - start for start, stop in spans))
        chunks += [
            ChunkSpan.of(first, min(first + per_chunk, num_blocks), spans, layer + 1)
            for first in range(0, num_blocks, per_chunk)
        ]
    return chunks


def layer_spans(layout: BlockLayout, layer: int) -> tuple[Span, ...]:
    """Where a layer lies in a block: once, or keys and values apart."""
    names = layout.axes.split(".")[:2]
    size = layout.bytes_per_block // (2 * layout.num_layers)
    if names == ["layer", "kv"]:
        return ((2 * layer * size, 2 * (layer + 1) * size),)
    keys, values = layer, layout.num_layers + layer
    return ((keys * size, (keys + 1) * size), (values * size, (values + 1) * size))


def can_cut_by_layer(layout: BlockLayout | None) -> bool:
    """Whether layers lie together in a block of this layout."""
    return layout is not None and set(layout.axes.split(".")[:2]) == {"layer", "kv"}


def cut_views(views: Sequence[memoryview], per_block: int, spans: Sequence[Span]) -> list[memoryview]:
    """The parts `spans` of each block, whose memory are `per_block` views each."""
    pieces = _pieces(tuple(map(len, views[:per_block])), tuple(spans))
    return [
        views[block + number][low:high]
        for block in range(0, len(views), per_block)
        for number, low, high in pieces
    ]


@lru_cache(maxsize=1024)
def _pieces(sizes: Sequence[int], spans: Sequence[Span]) -> list[tuple[int, int, int]]:
    """Which views of a block have bytes of the spans, and which bytes.

    `sizes`: of the views.
    """
    pieces: list[tuple[int, int, int]] = []
    for start, stop in spans:
        begin = 0
        for number, size in enumerate(sizes):
            low, high = max(start, begin), min(stop, begin + size)
            if low < high:
                pieces.append((number, low - begin, high - begin))
            begin += size
    return pieces
