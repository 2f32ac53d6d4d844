"""`KVCacheManager`: decides which request has which KV block, from admission to eviction.

Every block has one owner at a time. The owners, in the order in which a block changes hands:

    pool's free list
      | BlockAllocator.append_blocks (bind)                    ^ release, rollback, duplicates,
      v                                                        | blocks behind a sliding window
    own blocks of a running request (RequestBlocks.own) -------+
      | PrefixRegistrar.register (commit, release, fork) or publish (early)
      v
    prefix index: pinned (active) --- unpin, the last one ---> unpinned (cached) --- evict ---> free list
                        ^------------------- pin -----------------------'

    pinned by a hit      from the bind that admits a request until its release (or rollback)
    pinned by a client   from pin_prefix until unpin_prefix
    dropped              free; its place in the table of its request stays empty (dropped.py)
    shared last block    stays its request's own; requests of its group copy it while that request runs
    on its way here      from begin_receive until publish, hand_over or abort (kv_pool/tiers/arrivals.py)
    on its way down      pinned from the commit or release that offers a path until its tiers have it; with
                         write-back evicted, and not yet free (writes.py)

A block is free, cached (in the index, unpinned) or active. The prefix index counts its pins
(`prefix_cache/_tree.py`).

The legal order of calls. A call out of order raises `BookkeepingError`, which names the right one:

    for a step      bind+ -> bind_proposed* -> executed -> commit*
                    or, before executed:  bind* -> bind_proposed* -> rollback
    for a request   admitted by a bind -> commit* -> release       fork and commit only while it runs

A second step may be bound before the first is executed (`foresee` is called between); then the second is
rolled back before the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from sagellm.core.binding import Binding, BindingStage, ChunkBlocks
from sagellm.core.blocks import cdiv
from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import BookkeepingError, CapacityError
from sagellm.core.plan import BlockTableDelta, Chunk, RequestState
from sagellm.core.protocols.eviction import Use
from sagellm.core.protocols.kv_pool import BlockQuota, KVPool
from sagellm.core.protocols.kv_tiers import Arrival, KVArrivals, KVTiers
from sagellm.core.protocols.prefix_cache import (
    MissObserver,
    PrefixHit,
    PrefixReuseIndex,
    PromptSpan,
    ReuseRecorder,
    SpanState,
)
from sagellm.core.types import NO_ACCOUNT, Account, BlockIds, KVGroup, Namespace, Tokens
from sagellm.kvmgr.manager.allocator import BlockAllocator, BlockStates, Fragmentation, SlidingWindows
from sagellm.kvmgr.manager.checkpoints import CheckpointConfig, Checkpoints
from sagellm.kvmgr.manager.dropped import DroppedBlocks
from sagellm.kvmgr.manager.hints import KVHints
from sagellm.kvmgr.manager.loads import TierLoads
from sagellm.kvmgr.manager.page_groups import PageGroups
from sagellm.kvmgr.manager.prefix_sharing import (
    PinnedPrefixes,
    PrefixRegistrar,
    SharedTails,
    SharingGroups,
)
from sagellm.kvmgr.manager.quotes import Quotes
from sagellm.kvmgr.manager.tables import INDEX_OWNER, BlockTables, RequestBlocks
from sagellm.kvmgr.manager.writes import TierWrites


class KVCacheManager:
    """Joins a prefix index, a block pool and a quota. One thread owns it.

    Passes ask `quotes` for hits and prices; planner and engine make the calls above. `prefix_caching=False`:
    nothing is matched or kept. `index_as_computed`: the blocks of a prompt enter the index with each chunk,
    not when all of it is computed. `window`: no token attends further back than this; blocks behind it are
    freed before anything cached is evicted. `groups`: the KV groups of the model, if it has several;
    `max_chunk`: the most tokens of a request that a step computes. `checkpoints`: how recurrent states are
    kept, for a model that has any. `sharing_groups`: by tenant, the group with which it shares its cache.
    `max_pinned_share` bounds what `pin_prefix` may hold of the pool. `tiers`: memory below the device, around
    the same index and pool; `free_watermark`: see `TierWrites`. `arrivals`: where blocks of other instances
    enter; those of `tiers`, if there are any. `prefill_token_s`: seconds to compute a token of a preempted
    request again.
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
        groups: Sequence[KVGroup] = (),
        max_chunk: int = 1,
        checkpoints: CheckpointConfig | None = None,
        sharing_groups: Mapping[str, str] | None = None,
        max_pinned_share: float = 0.25,
        tiers: KVTiers | None = None,
        free_watermark: float | None = None,
        arrivals: KVArrivals | None = None,
        prefill_token_s: float = 0.0,
        metrics: ReuseRecorder | None = None,
        misses: MissObserver | None = None,
        clock: Clock | None = None,
    ) -> None:
        if index.block_size != pool.block_size:
            raise ValueError(f"block sizes differ: index {index.block_size}, pool {pool.block_size}")
        now, sharing = (clock or MonotonicClock()).now, SharingGroups(sharing_groups or {})
        self.index, self.pool, self.quota = index, pool, quota
        self.metrics, self.misses, self.num_groups = metrics, misses, max(1, len(groups))
        self.tiers, self.arrivals = tiers, arrivals if tiers is None else tiers.arrivals
        self.window, has_pages = window, self.num_groups > 1 or checkpoints is not None
        self.prefix_caching, self.index_as_computed = prefix_caching, index_as_computed
        self.block_size, self.namespace_of = pool.block_size, sharing.namespace_of
        self._tables = tables = BlockTables(pool)
        self._tails, self.dropped = SharedTails(tables, pool.block_size), DroppedBlocks(tables, pool)
        if has_pages and (quota is not None or tiers is not None or window is not None):
            raise ValueError("KV groups and recurrent states go with neither quotas nor tiers")
        self.checkpoints = None
        if checkpoints is not None:
            self.checkpoints = Checkpoints(index, pool, checkpoints, self.namespace_of, now)
        self._pages = PageGroups(groups, pool, tables, max_chunk, self.checkpoints) if has_pages else None
        windows = SlidingWindows(window, self._tables, self._tails, pool, self._pages)
        self.allocator = BlockAllocator(index, pool, quota, windows, self._pages)
        if self.arrivals is not None:
            self.arrivals.serve(self.allocator.make_room, INDEX_OWNER)
        if misses is not None:
            misses.evictions_are_for(lambda: self.allocator.evictor)
        self._registrar = PrefixRegistrar(
            index, pool, tables, sharing, self._pages, prefix_caching=prefix_caching
        )
        self.is_published = self._registrar.is_published
        self._publishes_early = index_as_computed and prefix_caching and window is None and not has_pages
        state_pages = 0 if self.checkpoints is None else cdiv(self.checkpoints.state_pages, self.num_groups)
        self.pins = PinnedPrefixes(index, pool.total_blocks // self.num_groups, max_pinned_share, state_pages)
        self.quotes = Quotes(
            self._tables, self.allocator, windows, self._registrar, self._tails, self.pins, sharing,
            self._pages, tiers, self.arrivals, metrics, now, prefix_caching, prefill_token_s,
        )  # fmt: skip
        parts = index, self._tables, self.quotes, quota, self.namespace_of
        self.writes = None if tiers is None else TierWrites(tiers, self.allocator, free_watermark, max_chunk)
        self.loads = None if self.writes is None else TierLoads(self.writes, *parts)
        self.hints = KVHints(index, self.namespace_of, now, self.loads, self.checkpoints, tiers)

    # -- what running requests hold

    def block_table(self, request_id: str) -> BlockIds:
        """The blocks of a running request, in order of position; `KeyError` for any other.

        With several KV groups each position has a block of each, in order of the groups, or `NO_PAGE`.
        """
        return self._tables[request_id].table()

    def state_pages(self, request_id: str) -> tuple[int, ...]:
        """The checkpoint with which an admitted request begins; empty for a model without."""
        if self.checkpoints is None:
            return ()
        return self.checkpoints.pages_of(self._tables[request_id])

    def num_slots(self, request_id: str) -> int:
        """Tokens that the blocks of a running request can hold."""
        return len(self._tables[request_id].block_ids) * self.block_size

    def block_states(self) -> BlockStates:
        cached, free = self.index.num_evictable, self.pool.num_free
        if self._pages is not None:
            cached += self._pages.num_evictable(cached)
        return BlockStates(self.pool.total_blocks - cached - free, cached, free)

    def fragmentation(self) -> Fragmentation:
        return Fragmentation(self._tables.unused_share(), self.pool.get_fragmentation())

    @property
    def blocks_move(self) -> bool:
        """Whether blocks are sent to other instances, or come from elsewhere."""
        is_sent = self.pins.num_sent or self.pool.num_kept
        return bool(is_sent or (self.arrivals is not None and self.arrivals.num_blocks))

    # -- bind and rollback

    def bind(self, binding: Binding, *, early: bool = False) -> None:
        """Reserve the blocks of a draft: pin its hits, then append to block tables.

        Chunks that were bound early are left as they are. Missing blocks are evicted. Requests that the draft
        preempts have been released before. If an error is raised, nothing but evictions has happened.
        `early`: with `index_as_computed`, requests that are admitted later in the step may reuse what these
        chunks compute.
        """
        if binding.stage is BindingStage.EXECUTED:
            binding.require("bind", BindingStage.OPEN, BindingStage.BOUND)
        draft = binding.draft
        self.hints.expect(hit for name, hit in draft.hits.items() if name not in draft.chunks)
        num_copies, num_bound, num_kept = len(binding.copies), len(binding.chunks), len(binding.kept_states)
        first_bind = not binding.decodes_bound
        self._tables.start_bind(binding)
        chunks = [chunk for name, chunk in draft.chunks.items() if name not in binding.chunks]
        try:
            for chunk in chunks:
                if chunk.admits:
                    binding.chunks[chunk.state.request_id] = ChunkBlocks(chunk)
                    self._admit(chunk)
            if first_bind:
                self._bind_decodes(binding)
            for chunk in chunks:
                bound = binding.chunks.setdefault(chunk.state.request_id, ChunkBlocks(chunk))
                self._append_chunk_blocks(bound)
                if chunk.hit is not None and chunk.hit.tail is not None:  # it counts on a block of its group
                    binding.copies += self._tails.copies_of(chunk.hit.tail, chunk.state.request_id)
            if early and self._publishes_early:
                self._publish(chunks)
            if self.checkpoints is not None:
                self._keep_states(binding, self.checkpoints, chunks, decodes=first_bind)
        except Exception:
            self._undo(binding, num_bound, num_kept, decodes=first_bind)
            del binding.copies[num_copies:]
            raise
        binding.decodes_bound, binding.stage = True, BindingStage.BOUND

    def bind_proposed(self, binding: Binding, state: RequestState, num_tokens: int, max_blocks: int) -> int:
        """Append the blocks that proposed tokens of a request in decode need.

        The binding is bound, and notes them. Returns how many of the `num_tokens` have a slot: all, or those
        for which the request has one already, where more than `max_blocks` are missing or memory is short.
        Blocks of tokens that are not accepted stay with the request.
        """
        blocks = self._tables[state.request_id]
        held = len(blocks.block_ids)
        end = state.num_computed + 1 + num_tokens
        missing = cdiv(end, self.block_size) - held
        if missing <= 0:
            return num_tokens
        num_slots = num_tokens - (end - held * self.block_size)
        if missing > max_blocks:
            return num_slots
        try:
            block_ids = self.allocator.append_blocks(blocks, missing)
        except CapacityError:
            return num_slots
        binding.appended_to += [state] * missing
        binding.appended_ids += block_ids
        delta = BlockTableDelta(state.row, held * blocks.num_groups, tuple(block_ids))
        binding.table_deltas.append(delta)
        return num_tokens

    def rollback(self, binding: Binding) -> None:
        """Undo the binds of a step that is not executed or has failed.

        Evictions stay.
        """
        binding.require("rollback", BindingStage.OPEN, BindingStage.BOUND)
        self._undo(binding, 0, 0, decodes=True)
        binding.stage = BindingStage.OPEN

    def admitted(self, chunk: Chunk, *, again: bool = False) -> None:
        """A request entered the batch with this chunk; count what it reuses. `again`: it ran before."""
        state, hit = chunk.state, chunk.hit
        if again:
            self.forget(state)
        if hit is not None and state.request.reports_hit:
            self.index.report_hit(hit)
        if hit is None or state.max_reusable < len(state.tokens) - 1:  # what it may not reuse is no miss
            return
        if self.metrics is not None and not again:
            total = len(state.tokens)
            num_blocks, tenant = cdiv(total, self.block_size), state.request.namespace.tenant
            self.metrics.record(total, chunk.start, num_blocks, hit.num_blocks, tenant=tenant)
        if not self.is_published(state.request_id):
            self._attribute_misses(state, hit, again=again)

    def explain(self, tokens: Tokens, namespace: Namespace) -> list[PromptSpan] | None:
        """What the cache knows of a prompt; None without `kv.miss_attribution`."""
        if self.misses is None:
            return None
        namespace = self.namespace_of(namespace)
        return self.quotes.usable(self.misses.explain(self.index, tokens, namespace), tokens, namespace)

    def append_blocks(self, states: Sequence[RequestState]) -> None:
        """Append a block for each request in decode, without a binding.

        For backends that keep no block tables. Raises `CapacityError`.
        """
        self.allocator.append_block_to_each(self._tables.of(states))

    def append_filled(self, state: RequestState, stop: int, arrival: Arrival | None = None) -> None:
        """Give a running request blocks up to token `stop` whose KV comes from elsewhere.

        It has computed its limit (`RequestState.compute_until`), so no step in flight contains it. The caller
        then moves `num_computed` (`RequestTable.advance`). Blocks of `arrival` are filled, and those behind
        `stop` are free again; without one, new blocks are appended, which the caller fills with approximate
        KV before the request computes on (`RequestBlocks.num_exact`). The backend is sent the blocks with its
        next chunk. Raises `CapacityError`.
        """
        blocks = self._blocks_of(state, "append_filled")
        held = len(blocks.block_ids)
        missing = cdiv(stop, self.block_size) - held
        at_end = arrival is None or (arrival.first == held and state.num_computed == held * self.block_size)
        if state.num_computed != state.compute_until or stop > state.max_reusable or not at_end:
            raise BookkeepingError(
                f"{state.request_id} has computed {state.num_computed} tokens and cannot get KV up to {stop}"
            )
        if arrival is not None and self.arrivals is not None:
            blocks.block_ids += self.arrivals.hand_over(arrival, missing, blocks.own)
        else:
            self.allocator.append_blocks(blocks, max(0, missing))
            blocks.num_exact = min(blocks.num_exact, state.num_computed)
        self._tables.mark_unsent(blocks, held)

    @property
    def is_regular(self) -> bool:
        """Whether a step that only decodes does nothing here but append blocks."""
        return self.window is None and self._pages is None and self._tables.all_sent and self.hints.is_idle

    # -- tiers below the device

    def forget(self, state: RequestState) -> None:
        """The request runs again or has ended: tiers need not hold its KV."""
        if self.tiers is not None:
            self.tiers.let_go(state.request_id)

    # -- after the step

    def executed(self, binding: Binding) -> None:
        """The backend has executed the step, and has the block tables of its plan."""
        if binding.stage is not BindingStage.BOUND and binding.draft.num_scheduled:
            binding.require("executed", BindingStage.BOUND)  # only a step without requests binds nothing
        binding.stage = BindingStage.EXECUTED
        self._tables.executed(binding)
        if self._pages is not None:  # not at the bind: a step in flight may still fail and be repeated
            self._pages.advance(filter(None, map(self._tables.find, binding.appended_to)))
        if self.checkpoints is not None:
            self.checkpoints.executed(binding, self._tables.find)

    def foresee(self, chunks: Iterable[Chunk]) -> None:
        """Publish what the in-flight step computes, as `commit` will register it.

        The step that is bound next may reuse it, since it is executed later. Lasts until `commit` or
        `rollback` of the in-flight step.
        """
        for chunk in chunks if self.prefix_caching and self._pages is None else ():
            state = chunk.state
            is_whole = chunk.end >= state.num_prompt_tokens
            if (is_whole or self.index_as_computed) and not self.is_published(state.request_id):
                num_tokens = min(chunk.end, state.num_prompt_tokens)
                self._registrar.publish(self._tables[state.request_id], num_tokens)

    def commit(self, state: RequestState) -> None:
        """Register what an executed chunk of the request has computed.

        `state.num_computed` has moved. A prompt that is whole now enters the index; with `index_as_computed`,
        the computed part of any.
        """
        blocks, prompt = self._blocks_of(state, "commit"), state.num_prompt_tokens
        self._tables.mark_sent(state.request_id)
        if self._pages is not None:
            self._pages.advance((blocks,))
        was_published = self._registrar.confirm(state.request_id)
        if state.num_computed < prompt:
            if self.index_as_computed:
                self._registrar.register(blocks, state.num_computed)
        elif was_published or prompt > blocks.num_shared * self.block_size:
            self._registrar.register(blocks, prompt)
            if self.writes is not None:
                self.writes.computed(blocks)
            group = state.request.group
            if group is not None and self.prefix_caching and self.checkpoints is None:
                self._tails.offer(group, blocks)

    def fork(self, state: RequestState, group: str) -> None:
        """Let requests of `group` begin where a running request stands.

        Its whole blocks enter the index. Its last, partial block is copied by each request of the group that
        is admitted while it runs.
        """
        blocks = self._blocks_of(state, "fork")
        self._registrar.register(blocks, state.num_computed)
        if self.prefix_caching and self.checkpoints is None:  # a partial block has no state
            self._tails.offer(group, blocks, replace=True)

    def release(self, state: RequestState, *, keep: bool = True, ended: bool = True) -> None:
        """The request leaves the batch; what it computed, generated tokens included, stays as cache.

        With `keep=False` nothing new stays. `ended=False`: it is preempted and will run again.
        """
        blocks, request = self._blocks_of(state, "release"), state.request
        use = Use(
            state.num_output_tokens,
            blocks.num_reused_blocks,
            state.num_prompt_tokens // self.block_size,
            request.priority,
            request.slo.ttft_s,
        )
        if keep:
            self._registrar.register(blocks, state.num_computed)
            if self.writes is not None:
                self.writes.leaves(state, blocks, use, ended=ended)
        else:
            if self.tiers is not None:
                self.tiers.drop_unstarted()
            self._registrar.unpublish_all(blocks)
        self.index.unpin(blocks.hit, use)
        try:
            self.pool.free(*blocks.allocations())
        except Exception:
            blocks.hit = self.index.pin(blocks.hit)
            raise
        if self._pages is not None:
            self._pages.release(blocks)
        self._tables.remove(state)
        self._registrar.forget(state.request_id)
        self._tails.remove(blocks)
        if keep:
            self.hints.released(state, ended=ended)
        if ended and self.writes is not None:
            self.writes.advance()

    # -- the cache as a whole

    def clear_cache(self) -> int:
        """Evict every block that no request uses; returns how many."""
        return self.allocator.clear()

    def make_room_below_ceilings(self, state: RequestState, num_blocks: int) -> bool:
        """Evict even guaranteed blocks below the ceilings of a request that is alone.

        Returns whether any were evicted.
        """
        return self.allocator.make_room_below_ceilings(num_blocks, self._account_of(state))

    def pin_prefix(self, tokens: Tokens, namespace: Namespace = Namespace()) -> PrefixHit:
        """Pin the cached part of a prompt (a system prompt, say) until `unpin_prefix`.

        Raises `CapacityError` if pinned prefixes together would hold more than `max_pinned_share`.
        """
        hit = self.pins.add(self.quotes.lookup(tokens, self.namespace_of(namespace)))
        if self._pages is not None:
            self._pages.hold(self.index.block_ids(hit))
        return hit

    def unpin_prefix(self, hit: PrefixHit) -> None:
        """Unpin what `pin_prefix` returned. Raises `BookkeepingError` for any other hit."""
        if self._pages is not None and hit in self.pins:
            self._pages.let_go(self.index.block_ids(hit))
        self.pins.remove(hit)

    def remap(self, moves: Mapping[int, int]) -> None:
        """After a compaction: block `source` of any owner is now block `target`."""
        self.pool.remap(moves)
        self.index.remap(moves)
        self._tables.remap(moves)
        if self._pages is not None:
            self._pages.remap(moves)

    def check(self) -> None:
        """Raise `BookkeepingError` unless every block has exactly one of the owners drawn above."""
        self.index.check()
        self.pool.check({INDEX_OWNER: self.allocator.blocks_of_index()})
        self._tables.check(self.index)
        self._registrar.check()
        self._tails.check()
        self.pins.check()
        self.hints.check()
        if self._pages is not None:
            self._pages.check(self.index, self.pins.hits)
        if self.arrivals is not None:
            self.arrivals.check()
        if self.tiers is not None:
            self.tiers.check()

    # -- inside

    def _blocks_of(self, state: RequestState, call: str) -> RequestBlocks:
        blocks = self._tables.find(state)
        if blocks is None:
            raise BookkeepingError(
                f"{call} of {state.request_id}, which holds no blocks: bind its chunk first"
            )
        return blocks

    def _account_of(self, state: RequestState) -> Account:
        """The account that pays for the blocks of a request."""
        return NO_ACCOUNT if self.quota is None else self.quota.paying(state.request.account)

    def _admit(self, chunk: Chunk) -> None:
        """Pin the hit of a chunk; give its request an empty allocation."""
        state, wanted = chunk.state, chunk.hit
        assert wanted is not None
        hit = self.index.pin(wanted)
        try:
            ids = self.index.block_ids(hit)
            is_served = self._pages is None or self._pages.servable(ids) == len(ids)
            if hit.num_blocks != wanted.num_blocks or not is_served or not self.quotes.is_current(wanted):
                raise BookkeepingError(
                    f"{state.request_id}: a hit of {chunk.start} tokens shrank to {hit.num_tokens} by bind"
                )
            own = self.pool.allocate(0, state.request_id, self._account_of(state))
            assert own is not None
            blocks = RequestBlocks(state, hit, ids, own, hit.num_blocks, hit.num_blocks)
            try:
                if self._pages is not None:
                    self._pages.admit(blocks)
            except Exception:
                self.pool.free(own)
                raise
        except Exception:
            self.index.unpin(hit)
            raise
        self._tables.add(blocks)

    def _bind_decodes(self, binding: Binding) -> None:
        """Append a block to each request in decode that needs one.

        The binding notes what the backend has to be sent.
        """
        states = binding.draft.needing_block()
        if states:
            requests = self._tables.of(states)
            firsts = [len(blocks.block_ids) for blocks in requests]
            block_ids = self.allocator.append_block_to_each(requests)
            self._tables.note_appended(binding, states, firsts, block_ids)
        self._tables.note_unsent(binding)

    def _keep_states(
        self, binding: Binding, checkpoints: Checkpoints, chunks: Iterable[Chunk], *, decodes: bool
    ) -> None:
        """Choose which recurrent states the step keeps, once all its requests have their blocks."""
        for chunk in chunks:
            checkpoints.keep_in_chunk(binding, self._tables[chunk.state.request_id], chunk)
        for state in dict.fromkeys(binding.appended_to) if decodes else ():
            blocks = self._tables[state.request_id]
            checkpoints.keep_before_decode(binding, blocks, len(blocks.block_ids) - 1)

    def _append_chunk_blocks(self, bound: ChunkBlocks) -> None:
        blocks = self._tables[bound.chunk.state.request_id]
        held = len(blocks.block_ids)
        bound.first_block = held if blocks.unsent_from is None else blocks.unsent_from
        bound.first_block *= blocks.num_groups
        missing = cdiv(bound.chunk.end, self.block_size) - held
        if missing > 0:
            bound.block_ids = tuple(self.allocator.append_blocks(blocks, missing))

    def _undo(self, binding: Binding, num_bound: int, num_kept: int, *, decodes: bool) -> None:
        """Take back the blocks of all chunks behind the first `num_bound`.

        Also those of all states that were to be kept behind the first `num_kept`. With `decodes`, also those
        appended to requests in decode.
        """
        if self.checkpoints is not None:
            self.checkpoints.undo(binding, self._tables.find, num_kept)
        if decodes:
            for state in binding.appended_to:
                appended = self._tables.find(state)
                if appended is not None:  # the blocks of an ended request are free already
                    self.allocator.take_last(appended, 1)
            binding.clear_decodes()
        for name, bound in reversed(list(binding.chunks.items())[num_bound:]):
            del binding.chunks[name]
            chunk, blocks = bound.chunk, self._tables.find(bound.chunk.state)
            if blocks is None:  # never reached, or ended since
                continue
            self._registrar.unpublish(blocks, 0 if chunk.admits else chunk.start)
            if bound.block_ids:
                self.allocator.take_last(blocks, len(bound.block_ids) // blocks.num_groups)
            if chunk.admits:
                self.index.unpin(blocks.hit)
                self.pool.free(*blocks.allocations())
                if self._pages is not None:
                    self._pages.release(blocks)
                self._tables.remove(chunk.state)

    def _publish(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            state = chunk.state
            if chunk.hit is not None and state.max_reusable == len(state.tokens) - 1:
                # before its own blocks count as resident
                self._attribute_misses(state, chunk.hit, again=state.scheduled_s is not None)
            self._registrar.publish(self._tables[state.request_id], chunk.end)

    def _attribute_misses(self, state: RequestState, hit: PrefixHit, *, again: bool) -> None:
        if self.misses is not None:
            namespace, had = self.namespace_of(state.request.namespace), hit.num_tokens // self.block_size
            found = self.misses.observe(self.index, state.tokens, namespace, had, preempted=again)
            state.misses = found.plus(state.misses) if again else found
            if state.request.reports_eviction and not (again or state.request.generated):
                spans = self.misses.explain(self.index, state.tokens, namespace)
                evicted = [span for span in spans if span.state is SpanState.EVICTED]
                if evicted:
                    most = max(span.num_blocks_since or 0 for span in evicted)
                    state.evicted = replace(evicted[0], stop=evicted[-1].stop, num_blocks_since=most)
