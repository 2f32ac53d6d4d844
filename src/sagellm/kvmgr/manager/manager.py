"""`KVCacheManager`: the one object that a scheduler and an engine talk to about KV.

It joins a prefix index and a block pool: match, bind (reserve), commit, release, and the books in between. A
block is in exactly one of three states: free; cached (in the index, used by nobody); active (held by a
request, as its own or as a pinned prefix).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence

from sagellm.core.binding import Binding, BindingStage, ChunkBlocks
from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import BookkeepingError
from sagellm.core.plan import BlockCopy, Chunk, Draft, RequestState
from sagellm.core.protocols.eviction import Use
from sagellm.core.protocols.kv_pool import BlockQuota, KVPool
from sagellm.core.protocols.prefix_cache import (
    MissObserver,
    PrefixHit,
    PrefixReuseIndex,
    ReuseRecorder,
)
from sagellm.core.types import NO_ACCOUNT, Account, Namespace, Tokens
from sagellm.kvmgr.manager.donors import Donors
from sagellm.kvmgr.manager.hints import KVHints
from sagellm.kvmgr.manager.pins import PinnedPrefixes
from sagellm.kvmgr.manager.prefix_registrar import PrefixRegistrar
from sagellm.kvmgr.manager.quotes import Quotes
from sagellm.kvmgr.manager.room import INDEX_OWNER, Room
from sagellm.kvmgr.manager.sequence import Fragmentation, SequenceKV
from sagellm.kvmgr.manager.swap import SwapSpace
from sagellm.kvmgr.manager.tables import DecodeTables
from sagellm.kvmgr.manager.windows import Windows


class KVCacheManager(Quotes):
    """Implements `KVQuotes` for the passes (see `Quotes`), and the books for the engine. One thread owns it.

    With `prefix_caching=False` nothing is matched or kept: the slow twin of every reuse. `index_as_computed`:
    the blocks of a prompt enter the index with each chunk, not when all of it is computed. `window`: no token
    attends further back than that; blocks behind it are given up before anything cached is.
    `sharing_groups` maps tenants to the group with which they share their cache. `max_pinned_share` bounds
    what `pin_prefix` may hold of the pool. `swap`: host memory for what preempted requests have computed;
    `prefill_token_s`: seconds to compute a token of it again.
    """

    def __init__(
        self,
        index: PrefixReuseIndex,
        pool: KVPool,
        *,
        prefix_caching: bool = True,
        index_as_computed: bool = False,
        quota: BlockQuota | None = None,
        window: int | None = None,
        sharing_groups: Mapping[str, str] | None = None,
        max_pinned_share: float = 0.25,
        swap: SwapSpace | None = None,
        prefill_token_s: float = 0.0,
        metrics: ReuseRecorder | None = None,
        misses: MissObserver | None = None,
        clock: Clock | None = None,
    ) -> None:
        if index.block_size != pool.block_size:
            raise ValueError(f"block sizes differ: index {index.block_size}, pool {pool.block_size}")
        self.index = index
        self.pool = pool
        self.quota = quota
        self.room = Room(index, pool, quota)
        self.metrics = metrics
        self.misses = misses
        self.block_size = pool.block_size
        self.prefix_caching = prefix_caching
        self.index_as_computed = index_as_computed
        self.swap = swap
        self.prefill_token_s = prefill_token_s
        self._sharing = dict(sharing_groups or {})
        self._now = (clock or MonotonicClock()).now
        self.hints = KVHints(index, self.namespace_of, self._now)
        self._sequences: dict[str, SequenceKV] = {}
        self._tables = DecodeTables(pool, self._make_room, with_quotas=quota is not None)
        self._donors = Donors(self._sequences, pool.block_size)
        self._registrar = PrefixRegistrar(index, pool, self._tables, self.namespace_of)
        self.is_published = self._registrar.saw
        self._windows = Windows(window, self._sequences, self._donors, self._registrar, pool, quota)
        self._publishes = index_as_computed and prefix_caching and window is None
        self._num_changes = 0
        self.pins = PinnedPrefixes(index, pool.total_blocks, max_pinned_share)

    # -- for the loop

    @property
    def version(self) -> int:
        saved = 0 if self.swap is None else self.swap.num_changes
        return self._num_changes + self._registrar.num_changes + saved

    @property
    def is_regular(self) -> bool:
        """Whether a step that only decodes does nothing here but take blocks."""
        return self.window is None and self._tables.is_up_to_date and self.hints.is_idle

    def append_blocks(self, states: Sequence[RequestState]) -> None:
        """A block for each running request, of which no backend has to be told. Raises `CapacityError`."""
        self._tables.append_blocks(states)

    def fragmentation(self) -> Fragmentation:
        slots = self.block_size * sum(len(one.block_ids) for one in self._sequences.values())
        tokens = sum(one.state.num_computed for one in self._sequences.values())
        return Fragmentation(1 - tokens / slots if slots else 0.0, self.pool.get_fragmentation())

    # -- bind and its undoing

    def bind(self, binding: Binding, *, early: bool = False) -> None:
        """Reserve the blocks that the draft needs and has not: pin its hits, then append to block tables.

        Missing blocks are evicted. Requests that the draft preempts have been released before. If an error is
        raised, nothing but evictions has happened. `early`: with `index_as_computed`, requests that are
        admitted later in the step may reuse what these chunks compute.
        """
        binding.require("bind", BindingStage.OPEN, BindingStage.BOUND)
        draft = binding.draft
        self.hints.expect(hit for name, hit in draft.hits.items() if name not in draft.chunks)
        num_copies, num_bound, first = len(binding.copies), len(binding.chunks), not binding.decodes_bound
        self._tables.bind(binding)
        chunks = [chunk for name, chunk in draft.chunks.items() if name not in binding.chunks]
        try:
            for chunk in chunks:
                if chunk.admits:
                    binding.chunks[chunk.state.request_id] = ChunkBlocks(chunk)
                    self._admit(chunk)
            if first:
                self._tables.grow(binding)
            for chunk in chunks:
                name = chunk.state.request_id
                self._append_blocks(binding.chunks.setdefault(name, ChunkBlocks(chunk)))
                if chunk.hit is not None:
                    binding.copies += self._copies_for(name, chunk.hit)
            if early and self._publishes:
                self._publish(chunks)
        except Exception:
            self._undo(binding, num_bound, decodes=first)
            del binding.copies[num_copies:]
            raise
        binding.decodes_bound, binding.stage = True, BindingStage.BOUND

    def admitted(self, chunk: Chunk, *, again: bool = False) -> None:
        """A request entered the batch with what this chunk reuses (`again`: it was preempted before)."""
        state, hit = chunk.state, chunk.hit
        if hit is None or state.max_reusable < len(state.tokens) - 1:  # what it may not reuse is no miss
            return
        if self.metrics is not None and not again:
            total = len(state.tokens)
            tenant = state.request.namespace.tenant
            num_blocks = self._blocks_for(total)
            self.metrics.record(total, chunk.start, num_blocks, hit.num_blocks, tenant=tenant)
        if not self._registrar.saw(state.request_id):
            self._attribute(state, hit, again=again)

    def rollback(self, binding: Binding) -> None:
        """Undo the binds of a step that is not, or not successfully, executed; evictions stay.

        What was to be saved of the requests that the draft preempts is dropped.
        """
        binding.require("rollback", BindingStage.OPEN, BindingStage.BOUND)
        self._undo(binding, 0, decodes=True)
        binding.stage = BindingStage.OPEN
        if self.swap is not None:
            self.swap.failed(binding.draft.swapped)

    def swap_out(self, binding: Binding, state: RequestState) -> bool:
        """Plan the copies that save what the request is about to lose by preemption; False where there is no
        room. Before anything is bound: they have to come before all other copies of the step."""
        if self.swap is None or not self.resume_cost(state).fits:
            return False
        table, first = self.block_table(state.request_id), self._first_lost(state)
        binding.copies += self.swap.save(state.request_id, state.tokens, table, first, state.num_computed)
        return True

    def give_up_saved(self, draft: Draft) -> None:
        """A step has failed, perhaps because of what it brought back: that is computed again."""
        for chunk in draft.admitted():
            if chunk.hit is not None and chunk.hit.num_swapped:
                self.forget(chunk.state)

    def forget(self, state: RequestState) -> None:
        """What was saved of the request is given up; it has ended, or is to be computed again."""
        if self.swap is not None:
            self.swap.drop(state.request_id)

    # -- moving forward

    def executed(self, binding: Binding) -> None:
        """The backend has executed the step: it has the tables of the requests in decode that took part."""
        if binding.draft.num_scheduled:
            binding.require("executed", BindingStage.BOUND)
        binding.stage = BindingStage.EXECUTED
        self._tables.executed(binding)
        if self.swap is not None and self.swap.num_used:
            self.swap.written(binding.draft.swapped)
            for chunk in binding.draft.admitted():
                self.swap.drop(chunk.state.request_id)

    def foresee(self, chunks: Iterable[Chunk]) -> None:
        """What the step in flight computes enters the index as `commit` will have it, until that or
        `rollback`: a step that is bound meanwhile may reuse it, being executed later."""
        for chunk in chunks if self.prefix_caching else ():
            state = chunk.state
            whole = chunk.end >= state.num_prompt_tokens
            if (whole or self.index_as_computed) and not self._registrar.saw(state.request_id):
                sequence = self._sequences[state.request_id]
                self._registrar.publish(sequence, min(chunk.end, state.num_prompt_tokens))

    def commit(self, state: RequestState) -> None:
        """`state.num_computed` moved, in a step that the backend has executed: a prompt that is now whole
        enters the index, or the part of it that is there."""
        prompt = state.num_prompt_tokens
        sequence = self._sequences[state.request_id]
        self._tables.told(state.request_id)
        published = self._registrar.settle(state.request_id)
        if state.num_computed < prompt:
            if self.index_as_computed:
                self._register(sequence, state.num_computed)
        elif published or prompt > sequence.num_shared * self.block_size:
            self._register(sequence, prompt)
            group = state.request.group
            if group is not None and self.prefix_caching:
                self._donors.offer(group, sequence)

    def fork(self, state: RequestState, group: str) -> None:
        """Let requests of `group` begin where a running one stands: its whole blocks enter the index, and its
        last, partial one is copied by whoever is admitted while it runs (copy-on-write, done when a child is
        about to write)."""
        sequence = self._sequences[state.request_id]
        self._register(sequence, state.num_computed)
        if self.prefix_caching:
            self._donors.put(group, sequence)

    def release(self, state: RequestState, *, keep: bool = True, ended: bool = True) -> None:
        """The request leaves the batch: what it computed, generated tokens included, stays behind as
        cache. With `keep=False` nothing new does. `ended=False`: it was preempted, and comes again.
        """
        sequence = self._sequences[state.request_id]
        if keep:
            self._register(sequence, state.num_computed)
        else:
            self._registrar.discard(sequence)
        num_prompt_blocks = state.num_prompt_tokens // self.block_size
        request = state.request
        use = Use(
            state.num_output_tokens,
            sequence.num_reused_blocks,
            num_prompt_blocks,
            request.priority,
            request.slo.ttft_s,
        )
        self.index.unpin(sequence.hit, use)
        try:
            self.pool.free(sequence.own)
        except Exception:
            sequence.hit = self.index.pin(sequence.hit)
            raise
        del self._sequences[state.request_id]
        self._registrar.forget(state.request_id)
        self._tables.leave(state)
        self._donors.leave(sequence)
        self._num_changes += 1
        if keep:
            self.hints.released(state, ended=ended)

    def clear_cache(self) -> int:
        """Forget every block that nobody uses; returns how many."""
        self._num_changes += 1
        return self.room.clear()

    # -- prefixes that stay

    def pin_prefix(self, tokens: Tokens, namespace: Namespace = Namespace()) -> PrefixHit:
        """Hold what is resident of a prompt (a system prompt, say) until `unpin_prefix`.

        Raises `CapacityError` if pinned prefixes together would hold more than `max_pinned_share`.
        """
        return self.pins.add(self.index.lookup(tokens, self.namespace_of(namespace)))

    def unpin_prefix(self, hit: PrefixHit) -> None:
        """Give up a hold of `pin_prefix`; an error if it is none."""
        self.pins.remove(hit)

    def remap(self, moves: Mapping[int, int]) -> None:
        """Blocks moved (a compaction): block `source` of anybody is `target` from now on."""
        self._num_changes += 1
        self.pool.remap(moves)
        self.index.remap(moves)
        for sequence in self._sequences.values():
            table = sequence.block_ids
            sequence.block_ids = array("i", [moves.get(block, block) for block in table])
            self._tables.mark(sequence, 0)

    def check(self) -> None:
        """Raise `BookkeepingError` unless every block is free, cached or active, in exactly one way."""
        self.index.check()
        self.pool.check({INDEX_OWNER: self.room.held()})
        for sequence in self._sequences.values():
            sequence.check(self.index.block_ids(sequence.hit))
        self._tables.check(self._sequences.values())
        if self.swap is not None:
            self.swap.check()

    def make_room_below_ceilings(self, state: RequestState, num_blocks: int) -> bool:
        """Evict guaranteed blocks too, where nothing else runs and only the request's ceilings are in the
        way; returns whether any went."""
        if self.quota is None:
            return False
        self._num_changes += 1
        account = self.quota.paying(state.request.account)
        return self.room.make_below_ceilings(self.quota, num_blocks, account)

    # -- inside: admission and growth

    def _copies_for(self, request_id: str, hit: PrefixHit) -> Iterable[BlockCopy]:
        """What of a hit stands elsewhere than in the index."""
        if hit.tail is not None:
            return (self._donors.copy_of(hit.tail, request_id),)
        if hit.num_swapped:
            assert self.swap is not None
            return self.swap.copies_back(hit, request_id, self.block_table(request_id))
        return ()

    def _admit(self, chunk: Chunk) -> None:
        state, wanted = chunk.state, chunk.hit
        assert wanted is not None
        account = NO_ACCOUNT if self.quota is None else self.quota.paying(state.request.account)
        hit = self.index.pin(wanted)
        try:
            if hit.num_blocks != wanted.num_blocks or not self.is_current(wanted):
                raise BookkeepingError(
                    f"{state.request_id}: a hit of {chunk.start} tokens shrank to {hit.num_tokens} by bind"
                )
            own = self.pool.allocate(0, state.request_id, account)
            assert own is not None
        except Exception:
            self.index.unpin(hit)
            raise
        ids = self.index.block_ids(hit)
        made = SequenceKV(state, hit, ids, own, hit.num_blocks, hit.num_blocks)
        self._sequences[state.request_id] = made
        self._tables.enter(made)

    def _append_blocks(self, bound: ChunkBlocks) -> None:
        sequence = self._sequences[bound.chunk.state.request_id]
        held = len(sequence.block_ids)
        bound.first_block = held if sequence.changed_from is None else sequence.changed_from
        missing = self._blocks_for(bound.chunk.end) - held
        if missing > 0:
            taken = self._tables.take(sequence, missing)
            sequence.block_ids += taken
            bound.block_ids = tuple(taken)

    def _make_room(self, num_blocks: int, account: Account) -> None:
        """Have so many blocks free for the account, if that can be: behind windows first, then cached."""
        self._num_changes += 1
        self._windows.drop(num_blocks, account)
        self.room.make(num_blocks, account)

    def _undo(self, binding: Binding, num_bound: int, *, decodes: bool) -> None:
        """Take back the blocks of all chunks behind the first `num_bound` and, with `decodes`, those appended
        to requests in decode."""
        if decodes:
            self._tables.undo(binding)
        for name, bound in reversed(list(binding.chunks.items())[num_bound:]):
            del binding.chunks[name]
            chunk, sequence = bound.chunk, self._sequences.get(name)
            if sequence is None or sequence.state is not chunk.state:  # never reached, or ended since
                continue
            self._registrar.withdraw(sequence, 0 if chunk.admits else chunk.start)
            count = len(bound.block_ids)
            if count:
                self.pool.shrink(sequence.own, count)
                del sequence.block_ids[-count:]
            if chunk.admits:
                self.index.unpin(sequence.hit)
                self.pool.free(sequence.own)
                del self._sequences[name]
                self._tables.leave(chunk.state)

    # -- inside: into the index

    def _register(self, sequence: SequenceKV, num_tokens: int) -> None:
        if self.prefix_caching:
            self._registrar.register(sequence, num_tokens)

    def _publish(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            if chunk.hit is not None and chunk.state.max_reusable == len(chunk.state.tokens) - 1:
                # before its own blocks count as resident
                self._attribute(chunk.state, chunk.hit, again=chunk.state.scheduled_s is not None)
            self._registrar.publish(self._sequences[chunk.state.request_id], chunk.end)

    def _attribute(self, state: RequestState, hit: PrefixHit, *, again: bool) -> None:
        if self.misses is not None:
            namespace = self.namespace_of(state.request.namespace)
            had = hit.num_tokens // self.block_size
            found = self.misses.observe(self.index, state.tokens, namespace, had, preempted=again)
            state.misses = found.plus(state.misses) if again else found
