"""How the bytes of KV blocks are stored in tiers below the device.

A codec is one file of this folder, which says `PLUGIN = TheClass`; its name is the file's name and stands in
the headers of blocks (`core/protocols/kv_tiers.py`). It is made with the dtype of the KV, and with
the layout of its blocks where that is known:

    zstd = CODECS.create("zstd", dtype="bfloat16")
    delta = CODECS.create("delta", dtype="bfloat16", layout=layout)

Any damaged input of `decode` raises `KVDataError`, and costs no more memory than a small multiple of a block.
"""

from __future__ import annotations

from sagellm.core.errors import ConfigError, KVDataError, nearest
from sagellm.core.protocols.kv_tiers import KVCodec
from sagellm.core.registry import Registry

BYTES_OF_DTYPE = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}

CODECS: Registry[KVCodec] = Registry("codec", __name__, "sagellm.codecs", KVCodec)


def bytes_of_dtype(dtype: str) -> int:
    """Of one number. Raises `ConfigError` for a dtype that no codec knows."""
    if dtype not in BYTES_OF_DTYPE:
        raise ConfigError(f"codecs know no KV of dtype {dtype!r}.{nearest(dtype, BYTES_OF_DTYPE)}")
    return BYTES_OF_DTYPE[dtype]


def check_size(codec: str, num_bytes: int, expected: int) -> None:
    """Raise `KVDataError` if stored bytes, or the block in them, have another size."""
    if num_bytes != expected:
        raise KVDataError(f"{codec}: {num_bytes} bytes where a block of this size has {expected}")
