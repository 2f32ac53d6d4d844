"""`ZstdCodec`: a byte shuffle, then Zstandard. Lossless.

The shuffle puts the first bytes of all numbers side by side, then the second bytes, and so on. Signs and
exponents of KV repeat and compress well there, mantissas do not. The filter: F. Alted, Why modern CPUs are
starving and what can be done about it, Computing in Science & Engineering 12 (2), 2010 (Blosc).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from sagellm.core.errors import KVDataError, MissingExtraError
from sagellm.core.protocols.kv_tiers import Buffer
from sagellm.kvmgr.kv_pool.tiers.codecs import bytes_of_dtype, check_size

if TYPE_CHECKING:
    import zstandard

LEVEL = 1


class ZstdCodec:
    """Implements `KVCodec`. Each thread has a compressor and a decompressor of its own."""

    name = "zstd"
    is_exact = True
    max_error = 0.0

    def __init__(self, dtype: str) -> None:
        self._width = bytes_of_dtype(dtype)
        self._of_thread = _Contexts()

    def encode(self, data: Buffer) -> Buffer:
        return self._of_thread.compressor.compress(_shuffle(data, self._width))

    def decode(self, data: Buffer, target: memoryview) -> None:
        """Raises `KVDataError`, before memory is taken, for a frame whose content has another size."""
        zstd = self._of_thread.zstd
        try:
            check_size(self.name, zstd.get_frame_parameters(data).content_size, target.nbytes)
            planes = self._of_thread.decompressor.decompress(data, allow_extra_data=False)
        except zstd.ZstdError as error:
            raise KVDataError(f"{self.name}: {error}") from error
        _unshuffle(planes, self._width, target)


class _Contexts(threading.local):
    """Contexts of Zstandard, which are for one thread at a time."""

    def __init__(self) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise MissingExtraError("the codec zstd", "tiers", "zstandard") from error
        self.zstd = zstandard
        self.compressor: zstandard.ZstdCompressor = zstandard.ZstdCompressor(LEVEL, write_content_size=True)
        self.decompressor: zstandard.ZstdDecompressor = zstandard.ZstdDecompressor()


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
