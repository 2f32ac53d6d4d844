"""Folders of a real `DiskStorage` whose blocks have real hashes: paths of tokens of a tenant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sagellm.core.protocols.kv_tiers import BlockFormat, StoredBlock
from sagellm.core.types import TOKEN_BYTES, Namespace, Tokens
from sagellm.kvmgr.prefix_cache.fingerprint import chain
from tests.kvmgr.tiers.storages.stored_blocks import BLOCK_BYTES, open_disk, write

BLOCK_TOKENS = 4
DETAILED = BlockFormat(b"weights of tests", BLOCK_BYTES, {"dtype": "float32", "block_size": "4"})


def path_blocks(tenant: str, numbers: Sequence[int], slot: int = 0, used_s: float = 1.0) -> list[StoredBlock]:
    """A path with a block for each number, in adjacent slots."""
    namespace = Namespace(tenant, "model", "", "")
    data = [Tokens([number] * BLOCK_TOKENS).tobytes() for number in numbers]
    hashes = chain(b"".join(data), BLOCK_TOKENS * TOKEN_BYTES, namespace)
    return [
        StoredBlock(slot + place, token_hash, hashes[place - 1] if place else b"", namespace, tokens, used_s)
        for place, (token_hash, tokens) in enumerate(zip(hashes, data, strict=True))
    ]


def two_tenants() -> list[StoredBlock]:
    """Ten blocks: a path of four and one that leaves it behind the second, and a path of another tenant."""
    first = path_blocks("a", [1, 2, 3, 4], used_s=1000.0)
    fork = path_blocks("a", [1, 2, 7, 8], slot=2, used_s=2000.0)[2:]
    other = path_blocks("b", [1, 2, 3, 4], slot=6, used_s=1500.0)
    return [*first, *fork, *other]


def make_folder(
    folder: Path, blocks: Sequence[StoredBlock] | None = None, num_slots: int = 16, **options: Any
) -> list[StoredBlock]:
    """Write blocks as a server does, and close the folder. Returns them."""
    blocks = two_tenants() if blocks is None else blocks
    storage = open_disk(folder, num_slots, **{"block_format": DETAILED, **options})
    storage.recover()
    if blocks:
        write(storage, *blocks)
    storage.close()
    return list(blocks)
