"""How requests share KV: through the prefix index, and within a group."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from hashlib import blake2b
from typing import NamedTuple

from sagellm.core.blocks import NO_PAGE
from sagellm.core.errors import BookkeepingError, CapacityError
from sagellm.core.plan import BlockCopy, RequestState
from sagellm.core.protocols.kv_pool import KVPool
from sagellm.core.protocols.prefix_cache import InsertResult, PrefixHit, PrefixReuseIndex, SharedTail
from sagellm.core.types import BlockIds, Namespace
from sagellm.kvmgr.manager.page_groups import PageGroups
from sagellm.kvmgr.manager.tables import INDEX_OWNER, BlockTables, RequestBlocks, free_leading

DUPLICATES = "duplicates"
GROUP_PREFIX = "\0group:"
"""No tenant's name begins like this: `Request` refuses NUL in it."""
KEPT_SHARE = 0.5
"""Of the pool, at most so much is kept for requests that are not admitted yet."""


class SharingGroups:
    """Tenants that share their cache, by the name of their group.

    Its namespace has a digest of its members: tiers keep blocks longer than one configuration lasts, and
    share them with instances that have another.
    """

    def __init__(self, group_of: Mapping[str, str]) -> None:
        members: dict[str, list[str]] = {}
        for tenant, group in sorted(group_of.items()):
            members.setdefault(group, []).append(tenant)
        digests = {group: blake2b(repr(names).encode(), digest_size=16) for group, names in members.items()}
        self._shared = {
            tenant: f"{GROUP_PREFIX}{group}:{digests[group].hexdigest()}"
            for tenant, group in group_of.items()
        }

    def namespace_of(self, namespace: Namespace) -> Namespace:
        """The namespace in the index: tenants of one sharing group have one together."""
        shared = self._shared.get(namespace.tenant)
        return namespace if shared is None else namespace._replace(tenant=shared)


class Publication(NamedTuple):
    """What a request has published of its first `num_tokens` tokens.

    `hit` and `num_shared` are those from before. `result` is None where the index had equal blocks, so that
    nothing was published.
    """

    num_tokens: int
    result: InsertResult | None
    hit: PrefixHit
    num_shared: int


class PrefixRegistrar:
    """Moves blocks of running requests into the index, when they are computed or before.

    Publishing blocks that are bound and not yet computed is right because a backend writes the KV of all
    chunks of a step, layer by layer, before any of them attends to it. Only strategies with early binding
    (`vllm-like`) and steps that are planned ahead use it. `num_changes` counts changes of the index.
    """

    def __init__(
        self,
        index: PrefixReuseIndex,
        pool: KVPool,
        tables: BlockTables,
        groups: SharingGroups,
        pages: PageGroups | None = None,
        *,
        prefix_caching: bool = True,
    ) -> None:
        self._index = index
        self._pool = pool
        self._tables = tables
        self._groups = groups
        self._pages = pages
        self._prefix_caching = prefix_caching
        self._published: dict[str, list[Publication]] = {}
        self.num_changes = 0

    def register(self, blocks: RequestBlocks, num_tokens: int) -> InsertResult | None:
        """Move the whole blocks of the first `num_tokens` tokens into the index.

        Only those that are exact. Returns None if there are no new ones. Where the index has equal blocks of
        another request, this request goes on with those; its own duplicates are freed.
        """
        block_size, shared = self._pool.block_size, blocks.num_shared
        num_tokens = min(num_tokens, blocks.num_exact)
        if self._pages is not None and self._pages.checkpoints is not None and self._prefix_caching:
            num_tokens = self._pages.checkpoints.deepest(blocks, num_tokens)
        whole = num_tokens // block_size
        if not self._prefix_caching or blocks.is_windowed or whole <= shared:
            return None
        self.num_changes += 1
        state, table, request = blocks.state, blocks.block_ids, blocks.state.request
        result = self._index.insert(
            state.tokens,
            table[:whole],
            self._groups.namespace_of(request.namespace),
            account=blocks.own.account,
            retention=request.retention if shared * block_size < state.num_prompt_tokens else (),
            pin=True,
        )
        existing = max(result.num_existing, shared)
        pages: list[BlockIds] = []
        try:
            if self._pages is not None:
                self._pages.hand_over(blocks, whole, pages)
            self._hand_over(blocks, existing - shared, whole - shared)
        except Exception:
            if self._pages is not None:
                self._pages.hand_back(blocks, pages)
            self._index.retract(result)
            raise
        blocks.hit, blocks.num_shared = result.hit, whole
        if existing > shared:
            table[:whole] = self._index.block_ids(result.hit)
            self._tables.mark_unsent(blocks, shared)
        if self._pages is not None:
            self._pages.registered(blocks, pages, shared, existing)
        return result

    def _hand_over(self, blocks: RequestBlocks, num_duplicates: int, num_whole: int) -> None:
        """Hand the first `num_whole` own blocks to the index, but free the duplicates.

        What the old hit pinned, the new one pins too.
        """
        own = blocks.own
        self._index.unpin(blocks.hit)
        try:
            entered = self._pool.hand_over(own, num_duplicates, num_whole, INDEX_OWNER)
            try:
                free_leading(self._pool, own, num_duplicates, DUPLICATES)
            except Exception:
                self._pool.hand_back(INDEX_OWNER, entered, own, num_duplicates)
                raise
        except Exception:
            blocks.hit = self._index.pin(blocks.hit)
            raise

    # -- before the blocks are computed

    def is_published(self, request_id: str) -> bool:
        """Whether `publish` was called and what it published is not computed yet."""
        return request_id in self._published

    def publish(self, blocks: RequestBlocks, num_tokens: int) -> None:
        """Move blocks of the first `num_tokens` tokens into the index before they are computed.

        Not where the index has equal ones: the blocks become one with those once they are computed.
        """
        state, hit, num_shared = blocks.state, blocks.hit, blocks.num_shared
        known = self._index.lookup(state.tokens, hit.namespace, num_tokens).num_blocks > num_shared
        result = None if known else self.register(blocks, num_tokens)
        publications = self._published.setdefault(state.request_id, [])
        publications.append(Publication(num_tokens, result, hit, num_shared))

    def confirm(self, request_id: str) -> bool:
        """The oldest publication of the request is computed; returns whether there was one."""
        if not self.is_published(request_id):
            return False
        self._pop(request_id, 0)
        return True

    def unpublish(self, blocks: RequestBlocks, start: int) -> None:
        """Undo `publish` of a chunk that starts at token `start`, if it published anything.

        Whatever came to use the blocks since must have been undone before.
        """
        request_id = blocks.state.request_id
        publications = self._published.get(request_id)
        if publications is None or publications[-1].num_tokens <= start:  # that of an earlier chunk stands
            return
        last = self._pop(request_id, -1)
        if last.result is None:
            return
        self.num_changes += 1
        entered = blocks.block_ids[last.num_shared : blocks.num_shared]
        blocks.hit = self._index.pin(last.hit)
        self._index.retract(last.result)
        self._pool.hand_back(INDEX_OWNER, entered, blocks.own, 0)
        blocks.num_shared = last.num_shared

    def unpublish_all(self, blocks: RequestBlocks) -> None:
        """Undo all publications of a request, up to one whose blocks others use."""
        while self.is_published(blocks.state.request_id):
            hit = blocks.hit
            try:
                self.unpublish(blocks, 0)
            except BookkeepingError:
                self._index.unpin(blocks.hit)
                blocks.hit = hit
                return

    def forget(self, request_id: str) -> None:
        """The request has left the batch."""
        self._published.pop(request_id, None)

    def check(self) -> None:
        """Raise `BookkeepingError` where a request that is not running has publications."""
        for request_id in self._published:
            if request_id not in self._tables:
                raise BookkeepingError(f"{request_id} has published blocks and is not running")

    def _pop(self, request_id: str, index: int) -> Publication:
        publications = self._published[request_id]
        publication = publications.pop(index)
        if not publications:
            del self._published[request_id]
        return publication


class SharedTails:
    """By group, the running request whose last, partial block others copy.

    The copy is made when the other request is admitted, since that is when it writes (copy-on-write).
    """

    def __init__(self, tables: BlockTables, block_size: int) -> None:
        self._tables = tables
        self._block_size = block_size
        self._by_group: dict[str, RequestBlocks] = {}

    def donors(self) -> set[RequestBlocks]:
        """The requests whose last block is shared."""
        return set(self._by_group.values())

    def __contains__(self, blocks: RequestBlocks) -> bool:
        return bool(self._by_group) and blocks in self._by_group.values()

    def offer(self, group: str, blocks: RequestBlocks, *, replace: bool = False) -> None:
        """Let the group copy the last block of this request.

        `replace`: also if the group has another request for that.
        """
        if replace or group not in self._by_group:
            self._by_group[group] = blocks

    def remove(self, blocks: RequestBlocks) -> None:
        """The request leaves the batch."""
        for group in [group for group, donor in self._by_group.items() if donor is blocks]:
            del self._by_group[group]

    def extend_hit(self, hit: PrefixHit, state: RequestState, limit: int) -> PrefixHit:
        """Extend a hit by the tokens of its next block that its group shares."""
        group = state.request.group
        donor = self._by_group.get(group) if group is not None else None
        if donor is None or donor.state is state or hit.namespace != donor.hit.namespace:
            return hit
        start = hit.num_tokens
        freed = donor.is_windowed and hit.num_blocks < donor.num_shared
        if freed or state.tokens.slice(0, start) != donor.state.tokens.slice(0, start):
            return hit
        stop = min(start + self._block_size, limit, donor.state.num_computed, donor.num_exact)
        mine, theirs = state.tokens.slice(start, stop), donor.state.tokens.slice(start, stop)
        shared = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), len(mine))
        if not shared:
            return hit
        tail = SharedTail(donor.state.request_id, hit.num_blocks, shared)
        if not self.can_copy(tail):
            return hit
        return dataclasses.replace(hit, num_tokens=start + shared, tail=tail)

    def can_copy(self, tail: SharedTail) -> bool:
        """Whether the request still runs, and its windows keep this block for its group."""
        if tail.request_id not in self._tables:
            return False
        donor = self._tables[tail.request_id]
        if not donor.pages:
            return donor.block_ids[tail.position] != NO_PAGE
        return (
            donor in self
            and tail.position == donor.num_shared
            and NO_PAGE not in donor.blocks_at(tail.position)
        )

    def copies_of(self, tail: SharedTail, request_id: str) -> list[BlockCopy]:
        """The copies of the shared block to the same index of the request's tables."""
        donor, request = self._tables[tail.request_id], self._tables[request_id]
        pairs = zip(donor.blocks_at(tail.position), request.blocks_at(tail.position), strict=True)
        return [BlockCopy(source, target) for source, target in pairs]

    def check(self) -> None:
        """Raise `BookkeepingError` where a request that is not running shares its last block."""
        for group, blocks in self._by_group.items():
            if self._tables.find(blocks.state) is not blocks:
                name = blocks.state.request_id
                raise BookkeepingError(f"group {group!r} shares the last block of {name}, which has left")


class PinnedPrefixes:
    """Prefixes that stay in the index until they are unpinned (system prompts).

    Together they hold at most `max_share` of a pool of `total_blocks`. Each needs `blocks_of_state` for the
    recurrent state behind it. `num_changes` counts pins and unpins. `num_sent`: prefixes that are being sent
    to other instances, which have no such limit; blocks keep their ids until it is 0. `num_kept`: blocks of
    prefixes that have come for requests which are not admitted yet, each counted for each of them.
    """

    def __init__(
        self, index: PrefixReuseIndex, total_blocks: int, max_share: float, blocks_of_state: int = 0
    ) -> None:
        self._index = index
        self._total_blocks = total_blocks
        self._max_share = max_share
        self._blocks_of_state = blocks_of_state
        self.hits: list[PrefixHit] = []
        self.num_changes = self.num_sent = self.num_kept = 0
        self._kept: dict[str, PrefixHit] = {}

    def __contains__(self, hit: PrefixHit) -> bool:
        return any(pinned is hit for pinned in self.hits)

    @property
    def num_prefixes(self) -> int:
        return len(self.hits)

    @property
    def num_blocks(self) -> int:
        """Pinned blocks, each counted once, and those of the states behind the prefixes."""
        paths = [ids for ids in map(self._index.block_ids, self.hits) if ids]
        states = len({ids[-1] for ids in paths}) * self._blocks_of_state
        return states + len({block for ids in paths for block in ids})

    def add(self, wanted: PrefixHit) -> PrefixHit:
        """Pin a hit. Raises `CapacityError` if too much would be pinned."""
        hit = self._index.pin(wanted)
        self.num_changes += 1
        self.hits.append(hit)
        num_blocks, limit = self.num_blocks, int(self._max_share * self._total_blocks)
        if num_blocks > limit:
            self.hits.pop()
            self._index.unpin(hit)
            raise CapacityError(
                f"pinned prefixes would hold {num_blocks} blocks, at most {limit} may be pinned "
                f"(kv.max_pinned_share {self._max_share} of {self._total_blocks})"
            )
        return hit

    def remove(self, hit: PrefixHit) -> None:
        """Unpin a hit that `add` returned. Raises `BookkeepingError` for any other."""
        index = next((i for i, pinned in enumerate(self.hits) if pinned is hit), None)
        if index is None:
            raise BookkeepingError(f"no pinned prefix of {hit.num_blocks} blocks: it was unpinned before")
        self.num_changes += 1
        del self.hits[index]
        self._index.unpin(hit)

    def hold(self, wanted: PrefixHit) -> PrefixHit:
        """Pin a hit while it is being sent."""
        self.num_changes += 1
        self.num_sent += 1
        return self._index.pin(wanted, is_use=False)

    def let_go(self, hit: PrefixHit) -> None:
        """Unpin a hit that `hold` returned."""
        self._index.unpin(hit, is_use=False)
        self.num_changes += 1
        self.num_sent -= 1

    def keep(self, name: str, wanted: PrefixHit) -> bool:
        """Pin what has come for a request, until `drop` or `give_way`.

        In place of what was kept under its name. False, and nothing is kept under it, where all that is kept
        would hold more than `KEPT_SHARE`.
        """
        self.drop(name)
        num_kept = self.num_kept + wanted.num_blocks
        if num_kept > KEPT_SHARE * self._total_blocks:
            return False
        self._kept[name], self.num_kept = self._index.pin(wanted, is_use=False), num_kept
        self.num_changes += 1
        return True

    def drop(self, name: str) -> None:
        """Unpin what is kept under this name, if anything is."""
        hit = self._kept.pop(name, None)
        if hit is not None:
            self._index.unpin(hit, is_use=False)
            self.num_kept -= hit.num_blocks
            self.num_changes += 1

    def give_way(self) -> bool:
        """Unpin all that is kept, since a running request needs blocks; False without any."""
        names = list(self._kept)
        for name in names:
            self.drop(name)
        return bool(names)

    @property
    def kept_names(self) -> Collection[str]:
        return self._kept.keys()

    def check(self) -> None:
        """Raise `BookkeepingError` where kept prefixes and their blocks do not add up."""
        num_kept = sum(hit.num_blocks for hit in self._kept.values())
        if num_kept != self.num_kept or num_kept > KEPT_SHARE * self._total_blocks:
            raise BookkeepingError(
                f"kept prefixes hold {num_kept} of {self._total_blocks} blocks, {self.num_kept} are counted"
            )
