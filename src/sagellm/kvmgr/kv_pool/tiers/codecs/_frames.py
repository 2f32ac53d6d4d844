"""`ZstdFrames`: Zstandard, with contexts of each thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from sagellm.core.errors import KVDataError, MissingExtraError
from sagellm.core.protocols.kv_tiers import Buffer
from sagellm.kvmgr.kv_pool.tiers.codecs import check_size

if TYPE_CHECKING:
    import zstandard


class ZstdFrames(threading.local):
    """Compresses at level 1 and decompresses, for any threads.

    Contexts of Zstandard are for one thread at a time. `codec`: its name, for errors. `parameters` of the
    library take the place of those of the level. Raises `MissingExtraError` without `zstandard`.
    """

    def __init__(self, codec: str, **parameters: int) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise MissingExtraError(f"the codec {codec}", "tiers", "zstandard") from error
        self._codec, self._zstd = codec, zstandard
        chosen = zstandard.ZstdCompressionParameters.from_level(1, write_content_size=True, **parameters)
        self._compressor: zstandard.ZstdCompressor = zstandard.ZstdCompressor(compression_params=chosen)
        self._decompressor: zstandard.ZstdDecompressor = zstandard.ZstdDecompressor()

    def compress(self, data: Buffer) -> bytes:
        return self._compressor.compress(data)

    def decompress(self, data: Buffer, num_bytes: int) -> bytes:
        """The content of a frame. Raises `KVDataError`, before memory is taken, if it has another size."""
        try:
            check_size(self._codec, self._zstd.get_frame_parameters(data).content_size, num_bytes)
            return self._decompressor.decompress(data, allow_extra_data=False)
        except self._zstd.ZstdError as error:
            raise KVDataError(f"{self._codec}: {error}") from error
