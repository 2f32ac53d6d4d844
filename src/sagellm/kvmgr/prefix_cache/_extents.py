"""Extents of an index, evictable and evicted, and the policies that choose among them."""

from __future__ import annotations

import heapq
import math
from abc import abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, Self, TypeVar

from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.eviction import (
    NO_USE,
    EvictionPolicy,
    Hint,
    PolicyFactory,
    Use,
    UseListener,
    bonus_of,
)
from sagellm.core.protocols.prefix_cache import Evictor, IndexNode
from sagellm.core.types import NO_ACCOUNT, Account, Namespace

MIN_SHARES_TO_PRUNE = 64
GhostKey = TypeVar("GhostKey", int, bytes)


class Ghost(NamedTuple):
    """An eviction: the clock's seconds, its cause and its request.

    `num_before`: evicted blocks before it."""

    at_s: float
    cause: str
    evictor: Evictor = Evictor()
    num_before: int = 0


class Ghosts(Generic[GhostKey]):
    """The last `limit` evictions by key (None: all); the oldest is forgotten first.

    `has_forgotten`: whether there were more.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = math.inf if limit is None else limit
        self._ghosts: OrderedDict[GhostKey, Ghost] = OrderedDict()
        self.has_forgotten = False

    def add(self, key: GhostKey, ghost: Ghost) -> None:
        ghosts = self._ghosts
        ghosts[key] = ghost
        if len(ghosts) > self._limit:
            ghosts.popitem(last=False)
            self.has_forgotten = True

    def get(self, key: GhostKey) -> Ghost | None:
        return self._ghosts.get(key)

    def discard(self, key: GhostKey) -> None:
        """Forget a ghost, if there is one: its extent is resident again."""
        self._ghosts.pop(key, None)


@dataclass(slots=True, eq=False)
class AccountShare:
    """What one account has in the index. `policy` chooses what of it is evicted; None: what was used longest
    ago."""

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


@dataclass(eq=False)
class CachedExtent(IndexNode):
    """An extent of an index. For the radix tree a node, for the hashed index one block.

    `pins` is its reference count; `num_ends` pinned hits end with it. It is an evictable leaf while it has
    neither pins nor children. `last_use`, `used_s` and `num_uses` are exact for leaves: a removed child hands
    them to its parent. `end_block` is the position behind its last block.
    """

    __slots__ = ()

    parent: Self | None
    children: dict[bytes, Self]
    namespace: Namespace
    share: AccountShare
    key: int
    num_blocks: int
    end_block: int
    pins: int = 0
    num_ends: int = 0
    last_use: int = 0
    num_uses: int = 0
    used_s: float = 0.0
    bonus_s: float = 0.0
    use: Use = NO_USE
    hint: Hint | None = None

    @property
    def first_position(self) -> int:
        """Blocks in front of this extent."""
        return self.end_block - self.num_blocks

    @property
    def tenant(self) -> str:
        return self.share.account.tenant or self.namespace.tenant

    @property
    @abstractmethod
    def content(self) -> bytes:
        """The bytes of the blocks that were not evicted."""

    def path(self) -> Iterator[Self]:
        """This extent and its ancestors that have blocks: a root has none."""
        extent: Self | None = self
        while extent is not None and extent.num_blocks:
            yield extent
            extent = extent.parent

    def leaves(self, left_out: Self | None) -> Iterator[Self]:
        """The leaves at or below this extent, without those below its child `left_out`."""
        stack = [self]
        while stack:
            extent = stack.pop()
            if not extent.children:
                yield extent
            stack.extend(child for child in extent.children.values() if child is not left_out)


ExtentType = TypeVar("ExtentType", bound=CachedExtent)


class EvictableLeaves(Generic[ExtentType]):
    """The unpinned leaves of one index by key, and the share of each account.

    Every change is reported to the policy of the leaf's account. Without `policy_factory`, `policy` serves
    the default account, and other accounts are refused.
    """

    def __init__(self, policy: EvictionPolicy | None, policy_factory: PolicyFactory | None) -> None:
        if policy is None and policy_factory is not None:
            policy = policy_factory()
        self._policy_factory = policy_factory
        self.default_share = AccountShare(NO_ACCOUNT, policy)
        self.shares: dict[Account, AccountShare] = {NO_ACCOUNT: self.default_share}
        self.by_key: dict[int, ExtentType] = {}
        self._prune_at = MIN_SHARES_TO_PRUNE

    def share(self, account: Account) -> AccountShare:
        """The share of an account, made when it is first asked for. Clients choose the names of accounts,
        without end. So accounts without blocks are forgotten from time to time, with their policies."""
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

    def add(self, leaf: ExtentType, *, after_use: bool = False) -> None:
        """Add `leaf` if it is evictable (`after_use`: because its last pin is gone)."""
        if leaf.pins or leaf.children:
            return
        self.register(leaf)
        policy = leaf.share.policy
        if policy is not None:
            (policy.unpin if after_use else policy.insert)(leaf)

    def register(self, leaf: ExtentType) -> None:
        """Add a leaf that its policy has already, or gets from the caller."""
        self.by_key[leaf.key] = leaf

    def discard(self, leaf: ExtentType, *, is_use: bool = True) -> None:
        """Take `leaf` out, if it is there. It was pinned, got a child, or left the index.

        `is_use`: if it was pinned, a request uses it.
        """
        if self.by_key.get(leaf.key) is leaf:
            del self.by_key[leaf.key]
            policy = leaf.share.policy
            if policy is not None:
                (policy.pin if leaf.pins and is_use else policy.remove)(leaf.key)

    def set_bonus(self, leaf: ExtentType, bonus_s: float) -> None:
        """Change the seconds by which retention makes an extent look younger to its policy."""
        leaf.bonus_s = bonus_s
        if self.by_key.get(leaf.key) is leaf:
            self.discard(leaf)
            self.add(leaf)

    def hint(self, leaf: ExtentType, hint: Hint, now_s: float) -> None:
        """Note a hint until the next use. The policy gets it now, or when the extent becomes a leaf."""
        leaf.hint = hint.over(leaf.hint)
        if hint.duration_s is not None:
            self.set_bonus(leaf, bonus_of(hint, now_s - leaf.used_s))
        policy = leaf.share.policy
        if policy is not None and not leaf.pins and not leaf.children:
            policy.hint(leaf.key, leaf.hint)

    def evict(
        self, share: AccountShare, num_blocks: int, give_up: Callable[[ExtentType, int], ExtentType | None]
    ) -> None:
        """Evict `num_blocks` blocks of one account, or all that its policy can give up. Each choice is a call
        of `give_up`."""
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

    def evict_tail(
        self, leaf: ExtentType, num_blocks: int, give_up: Callable[[ExtentType, int], ExtentType | None]
    ) -> None:
        """Evict the last blocks of the path to an evictable leaf.

        Fewer than `num_blocks` where the path has a pin, a fork or another account's block.
        """
        last: ExtentType | None = leaf
        while num_blocks and last is not None:
            policy, taken = last.share.policy, min(num_blocks, last.num_blocks)
            num_blocks -= taken
            is_whole = taken == last.num_blocks
            if policy is not None:
                policy.remove(last.key)
            parent = give_up(last, taken)
            last = parent if is_whole else last
            if policy is not None and last is not None:
                policy.insert(last)

    def set_policy(self, factory: PolicyFactory) -> None:
        """Give every account a new policy. It gets the leaves in order of their last use. Nothing changes if
        a policy cannot be made."""
        policies = {id(share): factory() for share in self.shares.values()}
        for leaf in sorted(self.by_key.values(), key=lambda leaf: leaf.last_use):
            policies[id(leaf.share)].insert(leaf)
        self._policy_factory = factory
        for share in self.shares.values():
            share.policy = policies[id(share)]

    def check(self, extents: Iterable[ExtentType]) -> None:
        """Raise `BookkeepingError` where leaves, shares or policies do not fit the index's extents."""
        num_cached: Counter[AccountShare] = Counter()
        num_pinned: Counter[AccountShare] = Counter()
        num_leaves: Counter[AccountShare] = Counter()
        for extent in extents:
            is_leaf = not extent.pins and not extent.children
            is_known = self.by_key.get(extent.key) is extent
            require(is_known == is_leaf, f"extent {extent.key:x} is wrongly (not) evictable")
            num_cached[extent.share] += extent.num_blocks
            num_pinned[extent.share] += extent.num_blocks if extent.pins else 0
            num_leaves[extent.share] += extent.num_blocks if is_leaf else 0
        in_all = sum(leaf.num_blocks for leaf in self.by_key.values())
        require_same("blocks of evictable leaves", num_leaves.total(), in_all)
        for share in self.shares.values():
            require_same(f"blocks of {share.account}", num_cached[share], share.num_cached)
            require_same(f"pinned blocks of {share.account}", num_pinned[share], share.num_pinned)
            if share.policy is not None:
                what = f"evictable leaf blocks of {share.account} in the index and in the policy"
                require_same(what, num_leaves[share], share.policy.num_evictable)
                share.policy.check()


def require(condition: bool, message: str) -> None:
    if not condition:
        raise BookkeepingError(message)


def require_same(what: str, found: int, booked: int) -> None:
    require(found == booked, f"{what}: {found} found, {booked} in the books")


def _age(leaf: CachedExtent) -> tuple[int, int, int]:
    """Sorts the leaf that was used longest ago first; of one use, the deepest."""
    return (leaf.last_use, -leaf.end_block, leaf.key)
