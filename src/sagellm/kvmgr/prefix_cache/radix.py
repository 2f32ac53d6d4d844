"""`RadixIndex`: the prefix index over a radix tree of token blocks.

A block belongs to the index from `insert` until `evict`, `clear` or `retract` returns its id. In between,
`pin` and `insert(pin=True)` add a holder, `unpin` and `retract` take one; `_tree.py` says how holders are
counted. A node without pins and children is an evictable leaf, which the eviction policy of its account may
choose.

The idea of a radix tree over KV is RadixAttention's (Zheng et al., SGLang, 2024). Here an edge is the `bytes`
of whole blocks and is compared as memory. The tree is in `_tree.py`.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence

from sagellm.core.blocks import cdiv
from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import BookkeepingError
from sagellm.core.events import BlocksRemoved, BlocksStored, EventBus, IndexCleared
from sagellm.core.protocols.eviction import NO_USE, EvictionPolicy, Hint, Use
from sagellm.core.protocols.prefix_cache import Branch, InsertResult, MatchEnd, MatchReport, PrefixHit
from sagellm.core.types import NO_ACCOUNT, TOKEN_BYTES, Account, BlockIds, Namespace, Retention, Tokens
from sagellm.kvmgr.prefix_cache._ghosts import Ghost
from sagellm.kvmgr.prefix_cache._leaves import AccountShare
from sagellm.kvmgr.prefix_cache._tree import Node, NodeLeaves, RadixTree, content_key

DEFAULT_NAMESPACE = Namespace()
SAME_MOMENT_S = 1e-3
"""Evictions within this time share one ghost."""
MAX_GONE_BYTES = 4096
"""Bytes of evicted blocks that an edge may keep, so that the eviction of one block copies no edge."""
_new_hit = tuple.__new__
"""Makes a `PrefixHit` in a third of its constructor's time: `sagellm bench micro prefix_cache`."""


class RadixIndex:
    """Implements `PrefixReuseIndex`.

    `evict` gives up what `policy` chooses; without one, leaves in order of their last use. With
    `policy_factory` each account has a policy of its own. `max_ghosts` bounds how many evictions `explain`
    remembers. Not thread-safe: one engine thread owns it.
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
        self._block_bytes = block_size * TOKEN_BYTES
        self._leaves = NodeLeaves(self._block_bytes, policy, policy_factory)
        self.tree = RadixTree(self._block_bytes, self._leaves, max_ghosts)
        self._roots, self._walk = self.tree.roots, self.tree.walk
        self._events = events or EventBus()
        self._clock = clock or MonotonicClock()
        self._num_touches = 0
        self._ghost = Ghost(0.0, "")  # of the evictions of this moment
        self._freed: BlockIds = array("i")  # what the eviction that is going on has freed
        self._removed: list[BlocksRemoved] | None = None  # its events; None: no reader wants them

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
        node, num_blocks = self._walk(root, data, end - end % self._block_bytes)
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

    def num_unpinned_on_path(self, hit: PrefixHit) -> int:
        return self._count_on_path(hit, 0)

    def num_held_alone(self, hit: PrefixHit) -> int:
        return self._count_on_path(hit, 1)

    def all_block_ids(self) -> BlockIds:
        ids: BlockIds = array("i")
        for node in self.tree.nodes():
            ids += node.blocks
        return ids

    # -- pins: the reference counts

    def pin(self, hit: PrefixHit) -> PrefixHit:
        hit = self._current(hit)
        listener = hit.node.share.listener if hit.num_blocks else None
        num_held = hit.num_blocks - self._count_on_path(hit, 0) if listener is not None else 0
        hit = self._pin(hit)
        if listener is not None:
            listener.found(hit.node, num_held)
        return hit

    def _pin(self, hit: PrefixHit) -> PrefixHit:
        """Pin a current hit; a hit that ends inside an edge splits it."""
        if not hit.num_blocks:
            return hit
        node: Node = hit.node
        if node.end_block > hit.num_blocks:
            node = self.tree.split(node, hit.num_blocks - node.first_position)
        node.num_uses += 1
        node.num_ends += 1
        self.tree.pin_path(node)
        return self._hit(hit.tokens, hit.namespace, node, hit.num_blocks)

    def unpin(self, hit: PrefixHit, use: Use = NO_USE) -> None:
        if not hit.num_blocks:
            return
        node: Node = hit.node
        if not node.num_ends or node.end_block != hit.num_blocks:
            raise BookkeepingError(f"unpin of a prefix of {hit.num_blocks} blocks that is not pinned")
        node.num_ends -= 1
        self._touch(node)
        node.use = use
        self.tree.unpin_path(node)
        if use is not NO_USE and node.share.listener is not None:
            node.share.listener.used(node)

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
        total, block_bytes = len(block_ids), self._block_bytes
        data = tokens.tobytes()
        end = total * block_bytes
        if end > len(data):
            raise BookkeepingError(
                f"{total} blocks of {self.block_size} tokens for a prompt of {len(tokens)} tokens"
            )
        node, existing = self._walk(self.tree.root(namespace), data, end)
        if existing < total:
            share = self._leaves.share(account)
            if node.end_block > existing:
                node = self.tree.split(node, existing - node.first_position)
            ids = block_ids[existing:]
            blocks: BlockIds = ids if isinstance(ids, array) else array("i", ids)
            node = self.tree.add_child(node, data[existing * block_bytes : end], blocks, share)
            self._touch(node)
            if self._events.wants(BlocksStored):
                self._events.emit(self._stored(node))
        hit = self._hit(tokens, namespace, node, total)
        if pin:
            hit = self._pin(hit)
            if node.share.listener is not None:
                node.share.listener.added(node, total - existing, node.share.num_cached)
        elif existing < total:
            node.num_uses = 1
            self._leaves.add(node)
        for bias in retention:
            self._retain(hit, bias)
        return InsertResult(existing, hit)

    def retract(self, result: InsertResult) -> None:
        hit, existing = result.hit, result.num_existing
        if not hit.num_blocks:
            return
        node: Node = hit.node
        others = node.pins > 1 or node.children
        if not node.num_ends or node.end_block != hit.num_blocks or (existing < hit.num_blocks and others):
            raise BookkeepingError("retract of an insertion that is not pinned, or that others use by now")
        node.num_ends -= 1
        self.tree.unpin_path(node)
        self._ghost = Ghost(self._clock.now(), "retracted")
        while node.end_block > existing and node.parent is not None:
            parent = node.parent
            self._leaves.discard(node)
            if self._events.wants(BlocksRemoved):
                self._events.emit(self._removal(node, node.num_blocks))
            self.tree.num_cached -= node.num_blocks
            node.share.num_cached -= node.num_blocks
            self.tree.detach(node, parent)
            if parent.parent is not None:
                self._leaves.add(parent)
            node = parent
        self.tree.version += 1

    def evict(self, num_blocks: int, cause: str = "capacity") -> BlockIds | None:
        if num_blocks < 0:
            raise BookkeepingError(f"cannot evict {num_blocks} blocks")
        if num_blocks > self.tree.num_cached - self.tree.num_pinned:
            return None
        freed: BlockIds = array("i")
        if len(self._leaves.shares) == 1:
            freed = self._evict_of(self._leaves.default_share, num_blocks, cause)
        else:
            # An evicted leaf may expose a parent of another account: repeat while blocks are freed.
            before = -1
            while before < len(freed) < num_blocks:
                before = len(freed)
                for share in self._leaves.shares_to_evict_from():
                    freed += self._evict_of(share, num_blocks - len(freed), cause)
        if len(freed) != num_blocks:
            raise BookkeepingError(f"the eviction policy gave {len(freed)} blocks, asked for {num_blocks}")
        return freed

    def evict_from(self, account: Account, num_blocks: int, cause: str = "capacity") -> BlockIds:
        if num_blocks < 0:
            raise BookkeepingError(f"cannot evict {num_blocks} blocks")
        share = self._leaves.shares.get(account)
        if share is None:
            return array("i")
        return self._evict_of(share, min(num_blocks, share.num_evictable), cause)

    def clear(self) -> BlockIds:
        freed = self.evict(self.num_evictable, "cleared")
        assert freed is not None
        for share in self._leaves.shares.values():
            if share.listener is not None:
                share.listener.cleared(share.num_cached)
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
        last = hit.node
        if not hit.num_blocks:
            return 0
        if (hint.ended or hint.superseded) and (last.children or last.end_block > hit.num_blocks):
            return 0  # another request continued from there
        num_blocks, now_s = 0, self._clock.now()
        for node in last.path():
            if node is not last and len(node.children) > 1:
                break
            num_blocks += node.num_blocks
            if hint.duration_s is not None or hint.over(node.hint) != node.hint:
                self._leaves.hint(node, hint, now_s)
        return num_blocks

    def set_policy(self, factory: Callable[[], EvictionPolicy]) -> None:
        self._leaves.set_policy(factory)

    # -- off the hot path: where a match ends and why, and what is near it

    def branches(self, tokens: Tokens, k: int, namespace: Namespace = DEFAULT_NAMESPACE) -> list[Branch]:
        start, num_blocks = self.tree.match(tokens, namespace)
        found: list[Branch] = []
        node: Node | None = start if num_blocks else None
        below: Node | None = None
        while node is not None and node.parent is not None and len(found) < k:
            hit = self._hit(tokens, namespace, node, min(num_blocks, node.end_block))
            leaves = heapq.nlargest(k - len(found), _leaves_of(node, below), key=lambda leaf: leaf.last_use)
            found += [Branch(hit, leaf.end_block, leaf.used_s) for leaf in leaves]
            node, below = node.parent, node
        return found

    def explain(self, tokens: Tokens, namespace: Namespace = DEFAULT_NAMESPACE) -> MatchReport:
        node, num_blocks = self.tree.match(tokens, namespace)
        num_tokens, size = num_blocks * self.block_size, self._block_bytes
        next_block = tokens.tobytes()[num_blocks * size : (num_blocks + 1) * size]
        if len(next_block) < size:
            return MatchReport(num_tokens, num_blocks, MatchEnd.COMPLETE)
        others = (self.tree.match(tokens, other)[1] for other in self._roots if other != namespace)
        longest = max(others, default=0)
        elsewhere = longest if longest > num_blocks else 0
        node = node or self._roots.get(namespace) or self.tree.new_root(namespace)
        ghost = self._ghost_behind(node, num_blocks, next_block)
        if ghost is not None:
            return MatchReport(num_tokens, num_blocks, MatchEnd.EVICTED, ghost.at_s, ghost.cause, elsewhere)
        if node.end_block > num_blocks:  # the match ends inside the edge
            start = (num_blocks - node.first_position) * size
            followers = [node.edge[start : start + size]]
        else:
            followers = list(node.children)
        end = MatchEnd.NEVER_SEEN
        if elsewhere:
            end = MatchEnd.OTHER_NAMESPACE
        elif next_block[:TOKEN_BYTES] in {block[:TOKEN_BYTES] for block in followers}:
            end = MatchEnd.NOT_ALIGNED
        return MatchReport(num_tokens, num_blocks, end, num_elsewhere=elsewhere)

    def _ghost_behind(self, node: Node, num_blocks: int, next_block: bytes) -> Ghost | None:
        """The record of the eviction of `next_block` behind a match that ends in `node`."""
        if node.end_block > num_blocks:
            return None
        if node.cut is not None:
            length = len(node.content)
            if node.edge[length : length + self._block_bytes] == next_block:
                return node.cut
        return self.tree.ghosts.get(content_key(node, next_block))

    # -- inside: hits and pins

    def _hit(self, tokens: Tokens, namespace: Namespace, node: Node | None, num_blocks: int) -> PrefixHit:
        num_tokens, version = num_blocks * self.block_size, self.tree.version
        return _new_hit(PrefixHit, (num_tokens, num_blocks, tokens, namespace, node, version, None, 0))

    def _current(self, hit: PrefixHit) -> PrefixHit:
        """The hit, or a new look-up of it if the tree has changed since."""
        if hit.version == self.tree.version or not hit.num_blocks:
            return hit
        return self.lookup(hit.tokens, hit.namespace, hit.num_blocks * self.block_size)

    def _count_on_path(self, hit: PrefixHit, pins: int) -> int:
        """Blocks at the end of the hit whose nodes have at most `pins` pins."""
        hit = self._current(hit)
        if not hit.num_blocks:
            return 0
        deepest: Node = hit.node
        count = min(0, hit.num_blocks - deepest.end_block)  # a hit may end inside its deepest node
        for node in deepest.path():
            if node.pins > pins:
                return max(0, count)
            count += node.num_blocks
        return count

    def _touch(self, node: Node) -> None:
        """Set the time of last use."""
        self._num_touches += 1
        node.last_use = self._num_touches
        node.used_s = self._clock.now()

    # -- inside: the tree

    def _retain(self, hit: PrefixHit, bias: Retention) -> None:
        """Raise the bonus of a range of tokens, splitting edges at its ends."""
        first = bias.start // self.block_size
        last = hit.num_blocks
        if bias.stop is not None:
            last = min(last, cdiv(bias.stop, self.block_size))
        if first >= last:
            return
        for border in (first, last):
            node = next((n for n in hit.node.path() if n.first_position < border < n.end_block), None)
            if node is not None:
                self.tree.split(node, border - node.first_position)
        for node in list(hit.node.path()):
            if first <= node.first_position and node.end_block <= last and node.bonus_s < bias.bonus_s:
                self._leaves.set_bonus(node, bias.bonus_s)

    # -- inside: eviction

    def _evict_of(self, share: AccountShare, num_blocks: int, cause: str) -> BlockIds:
        """Free `num_blocks` blocks of one account, or all that its policy can give up."""
        freed = self._freed = array("i")
        now_s, ghost = self._clock.now(), self._ghost
        if now_s - ghost.at_s > SAME_MOMENT_S or ghost.cause != cause:
            self._ghost = Ghost(now_s, cause)
        self._removed = [] if self._events.wants(BlocksRemoved) else None
        self.tree.version += 1
        self._leaves.evict(share, num_blocks, self._give_up)
        for event in self._removed or ():
            self._events.emit(event)
        return freed

    def _give_up(self, node: Node, num_blocks: int) -> Node | None:
        """The `GiveUp` of the policies: free the last blocks of a leaf."""
        if self._removed is not None:
            self._removed.append(self._removal(node, num_blocks))
        self.tree.num_cached -= num_blocks
        node.share.num_cached -= num_blocks
        if num_blocks == node.num_blocks:
            self._freed += node.blocks
            return self._remove_leaf(node)
        blocks = node.blocks
        if num_blocks == 1:
            self._freed.append(blocks.pop())
        else:
            self._freed += blocks[-num_blocks:]
            del blocks[-num_blocks:]
        node.num_blocks -= num_blocks
        node.end_block -= num_blocks
        node.end_byte -= num_blocks * self._block_bytes
        node.cut = self._ghost
        if node.hashes is not None:
            del node.hashes[node.num_blocks :]
        if len(node.edge) > 2 * node.num_blocks * self._block_bytes + MAX_GONE_BYTES:
            self.tree.trim(node)
        return None

    def _remove_leaf(self, node: Node) -> Node | None:
        """Remove a leaf whose blocks are all freed.

        Returns its parent if that is an evictable leaf of the same account now: the policy that evicts adds
        it itself. A parent of another account is reported to the policy of that account.
        """
        parent = node.parent
        assert parent is not None
        del self._leaves.by_key[node.key]
        self.tree.ghosts.add(node.key, self._ghost)
        self.tree.detach(node, parent)
        if parent.parent is None or parent.pins or parent.children:
            return None
        if parent.share is node.share:
            self._leaves.register(parent)
            return parent
        self._leaves.add(parent)
        return None

    # -- inside: events

    def _stored(self, leaf: Node) -> BlocksStored:
        hashes, parent = leaf.block_hashes(self._block_bytes), leaf.parent
        above = parent.hashes[-1] if parent is not None and parent.hashes else None
        position = leaf.first_position * self.block_size
        return BlocksStored(tuple(leaf.blocks), position, tuple(hashes), above, leaf.edge, leaf.namespace)

    def _removal(self, node: Node, num_blocks: int) -> BlocksRemoved:
        hashes = tuple(reversed(node.block_hashes(self._block_bytes)[-num_blocks:]))
        blocks = tuple(reversed(node.blocks[-num_blocks:]))
        return BlocksRemoved(blocks, self._ghost.cause, hashes, node.namespace)

    def check(self) -> None:
        self.tree.check()


def _leaves_of(node: Node, left_out: Node | None) -> Iterator[Node]:
    """The leaves at or below a node, without those below its child `left_out`."""
    if not node.children:
        yield node
    for child in node.children.values():
        if child is not left_out:
            if not child.children:
                yield child
            yield from (below for below in child.subtree() if not below.children)


PLUGIN = RadixIndex
