"""`RawCodec`: blocks as they are."""

from __future__ import annotations

import numpy as np

from sagellm.core.protocols.kv_tiers import Buffer
from sagellm.core.protocols.kv_transfer import BlockLayout
from sagellm.kvmgr.kv_pool.tiers.codecs import bytes_of_dtype, check_size


class RawCodec:
    """Implements `KVCodec` without any change of the bytes."""

    name = "raw"
    is_exact = True
    max_error = 0.0

    def __init__(self, dtype: str, layout: BlockLayout | None = None) -> None:
        bytes_of_dtype(dtype)

    def encode(self, data: Buffer) -> Buffer:
        """`data` itself, not a copy."""
        return data

    def decode(self, data: Buffer, target: memoryview) -> None:
        view = memoryview(data).cast("B")
        check_size(self.name, len(view), target.nbytes)
        # A slice of a memoryview would be copied under the interpreter's lock.
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(view, np.uint8))


PLUGIN = RawCodec
