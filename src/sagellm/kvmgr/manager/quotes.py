"""`Quotes`: the prices and prefix hits that passes ask for before anything is bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sagellm.core.blocks import cdiv
from sagellm.core.plan import RequestState
from sagellm.core.protocols.kv_tiers import KVArrivals, KVTiers
from sagellm.core.protocols.prefix_cache import PrefixHit, PromptSpan, ReuseRecorder, SpanState
from sagellm.core.protocols.scheduler_ir import BlockBudget
from sagellm.core.types import Account, Namespace, Tokens
from sagellm.kvmgr.manager.allocator import BlockAllocator, SlidingWindows
from sagellm.kvmgr.manager.page_groups import PageGroups
from sagellm.kvmgr.manager.prefix_sharing import (
    PinnedPrefixes,
    PrefixRegistrar,
    SharedTails,
    SharingGroups,
)
from sagellm.kvmgr.manager.tables import BlockTables


class Quotes:
    """Implements `KVQuotes`: reads the manager's parts and changes nothing."""

    def __init__(
        self,
        tables: BlockTables,
        allocator: BlockAllocator,
        windows: SlidingWindows,
        registrar: PrefixRegistrar,
        tails: SharedTails,
        pins: PinnedPrefixes,
        groups: SharingGroups,
        page_groups: PageGroups | None,
        tiers: KVTiers | None,
        arrivals: KVArrivals | None,
        metrics: ReuseRecorder | None,
        now: Callable[[], float],
        prefix_caching: bool,
        prefill_token_s: float,
    ) -> None:
        self._index, self._pool, self._quota = allocator.index, allocator.pool, allocator.quota
        self._tables, self._allocator, self._windows = tables, allocator, windows
        self._registrar, self._tails, self._pins, self._groups = registrar, tails, pins, groups
        self._pages, self._tiers, self._arrivals = page_groups, tiers, arrivals
        self._metrics, self._now = metrics, now
        self._per_block = 1 if page_groups is None else page_groups.per_block
        self._prefix_caching, self._prefill_token_s = prefix_caching, prefill_token_s
        self.block_size = self._pool.block_size
        self.num_blocks = self._pool.total_blocks // self._per_block
        self.most_blocks = (
            self.num_blocks if page_groups is None else page_groups.most_blocks(self._pool.total_blocks)
        )

    # -- prefix hits

    @property
    def version(self) -> int:
        parts = self._tables, self._allocator, self._registrar, self._pins
        changes = sum(part.num_changes for part in parts)
        return changes + (0 if self._arrivals is None else self._arrivals.num_changes)

    def match(self, state: RequestState) -> PrefixHit:
        """The longest reusable prefix, within `state.max_reusable`."""
        limit = state.max_reusable if self._prefix_caching else 0
        namespace = self._groups.namespace_of(state.request.namespace)
        began_s = self._now() if self._metrics is not None else 0.0
        hit = self.lookup(state.tokens, namespace, limit)
        if hit.num_blocks and not self._can_begin_with(hit, cdiv(len(state.tokens), self.block_size)):
            hit = self.lookup(state.tokens, namespace, 0)
        if self._metrics is not None:
            self._metrics.observe_match(self._now() - began_s)
        if state.request.group is None:
            return hit
        return self._tails.extend_hit(hit, state, limit)

    def lookup(self, tokens: Tokens, namespace: Namespace, max_tokens: int | None = None) -> PrefixHit:
        """The longest cached prefix that all KV groups can serve, at most `max_tokens` long."""
        hit = self._index.lookup(tokens, namespace, max_tokens)
        if self._pages is None or not hit.num_blocks:
            return hit
        servable = self._pages.servable(self._index.block_ids(hit))
        if servable == hit.num_blocks:
            return hit
        return self._index.lookup(tokens, namespace, servable * self.block_size)

    def _can_begin_with(self, hit: PrefixHit, num_blocks: int) -> bool:
        """Whether a request of so many blocks fits with the hit, or neither way."""
        if self._pages is None or self._pages.checkpoints is None:
            return True
        pinned = [self._index.block_ids(pinned) for pinned in self._pins.hits if pinned.num_blocks]
        return self._pages.can_hit(self._index.block_ids(hit), num_blocks, pinned)

    def usable(self, spans: list[PromptSpan], tokens: Tokens, namespace: Namespace) -> list[PromptSpan]:
        """The spans of a prompt, its hit cut where a request can go on.

        Of a prompt that is cached whole the last block stays: a request computes it for its logits.
        """
        if self._pages is None or not spans or spans[0].state is not SpanState.HIT:
            return spans
        end, stop = spans[0].stop, self.lookup(tokens, namespace, len(tokens) - 1).num_tokens
        if stop == end or (end == len(tokens) and stop == end - self.block_size):
            return spans
        cut = [PromptSpan(0, stop, SpanState.HIT)] if stop else []
        return [*cut, PromptSpan(stop, end, SpanState.INCOMPLETE), *spans[1:]]

    def is_current(self, hit: PrefixHit) -> bool:
        """Whether the running request whose block the hit would copy has it."""
        return hit.tail is None or self._tails.can_copy(hit.tail)

    # -- blocks

    def available_blocks(self) -> int:
        free, cached = self._pool.num_free, self._index.num_evictable
        if self._pages is None:
            return free + cached + self._windows.total_behind()
        pages = free + cached + self._pages.num_evictable(cached) + self._windows.total_behind()
        return pages // self._per_block

    def block_budget(self) -> BlockBudget:
        return BlockBudget(self.available_blocks(), None if self._quota is None else self._ceilings_of)

    def max_blocks(self, account: Account) -> int:
        """Blocks that one account can have at most."""
        quota = self._quota
        if quota is None:
            return self.most_blocks
        return min(self.most_blocks, quota.ceiling(quota.paying(account)))

    def blocks_to_append(self, state: RequestState, num_tokens: int) -> int:
        held = len(self._tables[state.request_id].block_ids)
        new = max(0, cdiv(state.num_computed + num_tokens, self.block_size) - held)
        return new if self._pages is None else cdiv(self._pages.pages_of(new), self._per_block)

    def blocks_to_admit(self, hit: PrefixHit, num_tokens: int) -> int:
        new = cdiv(hit.num_tokens + num_tokens, self.block_size) - hit.num_blocks
        unpinned = self._index.num_unpinned_on_path(hit) if hit.num_blocks else 0
        if self._pages is None:
            return new + unpinned
        pages = self._pages.pages_to_admit(self._index.block_ids(hit), unpinned, new)
        return cdiv(pages, self._per_block)

    def left_beside(self, state: RequestState) -> int:
        """Available blocks once a request is admitted, and each running request has one more."""
        namespace = self._groups.namespace_of(state.request.namespace)
        hit = self.lookup(state.tokens, namespace, state.max_reusable)
        wanted = self.blocks_to_admit(hit, len(state.tokens) - hit.num_tokens) + len(self._tables)
        return self.available_blocks() - wanted

    def blocks_freed_by_preempting(self, state: RequestState) -> int:
        blocks, lost = self._tables[state.request_id], self._num_lost(state)
        if self._pages is None:
            return lost
        alone = self._index.num_held_alone(blocks.hit)
        pages = self._pages.pages_freed(blocks, alone) - self._windows.num_behind(blocks)
        return (lost + pages) // self._per_block

    def first_lost_block(self, state: RequestState) -> int:
        """The first block of its table that preempting the request makes available to others."""
        blocks = self._tables[state.request_id]
        return len(blocks.block_ids) - blocks.num_dropped_blocks - self._num_lost(state)

    def _num_lost(self, state: RequestState) -> int:
        """Blocks of its first KV group that preempting the request makes available to others."""
        blocks = self._tables[state.request_id]
        behind = self._windows.num_behind(blocks) if self._pages is None else 0
        return len(blocks.own.block_ids) - behind + self._index.num_held_alone(blocks.hit)

    def resume_s(self, state: RequestState) -> float:
        first = self.first_lost_block(state)
        recompute_s = max(0, state.num_computed - first * self.block_size) * self._prefill_token_s
        if self._tiers is None:
            return recompute_s
        return min(recompute_s, self._tiers.load_s(cdiv(state.num_computed, self.block_size) - first))

    def _ceilings_of(self, account: Account) -> Mapping[str, int]:
        """Blocks left below each ceiling of the account, counting those that can be freed."""
        quota = self._quota
        assert quota is not None
        left = dict(quota.headrooms(quota.paying(account)))
        if not left:
            return left
        for other, count in (*self._index.evictable_by_account().items(), *self._windows.behind_by_account()):
            for name in left.keys() & quota.headrooms(other).keys():
                left[name] += count
        return left
