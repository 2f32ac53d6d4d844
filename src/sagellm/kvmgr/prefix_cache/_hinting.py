"""Hints after the fact reach the nodes of the radix tree, and their policies."""

from __future__ import annotations

from sagellm.core.protocols.eviction import Hint, bonus_of
from sagellm.kvmgr.prefix_cache._leaves import Leaves
from sagellm.kvmgr.prefix_cache._node import Node


def hint_path(leaves: Leaves, end: Node, hint: Hint, now_s: float) -> int:
    """Note a hint at the end of a path and at what is in front of it and leads nowhere else; returns the
    number of blocks. A node that is no leaf now tells its policy when it becomes one; a use forgets it."""
    num_blocks = 0
    for node in end.path():
        if node is not end and len(node.children) > 1:
            break
        merged = hint.over(node.hint)
        num_blocks += node.num_blocks
        if merged == node.hint and hint.duration_s is None:
            continue  # said before
        node.hint = merged
        if hint.duration_s is not None:
            node.bonus_s = bonus_of(hint, now_s - node.used_s)
        if not node.pins and not node.children:
            if hint.duration_s is not None:
                leaves.withdraw(node)
                leaves.offer(node)
            if node.group.policy is not None:
                node.group.policy.hint(node.key, node.hint)
    return num_blocks
