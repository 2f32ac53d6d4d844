"""The evictable leaves of the radix tree: by key, by account, and in the hands of the policies."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.eviction import EvictionPolicy, UseListener
from sagellm.core.types import NO_ACCOUNT, Account
from sagellm.kvmgr.prefix_cache._node import Node, content_key

GiveUpNode = Callable[[Node, int], Node | None]
MIN_GROUPS_TO_PRUNE = 64


@dataclass(slots=True, eq=False)
class Group:
    """What one account has in the index, and the policy that chooses among it (None: last use)."""

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


class Leaves:
    """Leaves that nobody pins, and the groups that they belong to."""

    def __init__(
        self,
        step: int,
        policy: EvictionPolicy | None,
        policy_factory: Callable[[], EvictionPolicy] | None,
    ) -> None:
        if policy is None and policy_factory is not None:
            policy = policy_factory()
        self._step = step
        self._factory = policy_factory
        self.nobody = Group(NO_ACCOUNT, policy)
        self.groups: dict[Account, Group] = {NO_ACCOUNT: self.nobody}
        self.by_key: dict[int, Node] = {}
        self._prune_at = MIN_GROUPS_TO_PRUNE

    def group(self, account: Account) -> Group:
        """The group of an account, made at first need."""
        group = self.groups.get(account)
        if group is None:
            if len(self.groups) >= self._prune_at:
                self._prune()
            if self._factory is None and self.nobody.policy is not None:
                raise BookkeepingError(
                    f"blocks of {account} need a policy of their own: make the index with policy_factory"
                )
            policy = self._factory() if self._factory is not None else None
            group = self.groups[account] = Group(account, policy)
        return group

    def offer(self, node: Node, *, returning: bool = False) -> None:
        """The node became an evictable leaf, if it is one (`returning`: its last user went)."""
        if node.pins or node.children:
            return
        self.take_in(node)
        policy = node.group.policy
        if policy is not None:
            (policy.unpin if returning else policy.insert)(node)

    def take_in(self, node: Node) -> None:
        """Note a leaf that its policy knows already, or is about to be told of."""
        if self.by_key.setdefault(node.key, node) is not node:
            parent = node.parent
            assert parent is not None
            node.key = self.free_key(parent, node.edge[: self._step])
            self.by_key[node.key] = node

    def withdraw(self, node: Node) -> None:
        """The node is no evictable leaf any more, if it was one: it is pinned, or has a child."""
        if self.by_key.get(node.key) is node:
            del self.by_key[node.key]
            policy = node.group.policy
            if policy is not None:
                (policy.pin if node.pins else policy.remove)(node.key)

    def split(self, head: Node, tail: Node) -> None:
        """`tail` was cut below `head`, which keeps its key; if it was a leaf, it still is."""
        evictable = self.by_key.pop(head.key, None) is tail
        tail.key = self.free_key(head, tail.edge[: self._step])
        if evictable:
            self.by_key[tail.key] = tail
        if tail.group.policy is not None:
            tail.group.policy.split(head.key, head, tail)

    def free_key(self, parent: Node, first_block: bytes) -> int:
        """A content key that no evictable leaf has: 64-bit hashes of hostile prompts can be made to clash."""
        salt = 0
        while (key := content_key(parent, first_block, salt)) in self.by_key:
            salt += 1
        return key

    def evict(self, group: Group, num_blocks: int, give_up: GiveUpNode) -> None:
        """Have the group's policy give up that many blocks, or all it can."""
        if group.policy is not None:
            group.policy.evict(num_blocks, give_up)
        else:
            self._evict_oldest(group, num_blocks, give_up)

    def _evict_oldest(self, group: Group, num_blocks: int, give_up: GiveUpNode) -> None:
        queue = [_age(leaf) for leaf in self.by_key.values() if leaf.group is group]
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

    def swap(self, factory: Callable[[], EvictionPolicy]) -> None:
        """Other policies from now on, for all accounts; they hear of the leaves in order of last use."""
        policies = {id(group): factory() for group in self.groups.values()}
        for leaf in sorted(self.by_key.values(), key=lambda leaf: leaf.last_use):
            policies[id(leaf.group)].insert(leaf)
        self._factory = factory
        for group in self.groups.values():
            group.policy = policies[id(group)]

    def evictable_by_account(self) -> Mapping[Account, int]:
        return {account: group.num_evictable for account, group in self.groups.items()}

    def _prune(self) -> None:
        """Forget accounts without blocks, and their policies: clients choose the names, without end."""
        self.groups = {
            one: group for one, group in self.groups.items() if group.num_cached or group is self.nobody
        }
        self._prune_at = max(MIN_GROUPS_TO_PRUNE, 2 * len(self.groups))


def _age(leaf: Node) -> tuple[int, int, int]:
    return (leaf.last_use, -leaf.end, leaf.key)
