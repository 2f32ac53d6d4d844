"""The radix tree: nodes, reference counts, evictable leaves. `radix.py` makes a prefix index of it.

A node is an edge of whole blocks. Reference counts live on nodes, not on blocks: `Node.pins` is the number of
pinned hits that end at the node plus the number of its children with pins. `RadixTree.pin_path` adds one and
`unpin_path` takes one, each for one hit; the index calls them in `pin`, `insert`, `unpin` and `retract`. A
split gives the new head one pin if the node has any.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from hashlib import blake2b

from sagellm.core.protocols.eviction import NO_USE, EvictionPolicy, PolicyFactory
from sagellm.core.types import BlockIds, Namespace
from sagellm.kvmgr.prefix_cache._extents import (
    AccountShare,
    CachedExtent,
    EvictableLeaves,
    Ghost,
    Ghosts,
    require,
    require_same,
)
from sagellm.kvmgr.prefix_cache.fingerprint import chain

KEY_BYTES = 8
NO_CHILDREN: dict[bytes, Node] = {}
"""The children of every leaf. Never written to."""


class Node(CachedExtent):
    """An edge of whole blocks below `parent`; for a policy, an `Extent`. A root has no parent and no blocks.

    `edge` holds the int32 bytes of its tokens, `blocks` one id per block; the edge ends at `end_block` and
    `end_byte`. The bytes of blocks that were evicted from its end may still be in `edge` (`cut` says when and
    why they went).

    `pins` is `num_ends` plus the number of children with pins. So a hit holds its whole path, and pinning a
    path that is held already costs one addition. A pinned hit always ends at the end of a node: a split puts
    a new head above the node, which stays as the tail.
    """

    __slots__ = (
        "blocks", "bonus_s", "children", "cut", "edge", "end_block", "end_byte", "hashes", "hint", "key",
        "last_use", "namespace", "num_blocks", "num_ends", "num_uses", "only_child", "parent", "pins",
        "share", "use", "used_s",
    )  # fmt: skip

    parent: Node | None
    children: dict[bytes, Node]

    def __init__(
        self,
        parent: Node | None,
        edge: bytes,
        blocks: BlockIds,
        namespace: Namespace,
        key: int,
        share: AccountShare,
    ) -> None:
        num_blocks = len(blocks)
        self.parent = parent
        self.edge = edge
        self.blocks = blocks
        self.num_blocks = num_blocks
        self.namespace = namespace
        self.key = key
        self.share = share
        self.children = NO_CHILDREN
        self.only_child: Node | None = None  # most inner nodes have one child: conversations are chains
        self.pins = 0
        self.num_ends = 0
        self.last_use = 0
        self.num_uses = 0
        self.used_s = 0.0
        self.bonus_s = 0.0
        self.use = NO_USE
        self.hint = None
        self.cut: Ghost | None = None
        self.hashes: list[bytes] | None = None
        if parent is None:
            self.end_block = self.end_byte = 0
        else:
            self.end_block = parent.end_block + num_blocks
            self.end_byte = parent.end_byte + len(edge)

    @property
    def content(self) -> bytes:
        parent = self.parent
        length = self.end_byte - parent.end_byte if parent is not None else 0
        return self.edge if length == len(self.edge) else self.edge[:length]

    def set_child(self, first_block: bytes, child: Node) -> None:
        """Add a child, or replace the child with that first block."""
        if self.children is NO_CHILDREN:
            self.children = {first_block: child}
        else:
            self.children[first_block] = child
        self.only_child = child if len(self.children) == 1 else None

    def block_hashes(self, block_bytes: int) -> list[bytes]:
        """The chained content hashes of the node's blocks, computed when first asked for."""
        missing = []
        for above in self.path():
            if above.hashes is not None:
                break
            missing.append(above)
        for below in reversed(missing):
            parent = below.parent
            last = parent.hashes[-1] if parent is not None and parent.hashes else None
            below.hashes = chain(below.content, block_bytes, below.namespace, last)
        return self.hashes or []


class NodeLeaves(EvictableLeaves[Node]):
    """The evictable leaves of a radix tree. Their keys stay unique, even if hostile prompts make hashes
    clash."""

    def __init__(
        self, block_bytes: int, policy: EvictionPolicy | None, policy_factory: PolicyFactory | None
    ) -> None:
        super().__init__(policy, policy_factory)
        self._block_bytes = block_bytes

    def register(self, leaf: Node) -> None:
        if self.by_key.setdefault(leaf.key, leaf) is not leaf:
            assert leaf.parent is not None
            leaf.key = self._free_key(leaf.parent, leaf)
            self.by_key[leaf.key] = leaf

    def split(self, head: Node, tail: Node) -> None:
        """Report that `tail` was cut below `head`, which keeps its key. A leaf's tail stays a leaf."""
        evictable = self.by_key.pop(head.key, None) is tail
        tail.key = self._free_key(head, tail)
        if evictable:
            self.by_key[tail.key] = tail
        if tail.share.policy is not None:
            tail.share.policy.split(head.key, head, tail)

    def _free_key(self, parent: Node, node: Node) -> int:
        salt = 0
        while (key := content_key(parent, node.edge[: self._block_bytes], salt)) in self.by_key:
            salt += 1
        return key


class RadixTree:
    """One root per namespace; edges of whole blocks, `block_bytes` bytes each. `version` changes when a node
    that was handed out may no longer be the right one for its tokens."""

    def __init__(self, block_bytes: int, leaves: NodeLeaves, max_ghosts: int) -> None:
        self.block_bytes = block_bytes
        self.leaves = leaves
        self.ghosts: Ghosts[int] = Ghosts(max_ghosts)
        self.roots: dict[Namespace, Node] = {}
        self.num_cached = 0
        self.num_pinned = 0
        self.version = 0

    # -- read

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, parents first."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())

    def walk(self, node: Node, data: bytes, end: int) -> tuple[Node, int]:
        """Follow `data[:end]` down from a root.

        `end` is in bytes, a whole number of blocks. Returns the deepest node that shares blocks with the
        data, and how many blocks match in all. Hot path (`sagellm bench micro prefix_cache`): an only child
        is taken without a look into `children`, and a whole edge is compared before its blocks are.
        """
        block_bytes, offset = self.block_bytes, 0
        while offset < end:
            child = node.only_child
            if child is None:
                child = node.children.get(data[offset : offset + block_bytes])
                if child is None:
                    break
            if not data.startswith(child.edge, offset, end):
                shared = common_blocks(child.edge, data, offset, end, block_bytes)
                if not shared:
                    break
                return child, offset // block_bytes + min(shared, child.num_blocks)
            node, offset = child, child.end_byte
        return node, offset // block_bytes

    # -- structure

    def root(self, namespace: Namespace) -> Node:
        """The namespace's root, made when it is first needed."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = self.new_root(namespace)
        return root

    def new_root(self, namespace: Namespace) -> Node:
        """A root that is not in the tree. Its key depends on the namespace, and all keys below on its key."""
        digest = blake2b(repr(tuple(namespace)).encode(), digest_size=KEY_BYTES).digest()
        key = int.from_bytes(digest, "little")
        return Node(None, b"", array("i"), namespace, key, self.leaves.default_share)

    def add_child(self, parent: Node, edge: bytes, blocks: BlockIds, share: AccountShare) -> Node:
        """A new node below `parent`. The caller pins it or adds it to the evictable leaves."""
        if parent.parent is not None:
            if parent.cut is not None:
                self.trim(parent)
            self.leaves.discard(parent)
        first_block = edge[: self.block_bytes]
        key = content_key(parent, first_block)
        node = Node(parent, edge, blocks, parent.namespace, key, share)
        self.ghosts.discard(key)
        parent.set_child(first_block, node)
        self.num_cached += node.num_blocks
        share.num_cached += node.num_blocks
        return node

    def split(self, node: Node, num_head: int) -> Node:
        """Put a new head of `num_head` blocks above `node`, which becomes the tail. Returns the head."""
        parent, block_bytes = node.parent, self.block_bytes
        assert parent is not None
        cut = num_head * block_bytes
        head = Node(parent, node.edge[:cut], node.blocks[:num_head], node.namespace, node.key, node.share)
        head.pins = 1 if node.pins else 0
        head.last_use, head.used_s, head.bonus_s = node.last_use, node.used_s, node.bonus_s
        if node.hashes is not None:
            head.hashes, node.hashes = node.hashes[:num_head], node.hashes[num_head:]
        parent.set_child(head.edge[:block_bytes], head)
        node.edge, node.blocks, node.parent = node.edge[cut:], node.blocks[num_head:], head
        node.num_blocks -= num_head
        head.set_child(node.edge[:block_bytes], node)
        self.leaves.split(head, node)
        self.version += 1
        return head

    def detach(self, node: Node, parent: Node) -> None:
        """Take a node without children out of the tree. Its uses were uses of its parent too."""
        children = parent.children
        del children[node.edge[: self.block_bytes]]
        if not children:
            parent.children = NO_CHILDREN
        parent.only_child = next(iter(children.values())) if len(children) == 1 else None
        if parent.parent is not None:
            parent.num_uses += node.num_uses
            if node.last_use > parent.last_use:
                parent.last_use, parent.used_s, parent.use = node.last_use, node.used_s, node.use
        elif not children:
            del self.roots[parent.namespace]

    def trim(self, node: Node) -> None:
        """Drop the bytes of evicted blocks from the end of an edge. A ghost remembers when and why they
        went."""
        live = node.content
        if node.cut is not None:
            first_gone = node.edge[len(live) : len(live) + self.block_bytes]
            self.ghosts.add(content_key(node, first_gone), node.cut)
        node.edge, node.cut = live, None

    # -- reference counts

    def pin_path(self, node: Node, *, is_use: bool) -> None:
        """Add one to the node's reference count. The first pin of a node pins its parent too."""
        while node.parent is not None:
            node.pins += 1
            if node.pins > 1:
                return
            self.num_pinned += node.num_blocks
            node.share.num_pinned += node.num_blocks
            if is_use:
                node.hint = None
            if not node.children:
                self.leaves.discard(node, is_use=is_use)
            node = node.parent

    def unpin_path(self, node: Node) -> None:
        """Take one from the node's reference count. A node that loses its last pin unpins its parent too. A
        leaf without pins is evictable."""
        while node.parent is not None:
            node.pins -= 1
            if node.pins:
                return
            self.num_pinned -= node.num_blocks
            node.share.num_pinned -= node.num_blocks
            if not node.children:
                self.leaves.add(node, after_use=True)
            node = node.parent

    # -- invariants

    def check(self) -> None:
        """Raise `BookkeepingError` naming the first invariant that does not hold."""
        seen: set[int] = set()
        num_pinned = 0
        for node in self.nodes():
            self._check_node(node, seen)
            num_pinned += node.num_blocks if node.pins else 0
        require_same("blocks in the tree", len(seen), self.num_cached)
        require_same("pinned blocks in the tree", num_pinned, self.num_pinned)
        self.leaves.check(self.nodes())

    def _check_node(self, node: Node, seen: set[int]) -> None:
        parent, name = node.parent, f"node {node.key:x}"
        assert parent is not None
        size = self.block_bytes
        require(node.num_blocks > 0, f"{name}: an edge without blocks")
        require(
            node.num_blocks == len(node.blocks), f"{name}: {node.num_blocks} blocks, {len(node.blocks)} ids"
        )
        require(
            node.end_byte == node.end_block * size,
            f"{name}: ends at {node.end_block} blocks and {node.end_byte} bytes",
        )
        require(len(node.content) == node.num_blocks * size, f"{name}: edge and blocks differ in length")
        require(node.first_position == parent.end_block, f"{name} does not begin where its parent ends")
        require(parent.children.get(node.edge[:size]) is node, f"{name}: its parent does not know it")
        require(node.cut is None or not node.children, f"{name}: cut off, and has children")
        alone = next(iter(node.children.values())) if len(node.children) == 1 else None
        require(node.only_child is alone, f"{name}: its only child is another")
        pins = node.num_ends + sum(1 for child in node.children.values() if child.pins)
        require(node.pins == pins, f"{name}: {node.pins} pins, {pins} hits that end here and pinned children")
        for block in node.blocks:
            require(block not in seen, f"block {block} stands at two places of the index")
            seen.add(block)


def common_blocks(edge: bytes, data: bytes, offset: int, end: int, block_bytes: int) -> int:
    """Leading blocks that `edge` and `data[offset:end]` share, by binary search."""
    low, high = 0, min(len(edge), end - offset) // block_bytes
    while low < high:
        middle = (low + high + 1) // 2
        if data.startswith(edge[low * block_bytes : middle * block_bytes], offset + low * block_bytes):
            low = middle
        else:
            high = middle - 1
    return low


def content_key(parent: Node, first_block: bytes, salt: int = 0) -> int:
    """A 64-bit hash of where an edge begins, equal in every process.

    It covers the edge above, the position and the tokens of the first block. An edge keeps its key when its
    tail is split off or evicted. `salt` gives another key where two living edges would have the same.
    """
    above = parent.key.to_bytes(KEY_BYTES, "little")
    position = (parent.end_block + (salt << 32)).to_bytes(KEY_BYTES, "little")
    return int.from_bytes(blake2b(above + position + first_block, digest_size=KEY_BYTES).digest(), "little")
