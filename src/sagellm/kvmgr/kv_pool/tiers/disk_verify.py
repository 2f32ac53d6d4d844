"""`verify_folder`: reads every block of a folder, and says by cause what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sagellm.core.protocols.kv_tiers import ReadOutcome
from sagellm.kvmgr.kv_pool.tiers.disk_catalogue import CatalogueRow
from sagellm.kvmgr.kv_pool.tiers.disk_reader import BlockHash, BlockLink, FolderReader, depths

NO_PREFIX = "no_prefix"
"""A block before this one is missing or wrong, so no prompt can reach it."""
TWICE = "twice"
"""Another slot has the same block, and was used later."""


@dataclass(slots=True)
class FolderFindings:
    """`num_blocks` blocks of `num_bytes` bytes were read.

    `bad`: the cause by slot, of blocks that no request will use. `num_changed`: blocks that a server replaced
    meanwhile, about which nothing is said.
    """

    num_blocks: int = 0
    num_bytes: int = 0
    num_changed: int = 0
    bad: dict[int, str] = field(default_factory=dict)

    @property
    def causes(self) -> Counter[str]:
        return Counter(self.bad.values())


def verify_folder(
    reader: FolderReader,
    block_hash: BlockHash,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> FolderFindings:
    """Check header, checksum, tokens and prefix of every block.

    Payloads are compared with their checksums and not decoded. Memory: about 300 bytes for each block, and
    one block. `progress` gets the blocks read and their total.
    """
    links, found = reader.links(), FolderFindings()
    for slot, row in reader.rows():
        found.num_blocks += 1
        cause = ReadOutcome.CORRUPT.value if row is None else _cause(reader, row, links, block_hash)
        if cause is None:
            found.num_changed += 1
        elif cause != ReadOutcome.OK.value:
            found.bad[slot] = cause
        elif row is not None:
            found.num_bytes += row.num_bytes
        progress(found.num_blocks, max(found.num_blocks, len(links)))
    if unreachable := _unreachable(links, found.bad):
        # A server that writes a damaged block anew takes its row away for an instant.
        unreachable &= _unreachable(reader.links(), found.bad)
    found.bad.update(dict.fromkeys(unreachable, NO_PREFIX))
    return found


def _cause(
    reader: FolderReader, row: CatalogueRow, links: Mapping[bytes, BlockLink], block_hash: BlockHash
) -> str | None:
    """What is wrong with a block, or "ok"; None if a server has changed it meanwhile."""
    block = row.block
    if len(block.tokens) != reader.token_bytes or block_hash(block) != block.token_hash:
        return ReadOutcome.OTHER_TOKENS.value
    link = links.get(block.token_hash)
    if link is not None and link.slot != block.slot:
        other = reader.row(link.slot)
        if other is not None and other.block.token_hash == block.token_hash:
            return TWICE
    read = reader.read(row)
    return None if read is None else read.outcome.value


def _unreachable(links: Mapping[bytes, BlockLink], bad: Mapping[int, str]) -> set[int]:
    """Slots of blocks whose prefix is not there, apart from bad ones."""
    good = {token_hash: link for token_hash, link in links.items() if link.slot not in bad}
    depth = depths(good)
    return {link.slot for token_hash, link in good.items() if not depth[token_hash]}
