"""What passes may ask of the KV books: hits, prices in blocks, and what there is. Nothing here changes
anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sagellm.core.blocks import cdiv
from sagellm.core.plan import RequestState
from sagellm.core.protocols.kv_pool import BlockQuota, KVPool
from sagellm.core.protocols.prefix_cache import PrefixHit, PrefixReuseIndex, ReuseRecorder
from sagellm.core.protocols.scheduler_ir import BlockBudget, ResumeCost
from sagellm.core.types import Account, BlockIds, Namespace
from sagellm.kvmgr.manager.donors import Donors
from sagellm.kvmgr.manager.sequence import BlockStates, SequenceKV
from sagellm.kvmgr.manager.swap import SwapSpace
from sagellm.kvmgr.manager.windows import Windows

GROUP_PREFIX = "\0group:"
"""No tenant's name begins like this: `Request` refuses NUL in it."""


class Quotes:
    """Implements most of `KVQuotes`; `KVCacheManager` is one, and brings what is declared here."""

    index: PrefixReuseIndex
    pool: KVPool
    quota: BlockQuota | None
    swap: SwapSpace | None
    metrics: ReuseRecorder | None
    block_size: int
    prefix_caching: bool
    prefill_token_s: float
    _now: Callable[[], float]
    _sharing: Mapping[str, str]
    _sequences: dict[str, SequenceKV]
    _donors: Donors
    _windows: Windows

    def match(self, state: RequestState) -> PrefixHit:
        """The longest reusable prefix, within `state.max_reusable`."""
        limit = state.max_reusable if self.prefix_caching else 0
        namespace = self.namespace_of(state.request.namespace)
        if self.metrics is None:
            hit = self.index.lookup(state.tokens, namespace, limit)
        else:
            began_s = self._now()
            hit = self.index.lookup(state.tokens, namespace, limit)
            self.metrics.observe_match(self._now() - began_s)
        if self.swap is not None:
            hit = self.swap.lengthen(hit, state.request_id)
        if state.request.group is None or hit.num_swapped:
            return hit
        return self._donors.lengthen(hit, state, limit)

    def is_current(self, hit: PrefixHit) -> bool:
        """Whether what the hit counts on outside the index (a running request's last block) is there."""
        return hit.tail is None or hit.tail.request_id in self._sequences

    def namespace_of(self, namespace: Namespace) -> Namespace:
        """The namespace in the index: tenants of one sharing group have one together."""
        group = self._sharing.get(namespace.tenant)
        return namespace if group is None else namespace._replace(tenant=GROUP_PREFIX + group)

    @property
    def num_blocks(self) -> int:
        return self.pool.total_blocks

    def available_blocks(self) -> int:
        return self.pool.num_free + self.index.num_evictable + self._windows.num_behind()

    def budget(self) -> BlockBudget:
        return BlockBudget(self.available_blocks(), None if self.quota is None else self._ceilings_of)

    def max_blocks(self, account: Account) -> int:
        """Blocks that one account can have at most."""
        total = self.pool.total_blocks
        return total if self.quota is None else min(total, self.quota.ceiling(self.quota.paying(account)))

    def blocks_to_append(self, state: RequestState, num_tokens: int) -> int:
        held = len(self._sequences[state.request_id].block_ids)
        return max(0, self._blocks_for(state.num_computed + num_tokens) - held)

    def blocks_to_admit(self, hit: PrefixHit, num_tokens: int) -> int:
        new = cdiv(hit.num_tokens + num_tokens, self.block_size) - hit.num_blocks
        return new + self.index.num_unpinned_on_path(hit) if hit.num_blocks else new

    def blocks_freed_by_preempting(self, state: RequestState) -> int:
        sequence = self._sequences[state.request_id]
        own = len(sequence.own.block_ids) - self._windows.behind(sequence)
        return own + self.index.num_held_alone(sequence.hit)

    def resume_cost(self, state: RequestState) -> ResumeCost:
        first = self._first_lost(state)
        recompute_s = max(0, state.num_computed - first * self.block_size) * self.prefill_token_s
        swap = self.swap
        if swap is None or self.window is not None:
            return ResumeCost(0, 0, recompute_s, 0.0)
        num_blocks = self._blocks_for(state.num_computed) - first
        return ResumeCost(num_blocks, swap.num_free, recompute_s, 2 * num_blocks * swap.block_s)

    def block_states(self) -> BlockStates:
        cached, free = self.index.num_evictable, self.pool.num_free
        return BlockStates(self.pool.total_blocks - cached - free, cached, free)

    def block_table(self, request_id: str) -> BlockIds:
        """The blocks of a running request, in order of position."""
        return self._sequences[request_id].block_ids

    def num_slots(self, request_id: str) -> int:
        """Tokens that the blocks of a running request can hold."""
        return len(self._sequences[request_id].block_ids) * self.block_size

    @property
    def window(self) -> int | None:
        return self._windows.width

    # -- inside

    def _blocks_for(self, num_tokens: int) -> int:
        return cdiv(num_tokens, self.block_size)

    def _first_lost(self, state: RequestState) -> int:
        """From which block of its table on a request would lose what it has, if it were preempted."""
        return len(self.block_table(state.request_id)) - self.blocks_freed_by_preempting(state)

    def _ceilings_of(self, account: Account) -> Mapping[str, int]:
        """By ceiling of the account: blocks that it could have if all that can be freed below it were."""
        quota = self.quota
        assert quota is not None
        left = dict(quota.headrooms(quota.paying(account)))
        if not left:
            return left
        for other, count in (*self.index.evictable_by_account().items(), *self._windows.behind_by_account()):
            for name in left.keys() & quota.headrooms(other).keys():
                left[name] += count
        return left
