"""`RadixIndex`: a compressed radix tree over token blocks whose edges are `bytes`.

A child is found by the bytes of its first block, an edge is compared as memory, and reference counts (pins)
live on nodes. The idea of a radix tree over KV is RadixAttention's (Zheng et al., SGLang, 2024).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence

from sagellm.core.blocks import cdiv
from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import BookkeepingError
from sagellm.core.events import BlocksRemoved, BlocksStored, EventBus, IndexCleared
from sagellm.core.protocols.eviction import NO_USE, EvictionPolicy, Hint, Use
from sagellm.core.protocols.prefix_cache import Branch, InsertResult, MatchReport, PrefixHit
from sagellm.core.types import NO_ACCOUNT, TOKEN_BYTES, Account, BlockIds, Namespace, Retention, Tokens
from sagellm.kvmgr.prefix_cache._ghosts import Ghost
from sagellm.kvmgr.prefix_cache._hinting import hint_path
from sagellm.kvmgr.prefix_cache._leaves import Group, Leaves
from sagellm.kvmgr.prefix_cache._node import Node, hashes_of
from sagellm.kvmgr.prefix_cache._queries import branches, explain
from sagellm.kvmgr.prefix_cache._tree import RadixTree
from sagellm.kvmgr.prefix_cache._tree_check import check_tree

DEFAULT_NAMESPACE = Namespace()
SAME_MOMENT_S = 1e-3
"""Evictions within this time share one record of when and why."""
WORTH_TRIMMING = 4096
"""Bytes of blocks that are gone which an edge may keep, so that giving up one block copies no edge."""
_new_hit = tuple.__new__  # a hit per look-up: this is three times faster than the class's own constructor


class RadixIndex:
    """Implements `PrefixReuseIndex`.

    `evict` gives up what `policy` chooses; without one, leaves in order of their last use. With
    `policy_factory` each account has a policy of its own. `max_ghosts`
    bounds how many evictions `explain` remembers. Not thread-safe: one engine thread owns it.
    """

    def __init__(
        self,
        block_size: int = 16,
        policy: EvictionPolicy | None = None,
        events: EventBus | None = None,
        clock: Clock | None = None,
        policy_factory: Callable[[], EvictionPolicy] | None = None,
        max_ghosts: int = 4096,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.block_size = block_size
        self._step = step = block_size * TOKEN_BYTES
        self._leaves = Leaves(step, policy, policy_factory)
        self.tree = RadixTree(step, self._leaves, max_ghosts)
        self._roots, self._walk = self.tree.roots, self.tree.walk
        self._events = events or EventBus()
        self._clock = clock or MonotonicClock()
        self._tick = 0
        self._out: BlockIds = array("i")
        self._ghost = Ghost(0.0, "")
        self._removed: list[BlocksRemoved] | None = None

    @property
    def num_cached(self) -> int:
        return self.tree.num_cached

    @property
    def num_evictable(self) -> int:
        return self.tree.num_cached - self.tree.num_pinned

    def evictable_by_account(self) -> Mapping[Account, int]:
        return self._leaves.evictable_by_account()

    # -- read

    def lookup(
        self, tokens: Tokens, namespace: Namespace = DEFAULT_NAMESPACE, max_tokens: int | None = None
    ) -> PrefixHit:
        root = self._roots.get(namespace)
        if root is None:
            return PrefixHit(0, 0, tokens, namespace, None, self.tree.version)
        data = tokens.tobytes()
        end = len(data)
        if max_tokens is not None and max_tokens * TOKEN_BYTES < end:
            end = max(0, max_tokens) * TOKEN_BYTES
        step = self._step
        node, num_blocks = self._walk(root, data, end - end % step)
        num_tokens, version = num_blocks * self.block_size, self.tree.version
        return _new_hit(PrefixHit, (num_tokens, num_blocks, tokens, namespace, node, version, None, 0))

    def block_ids(self, hit: PrefixHit) -> BlockIds:
        ids: BlockIds = array("i")
        if not hit.num_blocks:
            return ids
        node: Node = self._current(hit).node
        if node.first_position == 0:
            return node.blocks[: hit.num_blocks]
        for piece in reversed([above.blocks for above in node.path()]):
            ids += piece
        return ids[: hit.num_blocks] if len(ids) > hit.num_blocks else ids

    def verify(self, hit: PrefixHit) -> bool:
        return self.lookup(hit.tokens, hit.namespace, hit.num_tokens).num_blocks == hit.num_blocks

    def branches(self, tokens: Tokens, k: int, namespace: Namespace = DEFAULT_NAMESPACE) -> list[Branch]:
        return branches(self.tree, self.block_size, tokens, k, namespace)

    def num_unpinned_on_path(self, hit: PrefixHit) -> int:
        return self._count_on_path(hit, 0)

    def num_held_alone(self, hit: PrefixHit) -> int:
        return self._count_on_path(hit, 1)

    def explain(self, tokens: Tokens, namespace: Namespace = DEFAULT_NAMESPACE) -> MatchReport:
        return explain(self.tree, self.block_size, tokens, namespace)

    def all_block_ids(self) -> BlockIds:
        ids: BlockIds = array("i")
        for node in self.tree.nodes():
            ids += node.blocks
        return ids

    # -- pins

    def pin(self, hit: PrefixHit) -> PrefixHit:
        hit = self._current(hit)
        listener = hit.node.group.listener if hit.num_blocks else None
        num_held = hit.num_blocks - self._count_on_path(hit, 0) if listener is not None else 0
        hit = self._pin(hit)
        if listener is not None:
            listener.found(hit.node, num_held)
        return hit

    def _pin(self, hit: PrefixHit) -> PrefixHit:
        if not hit.num_blocks:
            return hit
        node: Node = hit.node
        if node.end > hit.num_blocks:
            node = self.tree.split(node, hit.num_blocks - node.first_position)
        node.num_uses += 1
        node.ends_here += 1
        self.tree.hold(node)
        return self._hit(hit.tokens, hit.namespace, node, hit.num_blocks)

    def unpin(self, hit: PrefixHit, use: Use = NO_USE) -> None:
        if not hit.num_blocks:
            return
        node: Node = hit.node
        if not node.ends_here or node.end != hit.num_blocks:
            raise BookkeepingError(f"unpin of a prefix of {hit.num_blocks} blocks that nobody pins")
        node.ends_here -= 1
        self._touch(node)
        node.use = use
        self.tree.let_go(node)
        if use is not NO_USE and node.group.listener is not None:
            node.group.listener.used(node)

    # -- write

    def insert(
        self,
        tokens: Tokens,
        block_ids: Sequence[int],
        namespace: Namespace = DEFAULT_NAMESPACE,
        *,
        account: Account = NO_ACCOUNT,
        retention: Sequence[Retention] = (),
        pin: bool = False,
    ) -> InsertResult:
        total, step = len(block_ids), self._step
        data = tokens.tobytes()
        end = total * step
        if end > len(data):
            raise BookkeepingError(
                f"{total} blocks of {self.block_size} tokens for a prompt of {len(tokens)} tokens"
            )
        node, existing = self._walk(self.tree.root(namespace), data, end)
        if existing < total:
            group = self._leaves.group(account)
            if node.end > existing:
                node = self.tree.split(node, existing - node.first_position)
            ids = block_ids[existing:]
            blocks: BlockIds = ids if isinstance(ids, array) else array("i", ids)
            node = self.tree.add_leaf(node, data[existing * step : end], blocks, group)
            self._touch(node)
            if self._events.wants(BlocksStored):
                self._events.emit(self._stored(node))
        hit = self._hit(tokens, namespace, node, total)
        if pin:
            hit = self._pin(hit)
            if node.group.listener is not None:
                node.group.listener.added(node, total - existing, node.group.num_cached)
        elif existing < total:
            node.num_uses = 1
            self._leaves.offer(node)
        for wish in retention:
            self._retain(hit, wish)
        return InsertResult(existing, hit)

    def retract(self, result: InsertResult) -> None:
        hit, existing = result.hit, result.num_existing
        if not hit.num_blocks:
            return
        node: Node = hit.node
        others = node.pins > 1 or node.children
        if not node.ends_here or node.end != hit.num_blocks or (existing < hit.num_blocks and others):
            raise BookkeepingError("retract of an insertion that is not pinned, or that others use by now")
        node.ends_here -= 1
        self.tree.let_go(node)
        self._ghost = Ghost(self._clock.now(), "retracted")
        while node.end > existing and node.parent is not None:
            parent = node.parent
            self._leaves.withdraw(node)
            if self._events.wants(BlocksRemoved):
                self._events.emit(self._gone(node, node.num_blocks))
            self.tree.count_out(node, node.num_blocks)
            self.tree.detach(node, parent)
            if parent.parent is not None:
                self._leaves.offer(parent)
            node = parent
        self.tree.version += 1

    def evict(self, num_blocks: int, cause: str = "capacity") -> BlockIds | None:
        if num_blocks < 0:
            raise BookkeepingError(f"cannot evict {num_blocks} blocks")
        if num_blocks > self.tree.num_cached - self.tree.num_pinned:
            return None
        if len(self._leaves.groups) == 1:
            freed = self._give_up_from(self._leaves.nobody, num_blocks, cause)
        else:
            freed = self._evict_of_all(num_blocks, cause)
        if len(freed) != num_blocks:
            raise BookkeepingError(f"the eviction policy gave {len(freed)} blocks, asked for {num_blocks}")
        return freed

    def _evict_of_all(self, num_blocks: int, cause: str) -> BlockIds:
        """From every account in turn, the one with most evictable blocks first."""
        freed: BlockIds = array("i")
        given = -1
        while given < len(freed) < num_blocks:
            given = len(freed)
            for group in sorted(self._leaves.groups.values(), key=lambda group: -group.num_evictable):
                freed += self._give_up_from(group, num_blocks - len(freed), cause)
        return freed

    def evict_from(self, account: Account, num_blocks: int, cause: str = "capacity") -> BlockIds:
        if num_blocks < 0:
            raise BookkeepingError(f"cannot evict {num_blocks} blocks")
        group = self._leaves.groups.get(account)
        if group is None:
            return array("i")
        return self._give_up_from(group, min(num_blocks, group.num_evictable), cause)

    def clear(self) -> BlockIds:
        freed = self.evict(self.num_evictable, "cleared")
        assert freed is not None
        for group in self._leaves.groups.values():
            if group.listener is not None:
                group.listener.cleared(group.num_cached)
        if not self.tree.num_cached and self._events.wants(IndexCleared):
            self._events.emit(IndexCleared())
        return freed

    def remap(self, moves: Mapping[int, int]) -> None:
        for node in self.tree.nodes():
            if not moves.keys().isdisjoint(node.blocks):
                node.blocks = array("i", [moves.get(block, block) for block in node.blocks])

    # -- the policy

    def hint(self, hit: PrefixHit, hint: Hint) -> int:
        hit = self._current(hit)
        node = hit.node
        if not hit.num_blocks or (
            (hint.ended or hint.superseded) and (node.children or node.end > hit.num_blocks)
        ):
            return 0  # somebody went on from there
        return hint_path(self._leaves, node, hint, self._clock.now())

    def set_policy(self, factory: Callable[[], EvictionPolicy]) -> None:
        self._leaves.swap(factory)

    # -- inside: hits and pins

    def _hit(self, tokens: Tokens, namespace: Namespace, node: Node | None, num_blocks: int) -> PrefixHit:
        num_tokens, version = num_blocks * self.block_size, self.tree.version
        return _new_hit(PrefixHit, (num_tokens, num_blocks, tokens, namespace, node, version, None, 0))

    def _current(self, hit: PrefixHit) -> PrefixHit:
        """The hit itself, or what is left of it if the tree changed since the look-up and nobody pins it."""
        if hit.version == self.tree.version or not hit.num_blocks:
            return hit
        return self.lookup(hit.tokens, hit.namespace, hit.num_blocks * self.block_size)

    def _count_on_path(self, hit: PrefixHit, pins: int) -> int:
        hit = self._current(hit)
        if not hit.num_blocks:
            return 0
        deepest: Node = hit.node
        count = min(0, hit.num_blocks - deepest.end)  # a hit may end inside its deepest node
        for node in deepest.path():
            if node.pins > pins:
                return max(0, count)
            count += node.num_blocks
        return count

    def _touch(self, node: Node) -> None:
        self._tick += 1
        node.last_use = self._tick
        node.used_s = self._clock.now()

    # -- inside: the tree

    def _retain(self, hit: PrefixHit, wish: Retention) -> None:
        """Bias the policy for the blocks that a range of tokens touches, splitting edges at its ends."""
        first = wish.start // self.block_size
        last = hit.num_blocks
        if wish.stop is not None:
            last = min(last, cdiv(wish.stop, self.block_size))
        if first >= last:
            return
        for border in (first, last):
            node = next((n for n in hit.node.path() if n.first_position < border < n.end), None)
            if node is not None:
                self.tree.split(node, border - node.first_position)
        for node in list(hit.node.path()):
            if first <= node.first_position and node.end <= last and node.bonus_s < wish.bonus_s:
                node.bonus_s = wish.bonus_s
                if not node.pins and not node.children:
                    self._leaves.withdraw(node)
                    self._leaves.offer(node)

    # -- inside: eviction

    def _give_up_from(self, group: Group, num_blocks: int, cause: str) -> BlockIds:
        out = self._out = array("i")
        now_s, ghost = self._clock.now(), self._ghost
        if now_s - ghost.at_s > SAME_MOMENT_S or ghost.cause != cause:
            self._ghost = Ghost(now_s, cause)
        self._removed = [] if self._events.wants(BlocksRemoved) else None
        self.tree.version += 1
        self._leaves.evict(group, num_blocks, self._give_up)
        for event in self._removed or ():
            self._events.emit(event)
        return out

    def _give_up(self, node: Node, num_blocks: int) -> Node | None:
        """The `GiveUp` of the policies: the last blocks of a leaf go."""
        if self._removed is not None:
            self._removed.append(self._gone(node, num_blocks))
        self.tree.num_cached -= num_blocks
        node.group.num_cached -= num_blocks
        if num_blocks == node.num_blocks:
            self._out += node.blocks
            return self._emptied(node)
        blocks = node.blocks
        if num_blocks == 1:
            self._out.append(blocks.pop())
        else:
            self._out += blocks[-num_blocks:]
            del blocks[-num_blocks:]
        node.num_blocks -= num_blocks
        node.end -= num_blocks
        node.stop -= num_blocks * self._step
        node.cut = self._ghost
        if node.hashes is not None:
            del node.hashes[node.num_blocks :]
        if len(node.edge) > 2 * node.num_blocks * self._step + WORTH_TRIMMING:
            self.tree.bury(node)
        return None

    def _emptied(self, node: Node) -> Node | None:
        """Remove a leaf whole; returns its parent if that became an evictable leaf of the same account."""
        parent = node.parent
        assert parent is not None
        del self._leaves.by_key[node.key]
        self.tree.ghosts.add(node.key, self._ghost)
        self.tree.detach(node, parent)
        if parent.parent is None or parent.pins or parent.children:
            return None
        if parent.group is node.group:
            self._leaves.take_in(parent)
            return parent
        self._leaves.offer(parent)
        return None

    # -- inside: events

    def _stored(self, leaf: Node) -> BlocksStored:
        hashes, parent = hashes_of(leaf, self._step), leaf.parent
        above = parent.hashes[-1] if parent is not None and parent.hashes else None
        position = leaf.first_position * self.block_size
        return BlocksStored(tuple(leaf.blocks), position, tuple(hashes), above, leaf.edge, leaf.namespace)

    def _gone(self, node: Node, num_blocks: int) -> BlocksRemoved:
        hashes = tuple(reversed(hashes_of(node, self._step)[-num_blocks:]))
        blocks = tuple(reversed(node.blocks[-num_blocks:]))
        return BlocksRemoved(blocks, self._ghost.cause, hashes, node.namespace)

    def check(self) -> None:
        check_tree(self.tree)


PLUGIN = RadixIndex
