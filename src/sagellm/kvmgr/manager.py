"""`KVCacheManager`: the one object that a scheduler and an engine talk to about KV.

It joins a prefix index and a block pool: match, bind (reserve), commit, release, and the books in between. A
block is in exactly one of three states: free; cached (in the index, used by nobody); active (held by a
request, as its own or as a pinned prefix).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sagellm.core.errors import BookkeepingError, CapacityError
from sagellm.core.plan import Chunk, Draft, RequestState
from sagellm.core.protocols.kv_pool import Allocation, KVPool
from sagellm.core.protocols.prefix_cache import PrefixHit, PrefixReuseIndex

INDEX_OWNER = "prefix index"


class BlockStates(NamedTuple):
    """Blocks by state; they sum to the pool's total."""

    active: int
    cached: int
    free: int


@dataclass(slots=True)
class SequenceKV:
    """The KV of one running request: its block table, which of those blocks are its own, and its pinned
    prefix."""

    hit: PrefixHit
    block_ids: list[int]
    own: set[int] = field(default_factory=set)
    changed_from: int | None = None  # the backend's table is out of date from this index on


class KVCacheManager:
    """Implements `KVQuotes` for the passes and the books for the engine. One engine thread owns it.

    With `prefix_caching=False` nothing is matched or kept: the slow twin of every reuse.
    """

    def __init__(self, index: PrefixReuseIndex, pool: KVPool, *, prefix_caching: bool = True) -> None:
        if index.block_size != pool.block_size:
            raise ValueError(f"block sizes differ: index {index.block_size}, pool {pool.block_size}")
        self.index = index
        self.pool = pool
        self.block_size = pool.block_size
        self.prefix_caching = prefix_caching
        self._sequences: dict[str, SequenceKV] = {}

    # -- quotes: nothing here changes state

    def match(self, state: RequestState) -> PrefixHit:
        """The longest reusable prefix, capped so that at least one token is left to compute."""
        limit = len(state.tokens) - 1 if self.prefix_caching else 0
        return self.index.lookup(state.tokens, state.request.namespace, limit)

    def available_blocks(self) -> int:
        return self.pool.num_free + self.index.num_evictable

    def price_to_grow(self, state: RequestState, num_tokens: int) -> int:
        held = len(self._sequences[state.request_id].block_ids)
        return max(0, self._blocks_for(state.num_computed + num_tokens) - held)

    def price_to_admit(self, hit: PrefixHit, num_tokens: int) -> int:
        return (
            self._blocks_for(hit.num_tokens + num_tokens)
            - hit.num_blocks
            + self.index.num_unpinned_on_path(hit)
        )

    def gain_of_preempting(self, state: RequestState) -> int:
        sequence = self._sequences[state.request_id]
        return len(sequence.own) + self.index.num_held_alone(sequence.hit)

    def block_states(self) -> BlockStates:
        cached, free = self.index.num_evictable, self.pool.num_free
        return BlockStates(self.pool.total_blocks - cached - free, cached, free)

    def block_table(self, request_id: str) -> list[int]:
        """The blocks of a running request, in order of position."""
        return self._sequences[request_id].block_ids

    # -- bind and its undoing

    def bind(self, draft: Draft) -> None:
        """Reserve what the draft needs: pin every hit, then allocate; missing blocks are evicted, exactly
        that many.

        What the draft preempts has been released before. Either all is bound, or an error is raised and
        nothing but evictions has happened.
        """
        bound: list[Chunk] = []
        try:
            for chunk in draft.admitted():
                bound.append(chunk)
                self._admit(chunk)
            for chunk in draft.chunks.values():
                if not chunk.admits:
                    bound.append(chunk)
                self._grow(chunk)
        except Exception:
            self._undo(bound)
            raise

    def rollback(self, draft: Draft) -> None:
        """Undo a bind after a failed verify or execute; evictions stay."""
        self._undo(list(draft.chunks.values()))

    # -- moving forward

    def commit(self, state: RequestState) -> None:
        """`state.num_computed` moved, in a step that the backend has executed: a prompt that is now whole
        enters the index."""
        prompt = state.num_prompt_tokens
        sequence = self._sequences[state.request_id]
        sequence.changed_from = None
        if state.num_computed >= prompt > sequence.hit.num_tokens:
            self._register(state, prompt)

    def release(self, state: RequestState, *, keep: bool = True) -> None:
        """The request leaves the batch: what it computed, generated tokens included, stays behind as
        cache. With `keep=False` nothing new does.
        """
        sequence = self._sequences[state.request_id]
        if keep:
            self._register(state, state.num_computed)
        del self._sequences[state.request_id]
        self.index.unpin(sequence.hit)
        self.pool.free(sorted(sequence.own))

    def clear_cache(self) -> int:
        """Forget every block that nobody uses; returns how many."""
        freed = self.index.clear()
        self.pool.free(freed)
        return len(freed)

    def check(self) -> None:
        """Raise `BookkeepingError` unless every block is free, cached or active, in exactly one way."""
        self.index.check()
        self.pool.check()
        owned = [block for sequence in self._sequences.values() for block in sequence.own]
        if len(owned) != len(set(owned)):
            raise BookkeepingError("a block is owned by two requests")
        used = len(owned) + self.index.num_cached
        if used + self.pool.num_free != self.pool.total_blocks:
            raise BookkeepingError(
                f"{used} owned or cached + {self.pool.num_free} free != {self.pool.total_blocks}"
            )
        for request_id, sequence in self._sequences.items():
            self._check_sequence(request_id, sequence)

    # -- inside

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _admit(self, chunk: Chunk) -> None:
        request_id = chunk.state.request_id
        assert chunk.hit is not None
        hit = self.index.pin(chunk.hit)
        self._sequences[request_id] = SequenceKV(hit, self.index.block_ids(hit))
        if hit.num_tokens != chunk.start:
            raise BookkeepingError(
                f"{request_id}: a hit of {chunk.start} tokens shrank to {hit.num_tokens} before bind"
            )

    def _grow(self, chunk: Chunk) -> None:
        request_id = chunk.state.request_id
        sequence = self._sequences[request_id]
        held = len(sequence.block_ids)
        chunk.first_block = held if sequence.changed_from is None else sequence.changed_from
        missing = self._blocks_for(chunk.end) - held
        if missing <= 0:
            return
        chunk.block_ids = self._take(missing, request_id).block_ids
        sequence.block_ids.extend(chunk.block_ids)
        sequence.own.update(chunk.block_ids)

    def _take(self, num_blocks: int, owner: str) -> Allocation:
        short = num_blocks - self.pool.num_free
        if short > 0:
            evicted = self.index.evict(short)
            if evicted is None:
                raise CapacityError(
                    f"{owner}: {num_blocks} blocks asked for, {self.available_blocks()} available"
                )
            self.pool.free(evicted)
        allocation = self.pool.allocate(num_blocks, owner)
        assert allocation is not None
        return allocation

    def _undo(self, chunks: Sequence[Chunk]) -> None:
        for chunk in reversed(chunks):
            sequence = self._sequences.get(chunk.state.request_id)
            if sequence is None:  # the bind failed before it reached this one
                continue
            self._shrink(sequence, chunk)
            if chunk.admits:
                self.index.unpin(sequence.hit)
                del self._sequences[chunk.state.request_id]

    def _shrink(self, sequence: SequenceKV, chunk: Chunk) -> None:
        if not chunk.block_ids:
            return
        self.pool.free(chunk.block_ids)
        del sequence.block_ids[-len(chunk.block_ids) :]
        sequence.own.difference_update(chunk.block_ids)
        chunk.block_ids = ()

    def _register(self, state: RequestState, num_tokens: int) -> None:
        """The first `num_tokens` tokens, in whole blocks, enter the index.

        Where another request computed the same before, this one goes on with the blocks of the index, and its
        own duplicates are free again.
        """
        sequence = self._sequences[state.request_id]
        whole, shared = num_tokens // self.block_size, sequence.hit.num_blocks
        if not self.prefix_caching or whole <= shared:
            return
        table = sequence.block_ids
        result = self.index.insert(state.tokens, table[:whole], state.request.namespace)
        hit = self.index.pin(result.hit)
        self.index.unpin(sequence.hit)
        sequence.hit = hit
        self.pool.hand_over(table[result.num_existing : whole], INDEX_OWNER)
        sequence.own.difference_update(table[shared:whole])
        if result.num_existing > shared:
            self.pool.free(table[shared : result.num_existing])
            table[:whole] = self.index.block_ids(hit)
            sequence.changed_from = shared

    def _check_sequence(self, request_id: str, sequence: SequenceKV) -> None:
        if len(set(sequence.block_ids)) != len(sequence.block_ids):
            raise BookkeepingError(f"{request_id}: a block stands twice in the table")
        indexed = self.index.block_ids(sequence.hit)
        for position, block in enumerate(sequence.block_ids):
            shared = position < len(indexed) and indexed[position] == block
            if shared == (block in sequence.own):
                raise BookkeepingError(
                    f"{request_id}: block {block} is {'both' if shared else 'neither'} own and shared"
                )
