"""Prefixes that stay until they are let go, system prompts say; bounded, so that they cannot fill a pool."""

from __future__ import annotations

from sagellm.core.errors import BookkeepingError, CapacityError
from sagellm.core.protocols.prefix_cache import PrefixHit, PrefixReuseIndex


class PinnedPrefixes:
    """Holds of resident prefixes, of at most `max_share` of a pool of `total_blocks` together."""

    def __init__(self, index: PrefixReuseIndex, total_blocks: int, max_share: float) -> None:
        self._index = index
        self._total_blocks = total_blocks
        self._max_share = max_share
        self._hits: list[PrefixHit] = []

    @property
    def num_prefixes(self) -> int:
        return len(self._hits)

    @property
    def num_blocks(self) -> int:
        """Blocks that are held, each counted once."""
        return len({block for hit in self._hits for block in self._index.block_ids(hit)})

    def add(self, wanted: PrefixHit) -> PrefixHit:
        """Hold a hit; raises `CapacityError` where too much would be held."""
        hit = self._index.pin(wanted)
        held = {block for one in (*self._hits, hit) for block in self._index.block_ids(one)}
        limit = int(self._max_share * self._total_blocks)
        if len(held) > limit:
            self._index.unpin(hit)
            raise CapacityError(
                f"pinned prefixes would hold {len(held)} blocks, at most {limit} may be pinned "
                f"(kv.max_pinned_share {self._max_share} of {self._total_blocks})"
            )
        self._hits.append(hit)
        return hit

    def remove(self, hit: PrefixHit) -> None:
        """Give up a hold; an error if it is none."""
        place = next((i for i, one in enumerate(self._hits) if one is hit), None)
        if place is None:
            raise BookkeepingError(f"no pinned prefix of {hit.num_blocks} blocks: it was unpinned before")
        del self._hits[place]
        self._index.unpin(hit)
