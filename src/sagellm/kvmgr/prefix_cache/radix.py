"""`RadixIndex`: the prefix index over a radix tree of token blocks.

A block belongs to the index from `insert` until `evict`, `clear` or `retract` returns its id. In between,
`pin` and `insert(pin=True)` add a holder, `unpin` and `retract` take one; `_tree.py` says how holders are
counted. A node without pins and children is an evictable leaf, which the eviction policy of its account may
choose.

The idea of a radix tree over KV is RadixAttention's (Zheng et al., SGLang, 2024). Here an edge is the `bytes`
of whole blocks and is compared as memory. The tree is in `_tree.py`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence

from sagellm.core.blocks import cdiv
from sagellm.core.errors import BookkeepingError
from sagellm.core.events import BlocksRemoved, BlocksStored
from sagellm.core.protocols.eviction import EvictionPolicy, PolicyFactory
from sagellm.core.protocols.prefix_cache import IndexNode, InsertResult, PrefixHit
from sagellm.core.types import NO_ACCOUNT, TOKEN_BYTES, Account, BlockIds, Namespace, Retention, Tokens
from sagellm.kvmgr.prefix_cache._extents import AccountShare, Ghost
from sagellm.kvmgr.prefix_cache._index_base import DEFAULT_NAMESPACE, IndexBase
from sagellm.kvmgr.prefix_cache._tree import Node, NodeLeaves, RadixTree, content_key

SAME_MOMENT_S = 1e-3
"""Evictions within this time share one ghost."""
MAX_GONE_BYTES = 4096
"""Bytes of evicted blocks that an edge may keep, so that the eviction of one block copies no edge."""


class RadixIndex(IndexBase[Node]):
    """Implements `PrefixReuseIndex`."""

    _extent_type = Node

    def _create(
        self, policy: EvictionPolicy | None, policy_factory: PolicyFactory | None, max_ghosts: int
    ) -> None:
        leaves = NodeLeaves(self._block_bytes, policy, policy_factory)
        self._leaves = leaves
        self.tree = RadixTree(self._block_bytes, leaves, max_ghosts)
        self._roots, self._walk = self.tree.roots, self.tree.walk
        self._ghost = Ghost(0.0, "")  # of the evictions of this moment
        self._freed: BlockIds = array("i")  # what the eviction that is going on has freed
        self._removed: list[BlocksRemoved] | None = None  # its events; None: no reader wants them

    @property
    def num_cached(self) -> int:
        return self.tree.num_cached

    @property
    def num_evictable(self) -> int:
        return self.tree.num_cached - self.tree.num_pinned

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
        num_tokens = num_blocks * self.block_size
        return PrefixHit(num_tokens, num_blocks, tokens, namespace, node, self.tree.version)

    def block_ids(self, hit: PrefixHit) -> BlockIds:
        ids: BlockIds = array("i")
        node = self._current(hit).node
        if not hit.num_blocks or not isinstance(node, Node):
            return ids
        if node.first_position == 0:
            return node.blocks[: hit.num_blocks]
        for piece in reversed([above.blocks for above in node.path()]):
            ids += piece
        return ids[: hit.num_blocks] if len(ids) > hit.num_blocks else ids

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

    def _pin(self, node: Node, num_blocks: int, *, is_use: bool = True) -> Node:
        """Pin a path of `num_blocks`. Splits its last node if the path ends inside; returns the last one."""
        if node.end_block > num_blocks:
            node = self.tree.split(node, num_blocks - node.first_position)
        node.num_uses += is_use
        node.num_ends += 1
        self.tree.pin_path(node, is_use=is_use)
        return node

    def _unpin(self, node: Node) -> None:
        node.num_ends -= 1
        self.tree.unpin_path(node)

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
            node = self._grow(node, data[existing * block_bytes : end], block_ids[existing:], share)
        last = self._pin(node, total) if pin and total else node
        hit = self._hit(tokens, namespace, last, total)
        if pin:
            if node.share.listener is not None:
                node.share.listener.added(node, total - existing, node.share.num_cached)
        elif existing < total:
            node.num_uses = 1
            self._leaves.add(node)
        for bias in retention:
            self._retain(hit, bias)
        return InsertResult(existing, hit)

    def extend(
        self,
        above: IndexNode | None,
        tokens: Tokens,
        block_ids: Sequence[int],
        namespace: Namespace = DEFAULT_NAMESPACE,
        *,
        account: Account = NO_ACCOUNT,
    ) -> Node:
        edge = tokens.tobytes()
        parent = above if isinstance(above, Node) else self.tree.root(namespace)
        self._check_extension(edge, block_ids, is_there=edge[: self._block_bytes] in parent.children)
        node = self._grow(parent, edge, block_ids, self._leaves.share(account))
        node.num_uses = 1
        self._leaves.add(node)
        return node

    def _grow(self, parent: Node, edge: bytes, block_ids: Sequence[int], share: AccountShare) -> Node:
        """A new node below `parent`, used now. The caller pins it or adds it to the evictable leaves."""
        blocks: BlockIds = block_ids if isinstance(block_ids, array) else array("i", block_ids)
        node = self.tree.add_child(parent, edge, blocks, share)
        self._touch(node)
        if self._events.wants(BlocksStored):
            self._events.emit(self._stored(node))
        return node

    def retract(self, result: InsertResult) -> None:
        hit, existing = result.hit, result.num_existing
        node = hit.node
        if not hit.num_blocks or not isinstance(node, Node):
            return
        new = [above for above in node.path() if above.end_block > existing]
        num_followers = sum(len(above.children) for above in new)
        others = any(above.pins > 1 for above in new) or num_followers > len(new[1:])
        if not node.num_ends or node.end_block != hit.num_blocks or others:
            raise BookkeepingError("retract of an insertion that is not pinned, or that others use by now")
        self._unpin(node)
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

    def remap(self, moves: Mapping[int, int]) -> None:
        for node in self.tree.nodes():
            if not moves.keys().isdisjoint(node.blocks):
                node.blocks = array("i", [moves.get(block, block) for block in node.blocks])

    def replace_blocks(self, hit: PrefixHit, block_ids: BlockIds) -> None:
        """The tokens of a resident hit stand in these blocks from now on."""
        node = self._current(hit).node
        for above in node.path() if isinstance(node, Node) else ():
            first, end = above.first_position, min(above.end_block, hit.num_blocks)
            above.blocks[: end - first] = block_ids[first:end]

    # -- inside: for `explain`

    def _namespaces(self, first_block: bytes) -> Iterable[Namespace]:
        return [namespace for namespace, root in self._roots.items() if first_block in root.children]

    def _ghost_behind(self, hit: PrefixHit, next_block: bytes) -> Ghost | None:
        node = hit.node or self.tree.new_root(hit.namespace)
        assert isinstance(node, Node)
        if node.end_block > hit.num_blocks:
            return None
        if node.cut is not None:
            length = len(node.content)
            if node.edge[length : length + self._block_bytes] == next_block:
                return node.cut
        return self.tree.ghosts.get(content_key(node, next_block))

    def _blocks_behind(self, hit: PrefixHit) -> Iterable[bytes]:
        node = hit.node
        if not isinstance(node, Node):
            return ()
        if node.end_block == hit.num_blocks:
            return node.children
        return (node.edge[(hit.num_blocks - node.first_position) * self._block_bytes :],)

    def _first_extents(self) -> Iterable[Node]:
        found: list[Node] = []
        for root in self._roots.values():
            found += root.children.values()
        return found

    def _uses(self, order: Sequence[Node]) -> Mapping[int, int]:
        """A use counts at its last node, and was one of all above."""
        uses = {id(node): node.num_uses for node in order}
        for node in reversed(order):
            if id(node.parent) in uses:
                uses[id(node.parent)] += uses[id(node)]
        return uses

    # -- inside: hits

    def _hit(
        self, tokens: Tokens, namespace: Namespace, node: IndexNode | None, num_blocks: int
    ) -> PrefixHit:
        num_tokens = num_blocks * self.block_size
        return PrefixHit(num_tokens, num_blocks, tokens, namespace, node, self.tree.version)

    def _current(self, hit: PrefixHit) -> PrefixHit:
        if hit.version == self.tree.version or not hit.num_blocks:
            return hit
        return self.lookup(hit.tokens, hit.namespace, hit.num_blocks * self.block_size)

    def _count_on_path(self, hit: PrefixHit, pins: int) -> int:
        """Blocks at the end of the hit whose nodes have at most `pins` pins."""
        hit = self._current(hit)
        node = hit.node
        if not hit.num_blocks or not isinstance(node, Node):
            return 0
        count = min(0, hit.num_blocks - node.end_block)  # a hit may end inside its deepest node
        for above in node.path():
            if above.pins > pins:
                return max(0, count)
            count += above.num_blocks
        return count

    def _retain(self, hit: PrefixHit, bias: Retention) -> None:
        """Raise the bonus of a range of tokens, splitting edges at its ends."""
        first = bias.start // self.block_size
        last = hit.num_blocks
        if bias.stop is not None:
            last = min(last, cdiv(bias.stop, self.block_size))
        if first >= last:
            return
        for border in (first, last):
            node = next((n for n in self._path_of(hit) if n.first_position < border < n.end_block), None)
            if node is not None:
                self.tree.split(node, border - node.first_position)
        for node in list(self._path_of(hit)):
            if first <= node.first_position and node.end_block <= last and node.bonus_s < bias.bonus_s:
                self._leaves.set_bonus(node, bias.bonus_s)

    # -- inside: eviction

    def _evict_of(
        self, share: AccountShare, num_blocks: int, cause: str, last: Node | None = None
    ) -> BlockIds:
        freed = self._freed = array("i")
        now_s, ghost = self._clock.now(), self._ghost
        if now_s - ghost.at_s > SAME_MOMENT_S or ghost.cause != cause:
            self._ghost = Ghost(now_s, cause)
        self._removed = [] if self._events.wants(BlocksRemoved) else None
        self.tree.version += 1
        if last is None:
            self._leaves.evict(share, num_blocks, self._give_up)
        else:
            self._leaves.evict_tail(last, num_blocks, self._give_up)
        for event in self._removed or ():
            self._events.emit(event)
        return freed

    def _give_up(self, node: Node, num_blocks: int) -> Node | None:
        """The `GiveUp` of the policies: free the last blocks of a leaf."""
        if self._removed is not None:
            self._removed.append(self._removal(node, num_blocks))
        if self._notes is not None:
            self._note(node)
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


PLUGIN = RadixIndex
