"""What running requests have computed enters the index; or what they are about to, so that requests which are
admitted in the same step share it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.kv_pool import Allocation, KVPool
from sagellm.core.protocols.prefix_cache import InsertResult, PrefixHit, PrefixReuseIndex
from sagellm.core.types import Namespace
from sagellm.kvmgr.manager.room import INDEX_OWNER
from sagellm.kvmgr.manager.sequence import SequenceKV
from sagellm.kvmgr.manager.tables import DecodeTables

DUPLICATES = "duplicates"


class Published(NamedTuple):
    """What a request published, of its first `num_tokens` tokens, and what it shared with the index before.
    `result` None: nothing, since others had."""

    num_tokens: int
    result: InsertResult | None
    hit: PrefixHit
    num_shared: int


class PrefixRegistrar:
    """Moves blocks of requests into the index. `num_changes` counts the times that it did.

    A backend writes the KV of all chunks of a step before any of them attends to it, layer by layer: that is
    what makes it right to `publish` blocks that are bound and not yet computed.
    """

    def __init__(
        self,
        index: PrefixReuseIndex,
        pool: KVPool,
        tables: DecodeTables,
        namespace_of: Callable[[Namespace], Namespace],
    ) -> None:
        self._index = index
        self._pool = pool
        self._tables = tables
        self._namespace_of = namespace_of
        self._published: dict[str, list[Published]] = {}
        self.num_changes = 0

    def register(self, sequence: SequenceKV, num_tokens: int) -> InsertResult | None:
        """The first `num_tokens` tokens, in whole blocks, enter the index; None where they did before.

        Where another request computed the same before, this one goes on with the blocks of the index, and its
        own duplicates are free again.
        """
        whole, shared = num_tokens // self._pool.block_size, sequence.num_shared
        if sequence.is_windowed or whole <= shared:
            return None
        self.num_changes += 1
        state, own, table = sequence.state, sequence.own, sequence.block_ids
        request = state.request
        retention = request.retention if shared * self._pool.block_size < state.num_prompt_tokens else ()
        namespace = self._namespace_of(request.namespace)
        result = self._index.insert(
            state.tokens, table[:whole], namespace, account=own.account, retention=retention, pin=True
        )
        existing = max(result.num_existing, shared)
        try:
            self._part_with(sequence, existing - shared, whole - shared)
        except Exception:
            self._index.retract(result)
            raise
        sequence.hit, sequence.num_shared = result.hit, whole
        if existing > shared:
            table[:whole] = self._index.block_ids(result.hit)
            self._tables.mark(sequence, shared)
        return result

    # -- ahead of the computation

    def publish(self, sequence: SequenceKV, num_tokens: int) -> None:
        """The whole blocks of the first `num_tokens` tokens, bound and not yet computed, enter the index;
        unless it has equal ones, which become one with these once they are computed."""
        state, hit, num_shared = sequence.state, sequence.hit, sequence.num_shared
        known = self._index.lookup(state.tokens, hit.namespace, num_tokens).num_blocks > num_shared
        result = None if known else self.register(sequence, num_tokens)
        records = self._published.setdefault(state.request_id, [])
        records.append(Published(num_tokens, result, hit, num_shared))

    def saw(self, request_id: str) -> bool:
        """Whether others may reuse what the request has bound and not yet computed, or found such."""
        return request_id in self._published

    def withdraw(self, sequence: SequenceKV, start: int) -> None:
        """Undo `publish` of a chunk from `start` on, if it did anything. What came to use the blocks since
        must have been undone."""
        request_id = sequence.state.request_id
        records = self._published.get(request_id)
        if records is None or records[-1].num_tokens <= start:  # an earlier chunk's stands
            return
        published = self._pop(request_id, -1)
        if published.result is None:
            return
        self.num_changes += 1
        entered = sequence.block_ids[published.num_shared : sequence.num_shared]
        sequence.hit = self._index.pin(published.hit)
        self._index.retract(published.result)
        self._pool.hand_back(INDEX_OWNER, entered, sequence.own, 0)
        sequence.num_shared = published.num_shared

    def discard(self, sequence: SequenceKV) -> None:
        """Undo `publish` for a request whose KV is worthless, or never comes; not where others use it."""
        while self.saw(sequence.state.request_id):
            hit = sequence.hit
            try:
                self.withdraw(sequence, 0)
            except BookkeepingError:
                self._index.unpin(sequence.hit)
                sequence.hit = hit
                return

    def settle(self, request_id: str) -> bool:
        """What the request published in the oldest step is computed; whether there was anything."""
        was_published = self.saw(request_id)
        if was_published:
            self._pop(request_id, 0)
        return was_published

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._published.pop(request_id, None)

    def _pop(self, request_id: str, place: int) -> Published:
        """The record at that place, taken out."""
        records = self._published[request_id]
        found = records.pop(place)
        if not records:
            del self._published[request_id]
        return found

    # -- inside, and for windows

    def free_first(self, own: Allocation, num_blocks: int, why: str) -> None:
        """The first own blocks of a request are free again, or an error is raised and nothing happened."""
        if not num_blocks:
            return
        block_ids = self._pool.hand_over(own, 0, num_blocks, why)
        try:
            self._pool.take_back(why, block_ids, own.account)
        except Exception:
            self._pool.hand_back(why, block_ids, own, 0)
            raise

    def _part_with(self, sequence: SequenceKV, num_spare: int, num_whole: int) -> None:
        """Of the first `num_whole` own blocks, `num_spare` are free, and the others the index's. What the old
        hit pinned is held by the new one."""
        own = sequence.own
        self._index.unpin(sequence.hit)
        try:
            entered = self._pool.hand_over(own, num_spare, num_whole, INDEX_OWNER)
            try:
                self.free_first(own, num_spare, DUPLICATES)
            except Exception:
                self._pool.hand_back(INDEX_OWNER, entered, own, num_spare)
                raise
        except Exception:
            sequence.hit = self._index.pin(sequence.hit)
            raise
