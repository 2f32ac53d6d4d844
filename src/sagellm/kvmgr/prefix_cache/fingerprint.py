"""Chained content hashes: the name of a block that other processes, tiers and machines understand.

The hash of a block covers all tokens before it, its own, and the namespace; equal hashes mean equal KV. They
are computed where an event, a tier or a remote asks for one, never on the path of a request.
"""

from __future__ import annotations

from hashlib import blake2b

from sagellm.core.types import TOKEN_BYTES, Namespace, Tokens

HASH_BYTES = 32


def chain(data: bytes, step: int, namespace: Namespace, parent: bytes | None = None) -> list[bytes]:
    """One hash of `HASH_BYTES` per whole block of `step` bytes in `data`, each over the one before it.

    `parent` is the hash of the block in front of `data`; None: `data` is at the beginning of a prompt, and
    the chain begins with the namespace.
    """
    above = parent if parent is not None else _seed(namespace)
    hashes: list[bytes] = []
    for start in range(0, len(data) - step + 1, step):
        above = blake2b(above + data[start : start + step], digest_size=HASH_BYTES).digest()
        hashes.append(above)
    return hashes


def fingerprint(tokens: Tokens, block_size: int, namespace: Namespace = Namespace()) -> list[bytes]:
    """The hashes of all whole blocks of a prompt, in order."""
    return chain(tokens.tobytes(), block_size * TOKEN_BYTES, namespace)


def _seed(namespace: Namespace) -> bytes:
    """Length-prefixed fields: no two namespaces give the same bytes."""
    fields = [field.encode() for field in namespace]
    joined = b"".join(len(field).to_bytes(4, "little") + field for field in fields)
    return blake2b(joined, digest_size=HASH_BYTES).digest()
