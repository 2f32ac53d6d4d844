"""`verify_folder`: reads every block of a folder, and says by cause what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sagellm.core.protocols.kv_tiers import BlockHash, ReadOutcome
from sagellm.kvmgr.kv_pool.tiers.disk_catalogue import CatalogueRow
from sagellm.kvmgr.kv_pool.tiers.disk_reader import BlockLink, FolderReader, depths

NO_PREFIX = "no_prefix"
"""A block before this one is missing or wrong, so no prompt can reach it."""


@dataclass(slots=True)
class FolderFindings:
    """`num_blocks` blocks of `num_bytes` bytes were read.

    `bad`: the cause by slot, of blocks that no request will use. `num_changed`: blocks that a server replaced
    meanwhile, about which nothing is said. `num_twins`: good blocks that another slot has, too; requests that
    computed the same prompt at once wrote both, and the next start frees one.
    """

    num_blocks: int = 0
    num_bytes: int = 0
    num_changed: int = 0
    num_twins: int = 0
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
    links, found, twins = reader.links(), FolderFindings(), dict[bytes, int]()
    for slot, row in reader.rows():
        found.num_blocks += 1
        outcome = ReadOutcome.CORRUPT if row is None else _outcome(reader, row, block_hash)
        if outcome is None:
            found.num_changed += 1
        elif outcome is not ReadOutcome.OK:
            found.bad[slot] = outcome.value
        elif row is not None:
            found.num_bytes += row.num_bytes
            token_hash = row.block.token_hash
            if token_hash in links and links[token_hash].slot != slot:
                twins[token_hash] = slot
        progress(found.num_blocks, max(found.num_blocks, len(links)))
    found.num_twins = len(twins)
    if unreachable := _unreachable(links, found.bad, twins):
        # A server that writes a damaged block anew takes its row away for an instant.
        unreachable &= _unreachable(reader.links(), found.bad, twins)
    found.bad.update(dict.fromkeys(unreachable, NO_PREFIX))
    return found


def _outcome(reader: FolderReader, row: CatalogueRow, block_hash: BlockHash) -> ReadOutcome | None:
    """What reading a block says; None if a server has changed it meanwhile."""
    block = row.block
    if len(block.tokens) != reader.token_bytes or block_hash(block) != block.token_hash:
        return ReadOutcome.OTHER_TOKENS
    read = reader.read(row)
    return None if read is None else read.outcome


def _unreachable(
    links: Mapping[bytes, BlockLink], bad: Mapping[int, str], twins: Mapping[bytes, int]
) -> set[int]:
    """Slots of blocks whose prefix is not there. A good twin stands in for a bad block."""
    good = {key: link for key, link in links.items() if link.slot not in bad or key in twins}
    depth = depths(good)
    return {link.slot for key, link in good.items() if not depth[key]} - bad.keys()
