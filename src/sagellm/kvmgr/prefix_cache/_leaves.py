"""Evictable leaves of an index, by account, and the policies that choose among them.

Both indexes use it. A leaf is a node of the radix tree, or one block of the hashed index.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.eviction import EvictionPolicy, Extent, Hint, UseListener, bonus_of
from sagellm.core.types import NO_ACCOUNT, Account

MIN_SHARES_TO_PRUNE = 64


@dataclass(slots=True, eq=False)
class AccountShare:
    """What one account has in the index.

    `policy` chooses what of it is evicted; None: what was used longest ago.
    """

    account: Account
    policy: EvictionPolicy | None
    num_cached: int = 0
    num_pinned: int = 0

    @property
    def num_evictable(self) -> int:
        return self.num_cached - self.num_pinned

    @property
    def listener(self) -> UseListener | None:
        """The policy, if it wants to know every use."""
        policy: object = self.policy
        return policy if isinstance(policy, UseListener) else None


class Leaf(Extent, Protocol):
    """An extent of an index. It is an evictable leaf while it has neither pins nor children."""

    hint: Hint | None
    bonus_s: float

    @property
    def pins(self) -> int: ...

    @property
    def children(self) -> Collection[object]: ...

    @property
    def share(self) -> AccountShare: ...


LeafType = TypeVar("LeafType", bound=Leaf)


class EvictableLeaves(Generic[LeafType]):
    """The unpinned leaves of one index by key, and the share of each account.

    Every change is reported to the policy of the leaf's account. Without `policy_factory`, `policy` serves
    the default account, and other accounts are refused.
    """

    def __init__(
        self, policy: EvictionPolicy | None, policy_factory: Callable[[], EvictionPolicy] | None
    ) -> None:
        if policy is None and policy_factory is not None:
            policy = policy_factory()
        self._policy_factory = policy_factory
        self.default_share = AccountShare(NO_ACCOUNT, policy)
        self.shares: dict[Account, AccountShare] = {NO_ACCOUNT: self.default_share}
        self.by_key: dict[int, LeafType] = {}
        self._prune_at = MIN_SHARES_TO_PRUNE

    def share(self, account: Account) -> AccountShare:
        """The share of an account, made when it is first asked for.

        Clients choose the names of accounts, without end. So accounts without blocks are forgotten from time
        to time, with their policies.
        """
        share = self.shares.get(account)
        if share is None:
            if len(self.shares) >= self._prune_at:
                self.shares = {
                    name: kept
                    for name, kept in self.shares.items()
                    if kept.num_cached or kept is self.default_share
                }
                self._prune_at = max(MIN_SHARES_TO_PRUNE, 2 * len(self.shares))
            if self._policy_factory is None and self.default_share.policy is not None:
                raise BookkeepingError(
                    f"blocks of {account} need a policy of their own: make the index with policy_factory"
                )
            policy = self._policy_factory() if self._policy_factory is not None else None
            share = self.shares[account] = AccountShare(account, policy)
        return share

    def add(self, leaf: LeafType, *, after_use: bool = False) -> None:
        """Add `leaf` if it is evictable (`after_use`: because its last pin is gone)."""
        if leaf.pins or leaf.children:
            return
        self.register(leaf)
        policy = leaf.share.policy
        if policy is not None:
            (policy.unpin if after_use else policy.insert)(leaf)

    def register(self, leaf: LeafType) -> None:
        """Add a leaf that its policy has already, or gets from the caller."""
        self.by_key[leaf.key] = leaf

    def discard(self, leaf: LeafType) -> None:
        """Take `leaf` out, if it is there.

        It was pinned, got a child, or left the index.
        """
        if self.by_key.get(leaf.key) is leaf:
            del self.by_key[leaf.key]
            policy = leaf.share.policy
            if policy is not None:
                (policy.pin if leaf.pins else policy.remove)(leaf.key)

    def set_bonus(self, leaf: LeafType, bonus_s: float) -> None:
        """Change the seconds by which retention makes an extent look younger to its policy."""
        leaf.bonus_s = bonus_s
        if self.by_key.get(leaf.key) is leaf:
            self.discard(leaf)
            self.add(leaf)

    def hint(self, leaf: LeafType, hint: Hint, now_s: float) -> None:
        """Note a hint until the next use.

        The policy gets it now, or when the extent becomes a leaf.
        """
        leaf.hint = hint.over(leaf.hint)
        if hint.duration_s is not None:
            self.set_bonus(leaf, bonus_of(hint, now_s - leaf.used_s))
        policy = leaf.share.policy
        if policy is not None and not leaf.pins and not leaf.children:
            policy.hint(leaf.key, leaf.hint)

    def evict(
        self, share: AccountShare, num_blocks: int, give_up: Callable[[LeafType, int], LeafType | None]
    ) -> None:
        """Evict `num_blocks` blocks of one account, or all that its policy can give up.

        Each choice is a call of `give_up`.
        """
        if share.policy is not None:
            share.policy.evict(num_blocks, give_up)
            return
        queue = [_age(leaf) for leaf in self.by_key.values() if leaf.share is share]
        heapq.heapify(queue)
        while num_blocks and queue:
            leaf = self.by_key[queue[0][2]]
            take = min(num_blocks, leaf.num_blocks)
            num_blocks -= take
            if take == leaf.num_blocks:
                heapq.heappop(queue)
            parent = give_up(leaf, take)
            if parent is not None:
                heapq.heappush(queue, _age(parent))

    def shares_to_evict_from(self) -> list[AccountShare]:
        """All shares, the one with the most evictable blocks first."""
        return sorted(self.shares.values(), key=lambda share: -share.num_evictable)

    def set_policy(self, factory: Callable[[], EvictionPolicy]) -> None:
        """Give every account a new policy.

        It gets the leaves in order of their last use. Nothing changes if a policy cannot be made.
        """
        policies = {id(share): factory() for share in self.shares.values()}
        for leaf in sorted(self.by_key.values(), key=lambda leaf: leaf.last_use):
            policies[id(leaf.share)].insert(leaf)
        self._policy_factory = factory
        for share in self.shares.values():
            share.policy = policies[id(share)]

    def evictable_by_account(self) -> Mapping[Account, int]:
        return {account: share.num_evictable for account, share in self.shares.items()}


def _age(leaf: Leaf) -> tuple[int, int, int]:
    """Sorts the leaf that was used longest ago first; of one use, the deepest."""
    return (leaf.last_use, -leaf.first_position - leaf.num_blocks, leaf.key)
