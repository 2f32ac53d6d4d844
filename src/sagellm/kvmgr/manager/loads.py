"""`TierLoads`: KV that tiers bring up for waiting requests and expected prefixes."""

from __future__ import annotations

from collections.abc import Callable

from sagellm.core.plan import RequestState
from sagellm.core.protocols.kv_pool import BlockQuota
from sagellm.core.protocols.kv_tiers import KVTiers, TierLookup
from sagellm.core.protocols.prefix_cache import PrefixReuseIndex
from sagellm.core.types import NO_ACCOUNT, Account, Namespace, Tokens
from sagellm.kvmgr.manager.quotes import Quotes
from sagellm.kvmgr.manager.tables import BlockTables


class TierLoads:
    """Asks tiers for what the device has room for, and says which account pays."""

    def __init__(
        self,
        tiers: KVTiers,
        index: PrefixReuseIndex,
        tables: BlockTables,
        quotes: Quotes,
        quota: BlockQuota | None,
        namespace_of: Callable[[Namespace], Namespace],
    ) -> None:
        self._tiers, self._index, self._tables = tiers, index, tables
        self._quotes, self._quota, self._namespace_of = quotes, quota, namespace_of

    def bring_up(
        self, state: RequestState, *, start: bool, admits: bool, splits: bool = False, may_begin: bool = True
    ) -> TierLookup:
        """Bring up what tiers have of a waiting request's tokens; see `KVTiers.request`.

        `admits`: it is about to be admitted. If not, RETRY also means that it could not be admitted now,
        beside a block for each running request. `splits`: SPLIT says that `bring_up_tail` is faster. Without
        `may_begin` RETRY stands for every load that would begin.
        """
        left = self._quotes.left_beside(state) if splits or not admits else 0
        return self._tiers.request(
            *self._path_of(state), start=start, has_room=may_begin and (admits or left >= 0),
            asks=not admits, tail_blocks=max(0, left) if splits else 0,
        )  # fmt: skip

    def bring_up_tail(self, state: RequestState) -> int | None:
        """See `KVTiers.load_tail`. The device has room for the tail beside all that the request needs."""
        return self._tiers.load_tail(*self._path_of(state), max(0, self._quotes.left_beside(state)))

    def bring_up_expected(self, name: str, tokens: Tokens, namespace: Namespace, account: Account) -> None:
        """Bring up a prefix that no request waits for.

        Each running request may still have a block more.
        """
        size = self._index.block_size
        cached, num_whole = self._index.lookup(tokens, namespace), len(tokens) // size
        wanted = self._quotes.blocks_to_admit(cached, num_whole * size - cached.num_tokens)
        has_room = wanted + len(self._tables) <= self._quotes.available_blocks()
        self._tiers.request(
            name, tokens, namespace, len(tokens), self._payer(account),
            start=False, has_room=has_room, asks=False,
        )  # fmt: skip

    def _path_of(self, state: RequestState) -> tuple[str, Tokens, Namespace, int, Account]:
        request = state.request
        namespace, payer = self._namespace_of(request.namespace), self._payer(request.account)
        return state.request_id, state.tokens, namespace, state.max_reusable, payer

    def _payer(self, account: Account) -> Account:
        return NO_ACCOUNT if self._quota is None else self._quota.paying(account)
