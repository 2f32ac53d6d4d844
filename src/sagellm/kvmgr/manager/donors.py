"""Running requests that lend their last, partial block: others of their group copy it (copy-on-write)."""

from __future__ import annotations

from collections.abc import Mapping

from sagellm.core.blocks import Tier
from sagellm.core.plan import BlockCopy, RequestState
from sagellm.core.protocols.prefix_cache import PrefixHit, SharedTail
from sagellm.kvmgr.manager.sequence import SequenceKV


class Donors:
    """By group, the running request that has computed the prompt which the group shares."""

    def __init__(self, sequences: Mapping[str, SequenceKV], block_size: int) -> None:
        self._sequences = sequences
        self._block_size = block_size
        self._by_group: dict[str, SequenceKV] = {}

    def __contains__(self, sequence: SequenceKV) -> bool:
        return bool(self._by_group) and sequence in self._by_group.values()

    def offer(self, group: str, sequence: SequenceKV) -> None:
        """Be the group's donor, if it has none."""
        self._by_group.setdefault(group, sequence)

    def put(self, group: str, sequence: SequenceKV) -> None:
        self._by_group[group] = sequence

    def leave(self, sequence: SequenceKV) -> None:
        for group in [group for group, donor in self._by_group.items() if donor is sequence]:
            del self._by_group[group]

    def lengthen(self, hit: PrefixHit, state: RequestState, limit: int) -> PrefixHit:
        """The hit, and what more the donor of the request's group holds of its next block."""
        group = state.request.group
        donor = self._by_group.get(group) if group is not None else None
        if donor is None or donor.state is state or hit.namespace != donor.hit.namespace:
            return hit
        start = hit.num_tokens
        void = donor.is_windowed and hit.num_blocks < donor.num_shared
        if void or state.tokens.slice(0, start) != donor.state.tokens.slice(0, start):
            return hit
        stop = min(start + self._block_size, limit, donor.state.num_computed)
        mine, theirs = state.tokens.slice(start, stop), donor.state.tokens.slice(start, stop)
        shared = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), len(mine))
        if not shared:
            return hit
        tail = SharedTail(donor.state.request_id, hit.num_blocks, shared)
        return hit._replace(num_tokens=start + shared, tail=tail)

    def copy_of(self, tail: SharedTail, request_id: str) -> BlockCopy:
        """Of the donor's block into the one at the same place of the request."""
        source = self._sequences[tail.request_id].block_ids[tail.position]
        return BlockCopy(Tier.HBM, source, Tier.HBM, self._sequences[request_id].block_ids[tail.position])
