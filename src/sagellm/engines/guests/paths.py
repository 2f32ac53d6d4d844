"""Prompts as paths of block hashes.

Another engine (the host) names a block by a hash that covers all tokens up to its end. The first 16 bytes of
such a hash stand for the block in our prefix index: four int32 "tokens" each. So the host's tokens, salts and
adapters need not be known, and the index compares paths as memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from sagellm.core.clock import Clock
from sagellm.core.protocols.eviction import PolicyFactory
from sagellm.core.types import TOKEN_BYTES, Tokens
from sagellm.kvmgr.prefix_cache.radix import RadixIndex

DIGEST_BYTES = 16
TOKENS_PER_DIGEST = DIGEST_BYTES // TOKEN_BYTES
Digests: TypeAlias = Sequence[bytes]
"""One hash for each block, from the first block of a prompt on."""


def path_of(digests: Digests) -> Tokens:
    """The path in an index of `index_of_digests`.

    Raises `ValueError` where a hash has fewer than 16 bytes.
    """
    data = b"".join([digest[:DIGEST_BYTES] for digest in digests])
    if len(data) != DIGEST_BYTES * len(digests):
        raise ValueError(f"a block hash must have at least {DIGEST_BYTES} bytes")
    return Tokens.frombytes(data)


def index_of_digests(policy_factory: PolicyFactory, clock: Clock) -> RadixIndex:
    """An empty prefix index whose blocks are named by hashes of the host."""
    return RadixIndex(TOKENS_PER_DIGEST, clock=clock, policy_factory=policy_factory)
