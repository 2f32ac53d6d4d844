"""`ZstdCodec`: a byte shuffle, then Zstandard. Lossless.

The shuffle puts the first bytes of all numbers side by side, then the second bytes, and so on. Signs and
exponents of KV repeat and compress well there, mantissas do not. The filter: F. Alted, Why modern CPUs are
starving and what can be done about it, Computing in Science & Engineering 12 (2), 2010 (Blosc).
"""

from __future__ import annotations

import numpy as np

from sagellm.core.protocols.kv_tiers import Buffer
from sagellm.core.protocols.kv_transfer import BlockLayout
from sagellm.kvmgr.kv_pool.tiers.codecs import bytes_of_dtype
from sagellm.kvmgr.kv_pool.tiers.codecs._frames import ZstdFrames


class ZstdCodec:
    """Implements `KVCodec` for blocks of any layout."""

    name = "zstd"
    is_exact = True
    max_error = 0.0

    def __init__(self, dtype: str, layout: BlockLayout | None = None) -> None:
        self._width = bytes_of_dtype(dtype)
        self._frames = ZstdFrames(self.name)

    def encode(self, data: Buffer) -> Buffer:
        return self._frames.compress(_shuffle(data, self._width))

    def decode(self, data: Buffer, target: memoryview) -> None:
        """Raises `KVDataError`, before memory is taken, for a frame whose content has another size."""
        _unshuffle(self._frames.decompress(data, target.nbytes), self._width, target)


def _shuffle(data: Buffer, width: int) -> bytes | memoryview:
    """First bytes of all numbers, then second ones, ... An incomplete number stays last."""
    source = np.frombuffer(data, np.uint8)
    whole = len(source) - len(source) % width
    planes = np.empty_like(source)
    for place in range(width):
        planes[:whole].reshape(width, -1)[place] = source[place:whole:width]
    planes[whole:] = source[whole:]
    return planes.data


def _unshuffle(planes: bytes, width: int, target: memoryview) -> None:
    source, numbers = np.frombuffer(planes, np.uint8), np.frombuffer(target, np.uint8)
    whole = len(source) - len(source) % width
    for place in range(width):  # a copy of the transposed array takes five times as long
        numbers[place:whole:width] = source[:whole].reshape(width, -1)[place]
    numbers[whole:] = source[whole:]


PLUGIN = ZstdCodec
