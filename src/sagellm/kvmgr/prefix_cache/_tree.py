"""The radix tree itself: nodes, pins and counts. What a hit is and when to evict is the index's business."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from sagellm.core.types import BlockIds, Namespace
from sagellm.kvmgr.prefix_cache._ghosts import Ghosts
from sagellm.kvmgr.prefix_cache._leaves import Group, Leaves
from sagellm.kvmgr.prefix_cache._node import Node, common_blocks, content_key, root_key


class RadixTree:
    """One root per namespace; edges of whole blocks, `step` bytes each.

    `version` moves when a place in the tree that was handed out may have become wrong.
    """

    def __init__(self, step: int, leaves: Leaves, max_ghosts: int) -> None:
        self.step = step
        self.leaves = leaves
        self.ghosts: Ghosts[int] = Ghosts(max_ghosts)
        self.roots: dict[Namespace, Node] = {}
        self.num_cached = 0
        self.num_pinned = 0
        self.version = 0

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots."""
        for root in self.roots.values():
            yield from root.subtree()

    def walk(self, node: Node, data: bytes, end: int) -> tuple[Node, int]:
        """From a root: the deepest node that shares blocks with `data[:end]` (`end` in bytes, whole blocks),
        and how many blocks match in all."""
        step, offset = self.step, 0
        startswith = data.startswith
        while offset < end:
            child = node.only
            if child is None:
                child = node.children.get(data[offset : offset + step])
                if child is None:
                    break
            if not startswith(child.edge, offset, end):
                shared = common_blocks(child.edge, data, offset, end, step)
                if not shared:
                    break
                return child, offset // step + min(shared, child.num_blocks)
            node, offset = child, child.stop
        return node, offset // step

    def root(self, namespace: Namespace) -> Node:
        """The namespace's root, made at first need."""
        root = self.roots.get(namespace)
        if root is None:
            nobody = self.leaves.nobody
            key = root_key(namespace)
            root = self.roots[namespace] = Node(None, b"", array("i"), namespace, key, nobody)
        return root

    def add_leaf(self, parent: Node, edge: bytes, blocks: BlockIds, group: Group) -> Node:
        """A new leaf below `parent`, not offered to any policy yet."""
        if parent.parent is not None:
            if parent.cut is not None:
                self.bury(parent)
            self.leaves.withdraw(parent)
        first_block = edge[: self.step]
        key = content_key(parent, first_block)
        leaf = Node(parent, edge, blocks, parent.namespace, key, group)
        self.ghosts.discard(key)
        parent.add_child(first_block, leaf)
        self.num_cached += leaf.num_blocks
        group.num_cached += leaf.num_blocks
        return leaf

    def split(self, node: Node, num_head: int) -> Node:
        """Put a new head of `num_head` blocks above `node`, which stays as the tail; returns the head."""
        parent, step = node.parent, self.step
        assert parent is not None
        cut = num_head * step
        head = Node(parent, node.edge[:cut], node.blocks[:num_head], node.namespace, node.key, node.group)
        head.pins = 1 if node.pins else 0
        head.last_use, head.used_s, head.bonus_s = node.last_use, node.used_s, node.bonus_s
        if node.hashes is not None:
            head.hashes, node.hashes = node.hashes[:num_head], node.hashes[num_head:]
        parent.add_child(head.edge[:step], head)
        node.edge, node.blocks, node.parent = node.edge[cut:], node.blocks[num_head:], head
        node.num_blocks -= num_head
        head.add_child(node.edge[:step], node)
        self.leaves.split(head, node)
        self.version += 1
        return head

    def detach(self, node: Node, parent: Node) -> None:
        """Take a node without children out of the tree."""
        parent.drop_child(node.edge[: self.step])
        if parent.parent is not None:
            parent.inherit(node)
        elif not parent.children:
            del self.roots[parent.namespace]

    def count_out(self, node: Node, num_blocks: int) -> None:
        self.num_cached -= num_blocks
        node.group.num_cached -= num_blocks

    def hold(self, node: Node) -> None:
        """One more holder of the node: the first one makes it a holder of its parent."""
        while node.parent is not None:
            node.pins += 1
            if node.pins > 1:
                return
            self.num_pinned += node.num_blocks
            node.group.num_pinned += node.num_blocks
            node.hint = None
            if not node.children:
                self.leaves.withdraw(node)
            node = node.parent

    def let_go(self, node: Node) -> None:
        """One holder less; a leaf that nobody holds is evictable."""
        while node.parent is not None:
            node.pins -= 1
            if node.pins:
                return
            self.num_pinned -= node.num_blocks
            node.group.num_pinned -= node.num_blocks
            if not node.children:
                self.leaves.offer(node, returning=True)
            node = node.parent

    def bury(self, node: Node) -> None:
        """Forget the bytes of what was cut off the end of an edge, but not when and why it went."""
        live = node.content
        if node.cut is not None:
            self.ghosts.add(content_key(node, node.edge[len(live) : len(live) + self.step]), node.cut)
        node.edge, node.cut = live, None
