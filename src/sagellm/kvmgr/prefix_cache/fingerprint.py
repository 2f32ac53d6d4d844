"""Chained content hashes: names of blocks that are equal in every process.

The hash of a block covers all tokens before it, its own, and the namespace; equal hashes mean equal KV. They
are computed where an event or a tier needs one, never on the path of a request.
"""

from __future__ import annotations

from hashlib import blake2b

from sagellm.core.protocols.kv_tiers import StoredBlock
from sagellm.core.types import TOKEN_BYTES, Namespace, Tokens

HASH_BYTES = 32


def chain(data: bytes, block_bytes: int, namespace: Namespace, parent: bytes | None = None) -> list[bytes]:
    """One hash per whole block of `block_bytes` bytes, chained.

    A hash has `HASH_BYTES` bytes. `parent` is the hash of the block in front of `data`; None: `data` is the
    beginning of a prompt, and the chain begins with the namespace.
    """
    if parent is None:  # length-prefixed fields: no two namespaces give the same bytes
        fields = [field.encode() for field in namespace]
        joined = b"".join(len(field).to_bytes(4, "little") + field for field in fields)
        parent = blake2b(joined, digest_size=HASH_BYTES).digest()
    hashes: list[bytes] = []
    for start in range(0, len(data) - block_bytes + 1, block_bytes):
        parent = blake2b(parent + data[start : start + block_bytes], digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return hashes


def block_hash(block: StoredBlock) -> bytes:
    """The hash that a stored block must have. Empty for one without tokens."""
    if not block.tokens:
        return b""
    return chain(block.tokens, len(block.tokens), block.namespace, block.parent or None)[0]


def fingerprint(tokens: Tokens, block_size: int, namespace: Namespace = Namespace()) -> list[bytes]:
    """The hashes of all whole blocks of a prompt, in order."""
    return chain(tokens.tobytes(), block_size * TOKEN_BYTES, namespace)
