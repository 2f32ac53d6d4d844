"""What the radix tree answers off the hot path: where a match ended and why; the branches nearest to it."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator

from sagellm.core.protocols.prefix_cache import Branch, MatchEnd, MatchReport, PrefixHit
from sagellm.core.types import TOKEN_BYTES, Namespace, Tokens
from sagellm.kvmgr.prefix_cache._ghosts import Ghost
from sagellm.kvmgr.prefix_cache._node import Node, content_key, root_key
from sagellm.kvmgr.prefix_cache._tree import RadixTree


def branches(tree: RadixTree, block_size: int, tokens: Tokens, k: int, namespace: Namespace) -> list[Branch]:
    """At most `k` branches that share a first block with the tokens, from the deepest meeting point up."""
    start, num_blocks = _match(tree, tokens, namespace)
    found: list[Branch] = []
    node: Node | None = start if num_blocks else None
    below: Node | None = None
    while node is not None and node.parent is not None and len(found) < k:
        shared = min(num_blocks, node.end)
        meeting = PrefixHit(shared * block_size, shared, tokens, namespace, node, tree.version)
        ends = heapq.nlargest(k - len(found), _ends_below(node, below), key=lambda end: end.last_use)
        found += [Branch(meeting, end.end, end.used_s) for end in ends]
        node, below = node.parent, node
    return found


def _ends_below(node: Node, left_out: Node | None) -> Iterator[Node]:
    """The leaves at or below a node, but for those below one of its children."""
    if not node.children:
        yield node
    for child in node.children.values():
        if child is not left_out:
            if not child.children:
                yield child
            yield from (below for below in child.subtree() if not below.children)


def explain(tree: RadixTree, block_size: int, tokens: Tokens, namespace: Namespace) -> MatchReport:
    """The longest match of the tokens and the reason why it is not longer."""
    node, num_blocks = _match(tree, tokens, namespace)
    num_tokens = num_blocks * block_size
    data, step = tokens.tobytes(), tree.step
    next_block = data[num_blocks * step : (num_blocks + 1) * step]
    if len(next_block) < step:
        return MatchReport(num_tokens, num_blocks, MatchEnd.COMPLETE)
    elsewhere = _elsewhere(tree, tokens, namespace, num_blocks)
    ghost = _ghost(tree, node, num_blocks, next_block, namespace)
    if ghost is not None:
        return MatchReport(num_tokens, num_blocks, MatchEnd.EVICTED, ghost.at_s, ghost.cause, elsewhere)
    followers = _next_blocks(tree, node, num_blocks, namespace)
    end = MatchEnd.NEVER_SEEN
    if elsewhere:
        end = MatchEnd.OTHER_NAMESPACE
    elif next_block[:TOKEN_BYTES] in {block[:TOKEN_BYTES] for block in followers}:
        end = MatchEnd.NOT_ALIGNED
    return MatchReport(num_tokens, num_blocks, end, num_elsewhere=elsewhere)


def _ghost(
    tree: RadixTree, node: Node | None, num_blocks: int, next_block: bytes, namespace: Namespace
) -> Ghost | None:
    if node is None or node.parent is None:
        root = Node(None, b"", array("i"), namespace, root_key(namespace), tree.leaves.nobody)
        return tree.ghosts.get(content_key(root, next_block))
    if node.end > num_blocks:
        return None
    if node.cut is not None:
        dead = len(node.content)
        if node.edge[dead : dead + tree.step] == next_block:
            return node.cut
    return tree.ghosts.get(content_key(node, next_block))


def _next_blocks(tree: RadixTree, node: Node | None, num_blocks: int, namespace: Namespace) -> list[bytes]:
    """The resident blocks that come behind the match."""
    if node is None:
        node = tree.roots.get(namespace)
    if node is None:
        return []
    if node.end > num_blocks:
        start = (num_blocks - node.first_position) * tree.step
        return [node.edge[start : start + tree.step]]
    return list(node.children)


def _elsewhere(tree: RadixTree, tokens: Tokens, namespace: Namespace, num_blocks: int) -> int:
    """The longest match in another namespace, 0 if it is not longer."""
    others = (_match(tree, tokens, other)[1] for other in tree.roots if other != namespace)
    longest = max(others, default=0)
    return longest if longest > num_blocks else 0


def _match(tree: RadixTree, tokens: Tokens, namespace: Namespace) -> tuple[Node | None, int]:
    root, data = tree.roots.get(namespace), tokens.tobytes()
    return tree.walk(root, data, len(data) - len(data) % tree.step) if root is not None else (None, 0)
