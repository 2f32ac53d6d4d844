"""`TierLoads`: KV that tiers bring up for waiting requests and expected prefixes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from sagellm.core.plan import RequestState
from sagellm.core.protocols.kv_pool import BlockQuota
from sagellm.core.protocols.kv_tiers import TierLookup
from sagellm.core.protocols.prefix_cache import PrefixReuseIndex
from sagellm.core.types import NO_ACCOUNT, Account, Namespace, Tokens
from sagellm.kvmgr.manager.quotes import Quotes
from sagellm.kvmgr.manager.tables import BlockTables
from sagellm.kvmgr.manager.writes import TierWrites


class TierLoads:
    """Asks tiers for what the device has room for, and says which account pays."""

    def __init__(
        self,
        writes: TierWrites,
        index: PrefixReuseIndex,
        tables: BlockTables,
        quotes: Quotes,
        quota: BlockQuota | None,
        namespace_of: Callable[[Namespace], Namespace],
    ) -> None:
        self._tiers, self._writes, self._index, self._tables = writes.tiers, writes, index, tables
        self._quotes, self._quota, self._namespace_of = quotes, quota, namespace_of
        self.awaits_copies = False
        """Whether the last `bring_up` found that blocks have to be saved before a load can begin."""

    def bring_up(
        self, state: RequestState, *, start: bool, admits: bool, splits: bool = False, may_begin: bool = True
    ) -> TierLookup:
        """Bring up what tiers have of a waiting request's tokens; see `KVTiers.request`.

        `admits`: it is about to be admitted. If not, RETRY also means that it could not be admitted now,
        beside a block for each running request. `splits`: SPLIT says that `bring_up_tail` is faster. Without
        `may_begin` RETRY stands for every load that would begin.

        With write-back, blocks that have to make room are saved first. RETRY then also means that this takes
        longer (`awaits_copies`).
        """
        self.awaits_copies = False
        left = self._quotes.left_beside(state) if splits or not admits else 0
        name, tokens, namespace, max_tokens, payer = self._path_of(state)
        request = partial(
            self._tiers.request, name, tokens, namespace, max_tokens, payer,
            start=start, asks=not admits, tail_blocks=self._tail_blocks(left) if splits else 0,
        )  # fmt: skip
        has_room = may_begin and (admits or left >= 0)
        if not (has_room and self._writes.is_write_back):
            return request(has_room=has_room)
        cached = self._index.lookup(tokens, namespace, max_tokens)
        missing = max_tokens // self._index.block_size - cached.num_blocks
        lacks_room = self._writes.lacks_room(missing)
        outcome = request(has_room=not lacks_room)
        if lacks_room and outcome is TierLookup.RETRY:
            held = self._index.pin(cached, is_use=False)
            try:
                self.awaits_copies = self._writes.make_room(missing)
            finally:
                self._index.unpin(held, is_use=False)
            if not self.awaits_copies:
                return request()
        return outcome

    def _tail_blocks(self, left: int) -> int:
        """The longest tail that may be loaded where so many blocks are left."""
        return max(0, min(left, self._writes.num_free) if self._writes.is_write_back else left)

    def bring_up_tail(self, state: RequestState) -> int | None:
        """See `KVTiers.load_tail`. The device has room for the tail beside all that the request needs."""
        return self._tiers.load_tail(
            *self._path_of(state), self._tail_blocks(self._quotes.left_beside(state))
        )

    def bring_up_expected(self, name: str, tokens: Tokens, namespace: Namespace, account: Account) -> None:
        """Bring up a prefix that no request waits for.

        Each running request may still have a block more.
        """
        size = self._index.block_size
        cached, num_whole = self._index.lookup(tokens, namespace), len(tokens) // size
        wanted = self._quotes.blocks_to_admit(cached, num_whole * size - cached.num_tokens)
        has_room = wanted + len(self._tables) <= self._quotes.available_blocks()
        has_room = has_room and not self._writes.lacks_room(num_whole - cached.num_blocks)
        self._tiers.request(
            name, tokens, namespace, len(tokens), self._payer(account),
            start=False, has_room=has_room, asks=False,
        )  # fmt: skip

    @property
    def num_reserved(self) -> int:
        """Free blocks that are not for loads without a request: below them, write-back evicts."""
        return self._writes.fewest_free if self._writes.is_write_back else 0

    def _path_of(self, state: RequestState) -> tuple[str, Tokens, Namespace, int, Account]:
        request = state.request
        namespace, payer = self._namespace_of(request.namespace), self._payer(request.account)
        return state.request_id, state.tokens, namespace, state.max_reusable, payer

    def _payer(self, account: Account) -> Account:
        return NO_ACCOUNT if self._quota is None else self._quota.paying(account)
