"""The invariants of the radix tree."""

from __future__ import annotations

from sagellm.core.errors import BookkeepingError
from sagellm.kvmgr.prefix_cache._leaves import Group
from sagellm.kvmgr.prefix_cache._node import Node
from sagellm.kvmgr.prefix_cache._tree import RadixTree


def check_tree(tree: RadixTree) -> None:
    """Raise `BookkeepingError` naming the first invariant that does not hold."""
    seen: set[int] = set()
    cached: dict[Group, int] = {}
    pinned: dict[Group, int] = {}
    for node in tree.nodes():
        _check_node(tree, node, seen)
        cached[node.group] = cached.get(node.group, 0) + node.num_blocks
        pinned[node.group] = pinned.get(node.group, 0) + (node.num_blocks if node.pins else 0)
    _same("blocks in the tree", len(seen), tree.num_cached)
    _same("unpinned blocks", sum(cached.values()) - sum(pinned.values()), tree.num_cached - tree.num_pinned)
    for group in tree.leaves.groups.values():
        _same(f"blocks of {group.account}", cached.get(group, 0), group.num_cached)
        _same(f"pinned blocks of {group.account}", pinned.get(group, 0), group.num_pinned)
        _check_policy(tree, group)
    for key, leaf in tree.leaves.by_key.items():
        _require(leaf.key == key and not leaf.pins and not leaf.children, f"{key:x} is no evictable leaf")


def _check_policy(tree: RadixTree, group: Group) -> None:
    if group.policy is None:
        return
    leaves = sum(leaf.num_blocks for leaf in tree.leaves.by_key.values() if leaf.group is group)
    _same(f"evictable leaf blocks of {group.account} in the tree and in the policy", leaves,
          group.policy.num_evictable)  # fmt: skip
    group.policy.check()


def _check_node(tree: RadixTree, node: Node, seen: set[int]) -> None:
    parent, name = node.parent, f"node {node.key:x}"
    assert parent is not None
    _require(node.num_blocks > 0, f"{name}: an edge without blocks")
    _require(node.num_blocks == len(node.blocks), f"{name}: {node.num_blocks} blocks, {len(node.blocks)} ids")
    _require(node.stop == node.end * tree.step, f"{name}: ends at {node.end} blocks and {node.stop} bytes")
    _require(len(node.content) == node.num_blocks * tree.step, f"{name}: edge and blocks differ in length")
    _require(node.first_position == parent.end, f"{name} does not begin where its parent ends")
    _require(parent.children.get(node.edge[: tree.step]) is node, f"{name}: its parent does not know it")
    _require(node.cut is None or not node.children, f"{name}: cut off, and has children")
    alone = next(iter(node.children.values())) if len(node.children) == 1 else None
    _require(node.only is alone, f"{name}: its only child is another")
    held = node.ends_here + sum(1 for child in node.children.values() if child.pins)
    _require(node.pins == held, f"{name}: {node.pins} pins, {held} hits that end here and pinned children")
    evictable = not node.pins and not node.children
    _require((tree.leaves.by_key.get(node.key) is node) == evictable, f"{name} is wrongly (not) evictable")
    for block in node.blocks:
        _require(block not in seen, f"block {block} stands at two places of the index")
        seen.add(block)


def _same(what: str, found: int, booked: int) -> None:
    _require(found == booked, f"{what}: {found} found, {booked} in the books")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise BookkeepingError(message)
