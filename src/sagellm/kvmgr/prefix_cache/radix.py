"""`RadixPrefixCache`: a compressed radix tree over token blocks whose edges are `bytes`.

A child is found by the bytes of its first block, an edge is compared as memory, and reference counts (pins)
live on nodes. The idea of a radix tree over KV is RadixAttention's (Zheng et al., SGLang, 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sagellm.core.errors import BookkeepingError
from sagellm.core.events import BlocksRemoved, BlocksStored, EventBus
from sagellm.core.protocols.eviction import EvictionPolicy, Extent
from sagellm.core.protocols.prefix_cache import InsertResult, PrefixHit
from sagellm.core.types import TOKEN_BYTES, Namespace, Tokens
from sagellm.kvmgr.prefix_cache._node import Node, common_blocks, content_key

DEFAULT_NAMESPACE = Namespace()


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The design documents' form of a hit: `match_length` tokens, in `block_ids`."""

    match_length: int
    block_ids: list[int]


class RadixPrefixCache:
    """Implements `PrefixReuseIndex`.

    With a `policy`, `evict` gives up what the policy chooses; without one, leaves in order of their last
    unpin. `max_blocks` bounds what `insert_prefix` keeps. Not thread-safe: one engine thread owns it.
    """

    def __init__(
        self,
        max_blocks: int | None = None,
        block_size: int = 16,
        policy: EvictionPolicy | None = None,
        events: EventBus | None = None,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.block_size = block_size
        self.max_blocks = max_blocks
        self._policy = policy
        self._events = events or EventBus()
        self._step = block_size * TOKEN_BYTES
        self._roots: dict[Namespace, Node] = {}
        self._leaves: dict[int, Node] = {}  # evictable leaves by key
        self._num_cached = 0
        self._num_pinned = 0
        self._version = 0  # moves when a hit that was handed out may have become wrong
        self._tick = 0
        self._given_up: list[int] = []

    @property
    def num_cached(self) -> int:
        return self._num_cached

    @property
    def num_evictable(self) -> int:
        return self._num_cached - self._num_pinned

    # -- read

    def lookup(
        self, tokens: Tokens, namespace: Namespace = DEFAULT_NAMESPACE, max_tokens: int | None = None
    ) -> PrefixHit:
        limit = len(tokens) if max_tokens is None else min(max_tokens, len(tokens))
        root = self._roots.get(namespace)
        if root is None:
            return self._hit(tokens, namespace, None, 0)
        node, num_blocks = self._walk(root, tokens.tobytes(), limit // self.block_size)
        return self._hit(tokens, namespace, node, num_blocks)

    def block_ids(self, hit: PrefixHit) -> list[int]:
        pieces = (
            [node.blocks for node in reversed(list(self._current(hit).node.path()))] if hit.num_blocks else []
        )
        return [block for piece in pieces for block in piece][: hit.num_blocks]

    def num_unpinned_on_path(self, hit: PrefixHit) -> int:
        return self._count_on_path(hit, 0)

    def num_held_alone(self, hit: PrefixHit) -> int:
        return self._count_on_path(hit, 1)

    # -- pins

    def pin(self, hit: PrefixHit) -> PrefixHit:
        hit = self._current(hit)
        if not hit.num_blocks:
            return hit
        node: Node = hit.node
        if node.end > hit.num_blocks:
            node = self._split(node, hit.num_blocks - node.start)
        for above in node.path():
            if not above.pins:
                self._num_pinned += len(above.blocks)
                self._leaves.pop(above.key, None)
            if self._policy is not None:
                self._policy.pin(above.key)
            above.pins += 1
        return self._hit(hit.tokens, hit.namespace, node, hit.num_blocks)

    def unpin(self, hit: PrefixHit) -> None:
        if not hit.num_blocks:
            return
        if not hit.node.pins:
            raise BookkeepingError(f"unpin of a prefix of {hit.num_blocks} blocks that nobody pins")
        self._tick += 1
        for node in hit.node.path():
            node.pins -= 1
            node.last_use = self._tick
            if not node.pins:
                self._num_pinned -= len(node.blocks)
                self._offer(node, returning=True)

    # -- write

    def insert(
        self, tokens: Tokens, block_ids: Sequence[int], namespace: Namespace = DEFAULT_NAMESPACE
    ) -> InsertResult:
        total = len(block_ids)
        if total * self.block_size > len(tokens):
            raise BookkeepingError(
                f"{total} blocks of {self.block_size} tokens for a prompt of {len(tokens)} tokens"
            )
        data = tokens.tobytes()
        node, existing = self._walk(self._root(namespace), data, total)
        if existing < total:
            if node.end > existing:
                node = self._split(node, existing - node.start)
            edge = data[existing * self._step : total * self._step]
            node = self._add_leaf(node, edge, list(block_ids[existing:]))
        return InsertResult(existing, self._hit(tokens, namespace, node, total))

    def evict(self, num_blocks: int, cause: str = "capacity") -> list[int] | None:
        if num_blocks < 0:
            raise BookkeepingError(f"cannot evict {num_blocks} blocks")
        if num_blocks > self.num_evictable:
            return None
        self._given_up = []
        if self._policy is None:
            self._evict_oldest(num_blocks)
        else:
            self._evict_by_policy(self._policy, num_blocks)
        freed, self._given_up = self._given_up, []
        if len(freed) != num_blocks:
            raise BookkeepingError(f"the eviction policy gave {len(freed)} blocks, asked for {num_blocks}")
        if freed and self._events.wants(BlocksRemoved):
            self._events.emit(BlocksRemoved(tuple(freed), cause))
        return freed

    def clear(self) -> list[int]:
        return self.evict(self.num_evictable, "cleared") or []

    # -- the simple door of the design documents

    def match_prefix(self, token_ids: Sequence[int]) -> PrefixMatch:
        hit = self.lookup(Tokens(token_ids))
        return PrefixMatch(hit.num_tokens, self.block_ids(hit))

    def insert_prefix(self, token_ids: Sequence[int], block_ids: Sequence[int]) -> list[int]:
        """Register the whole blocks of a sequence; returns the blocks that the caller has to free: duplicates
        of what was there, and what `max_blocks` pushed out."""
        tokens = Tokens(token_ids)
        whole = list(block_ids[: len(tokens) // self.block_size])
        before = self.block_ids(self.lookup(tokens))
        self.insert(tokens, whole)
        duplicates = [new for new, old in zip(whole, before, strict=False) if new != old]
        excess = max(0, self._num_cached - self.max_blocks) if self.max_blocks is not None else 0
        return duplicates + (self.evict(min(excess, self.num_evictable)) or [])

    # -- inside

    def _hit(self, tokens: Tokens, namespace: Namespace, node: Node | None, num_blocks: int) -> PrefixHit:
        return PrefixHit(num_blocks * self.block_size, num_blocks, tokens, namespace, node, self._version)

    def _current(self, hit: PrefixHit) -> PrefixHit:
        """The hit itself, or what is left of it if the tree changed since the look-up and nobody pins it."""
        if hit.version == self._version or not hit.num_blocks:
            return hit
        return self.lookup(hit.tokens, hit.namespace, hit.num_tokens)

    def _walk(self, node: Node, data: bytes, limit: int) -> tuple[Node, int]:
        """From a root: the deepest node that shares blocks with `data`, and how many match in all (<=
        `limit`)."""
        step, offset, end = self._step, 0, limit * self._step
        while offset < end:
            child = node.children.get(data[offset : offset + step])
            if child is None:
                break
            edge = child.edge
            if offset + len(edge) > end or not data.startswith(edge, offset):
                return child, offset // step + common_blocks(edge, data, offset, end, step)
            node, offset = child, offset + len(edge)
        return node, offset // step

    def _root(self, namespace: Namespace) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(
                None, b"", [], namespace, content_key(None, 0, b"", namespace)
            )
        return root

    def _count_on_path(self, hit: PrefixHit, pins: int) -> int:
        hit = self._current(hit)
        if not hit.num_blocks:
            return 0
        deepest: Node = hit.node
        count = min(0, hit.num_blocks - deepest.end)  # a hit may end inside its deepest node
        for node in deepest.path():
            if node.pins > pins:
                return max(0, count)
            count += len(node.blocks)
        return count

    def _add_leaf(self, parent: Node, edge: bytes, blocks: list[int]) -> Node:
        if self._leaves.pop(parent.key, None) is not None and self._policy is not None:
            self._policy.remove(parent.key)
        first_block = edge[: self._step]
        key = content_key(parent, parent.end, first_block, parent.namespace)
        leaf = parent.children[first_block] = Node(parent, edge, blocks, parent.namespace, key)
        self._tick += 1
        leaf.last_use = self._tick
        self._num_cached += len(blocks)
        self._offer(leaf)
        if self._events.wants(BlocksStored):
            self._events.emit(BlocksStored(tuple(blocks), parent.end * self.block_size))
        return leaf

    def _split(self, node: Node, num_head: int) -> Node:
        """Put a new head of `num_head` blocks above `node`, which stays as the tail; returns the head."""
        parent, cut = node.parent, num_head * self._step
        assert parent is not None
        head = Node(parent, node.edge[:cut], node.blocks[:num_head], node.namespace, node.key)
        head.pins, head.last_use = node.pins, node.last_use
        parent.children[head.edge[: self._step]] = head
        node.edge, node.blocks, node.parent = node.edge[cut:], node.blocks[num_head:], head
        first_block = node.edge[: self._step]
        node.key = content_key(head, head.end, first_block, node.namespace)
        head.children[first_block] = node
        if self._leaves.pop(head.key, None) is not None:
            self._leaves[node.key] = node
            if self._policy is not None:
                self._policy.split(head.key, head.extent(), node.extent())
        self._version += 1
        return head

    def _offer(self, node: Node, *, returning: bool = False) -> None:
        """Tell the policy of an evictable leaf, if the node is one."""
        if node.pins or node.children:
            return
        self._leaves[node.key] = node
        if self._policy is not None:
            (self._policy.unpin if returning else self._policy.insert)(node.extent())

    def _evict_oldest(self, num_blocks: int) -> None:
        while num_blocks:
            node = min(self._leaves.values(), key=lambda leaf: leaf.last_use)
            take = min(num_blocks, len(node.blocks))
            num_blocks -= take
            if take == len(node.blocks):
                self._emptied(node.key)
            else:
                self._truncate(node, take)

    def _evict_by_policy(self, policy: EvictionPolicy, num_blocks: int) -> None:
        victims = policy.evict(num_blocks, self._emptied)
        for victim in victims or ():
            if victim.key in self._leaves:
                self._truncate(self._leaves[victim.key], victim.num_blocks)

    def _emptied(self, key: int) -> Extent | None:
        """Remove a leaf whole; returns its parent's extent if that became an evictable leaf."""
        node = self._leaves.pop(key)
        parent = node.parent
        assert parent is not None
        self._give_up(node, len(node.blocks))
        del parent.children[node.edge[: self._step]]
        if parent.parent is None:
            if not parent.children:
                del self._roots[parent.namespace]
            return None
        if parent.pins or parent.children:
            return None
        self._leaves[parent.key] = parent
        return parent.extent()

    def _truncate(self, node: Node, num_blocks: int) -> None:
        self._give_up(node, num_blocks)
        del node.blocks[-num_blocks:]
        node.edge = node.edge[: -num_blocks * self._step]
        node.end -= num_blocks

    def _give_up(self, node: Node, num_blocks: int) -> None:
        self._given_up.extend(node.blocks[: -num_blocks - 1 : -1])
        self._num_cached -= num_blocks
        self._version += 1

    def check(self) -> None:
        seen: dict[int, Node] = {}
        pinned = 0
        for root in self._roots.values():
            for node in root.subtree():
                self._check_node(node, seen)
                pinned += len(node.blocks) if node.pins else 0
        _require(
            len(seen) == self._num_cached,
            f"{len(seen)} blocks stand in the tree, {self._num_cached} in the books",
        )
        _require(pinned == self._num_pinned, f"{pinned} blocks are pinned, {self._num_pinned} in the books")
        if self._policy is not None:
            leaf_blocks = sum(len(leaf.blocks) for leaf in self._leaves.values())
            _require(
                self._policy.num_evictable == leaf_blocks, "the policy and the tree count different leaves"
            )
            self._policy.check()

    def _check_node(self, node: Node, seen: dict[int, Node]) -> None:
        parent = node.parent
        assert parent is not None
        _require(bool(node.blocks), "an edge without blocks")
        _require(
            len(node.edge) == len(node.blocks) * self._step,
            f"edge and blocks of node {node.key:x} differ in length",
        )
        _require(node.start == parent.end, f"node {node.key:x} does not begin where its parent ends")
        _require(
            parent.parent is None or parent.pins >= node.pins,
            f"node {node.key:x} has more pins than its parent",
        )
        evictable = not node.pins and not node.children
        _require(
            (self._leaves.get(node.key) is node) == evictable, f"node {node.key:x} is wrongly (not) evictable"
        )
        for block in node.blocks:
            _require(block not in seen, f"block {block} stands at two places of the index")
            seen[block] = node


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise BookkeepingError(message)


PLUGIN = RadixPrefixCache
