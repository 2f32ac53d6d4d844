"""Token trees: proposed tokens of which several may follow the same one.

A tree is its tokens (nodes) and, for each of them, the index of its parent: the token that it follows, or -1
where it follows the last known token. A parent comes before its children, so the first tokens of a tree are a
tree too. A chain is a tree in which each token follows the one before; its parents are left out: `()`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

ROOT = -1


def check_tree(token_ids: Sequence[int], parents: Sequence[int]) -> None:
    """Raise `ValueError` unless `parents` make a tree of the tokens."""
    if not parents:
        return
    if len(parents) != len(token_ids):
        raise ValueError(f"{len(token_ids)} tokens with {len(parents)} parents")
    children: set[tuple[int, int]] = set()
    for node, (token_id, parent) in enumerate(zip(token_ids, parents, strict=True)):
        if not ROOT <= parent < node:
            raise ValueError(f"token {node} follows token {parent}; a parent is -1 or an earlier token")
        if (parent, token_id) in children:
            raise ValueError(f"token {token_id} follows token {parent} twice: siblings differ")
        children.add((parent, token_id))


def is_chain(parents: Sequence[int]) -> bool:
    """Whether each token follows the one before."""
    return all(parent == node - 1 for node, parent in enumerate(parents))


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the first one to `node`; none for `ROOT`."""
    path: list[int] = []
    while node != ROOT:
        path.append(node)
        node = parents[node]
    return path[::-1]


def depths_of(parents: Sequence[int]) -> list[int]:
    """How many ancestors each node has."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent == ROOT else depths[parent] + 1)
    return depths


def accepted_path(token_ids: Sequence[int], parents: Sequence[int], drawn: Sequence[int]) -> list[int]:
    """The nodes that the model draws itself, from the first one on.

    `drawn[0]` is the token drawn behind the last known one, `drawn[1 + i]` that behind node i.
    """
    child = {pair: node for node, pair in enumerate(zip(parents, token_ids, strict=True))}
    path, node = list[int](), child.get((ROOT, drawn[0]))
    while node is not None:
        path.append(node)
        node = child.get((node, drawn[1 + node]))
    return path


def branch_by_branch(parents: Sequence[int]) -> list[int]:
    """The nodes in another order: behind each of them its first child.

    The first branch comes first, and each other one behind the branches that leave it further down.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    order, stack = list[int](), children.get(ROOT, [])[::-1]
    while stack:
        order.append(stack.pop())
        stack += children.get(order[-1], [])[::-1]
    return order


def path_along(token_ids: Sequence[int], parents: Sequence[int], coming: Iterable[int]) -> list[int]:
    """The nodes of the longest path that begins as `coming` does."""
    child = {pair: node for node, pair in enumerate(zip(parents, token_ids, strict=True))}
    path = list[int]()
    for token_id in coming:
        node = child.get((path[-1] if path else ROOT, token_id))
        if node is None:
            break
        path.append(node)
    return path
