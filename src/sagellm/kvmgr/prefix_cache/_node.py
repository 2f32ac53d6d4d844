"""The node of the radix tree: one edge of whole blocks, and the pins that hold it."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

from sagellm.core.protocols.eviction import Extent
from sagellm.core.types import Namespace

KEY_BYTES = 8


class Node:
    """An edge of whole blocks below `parent`.

    `edge` are the int32 bytes of its tokens, `blocks` one id per block, `pins` the number of pinned hits at
    or below the node, `end` the position (in blocks) behind its last block. Whoever pinned the node holds its
    full edge: a split puts a new head above and leaves this object as the tail.
    """

    __slots__ = ("blocks", "children", "edge", "end", "key", "last_use", "namespace", "parent", "pins")

    def __init__(
        self, parent: Node | None, edge: bytes, blocks: list[int], namespace: Namespace, key: int
    ) -> None:
        self.parent = parent
        self.edge = edge
        self.blocks = blocks
        self.namespace = namespace
        self.children: dict[bytes, Node] = {}
        self.pins = 0
        self.last_use = 0
        self.end: int = len(blocks) + (parent.end if parent else 0)
        self.key = key

    @property
    def start(self) -> int:
        return self.end - len(self.blocks)

    def path(self) -> Iterator[Node]:
        """This node and its ancestors, the root left out."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def extent(self) -> Extent:
        parent = self.parent
        return Extent(
            self.key,
            parent.key if parent is not None and parent.parent is not None else None,
            len(self.blocks),
            self.start,
            self.last_use,
            self.namespace.tenant,
        )

    def subtree(self) -> Iterator[Node]:
        """All nodes below this one, parents first."""
        stack = list(self.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def content_key(parent: Node | None, start: int, first_block: bytes, namespace: Namespace) -> int:
    """A 64-bit hash, equal in every process, of where an edge begins: below which edge, at which block, with
    which tokens. It names the edge from its birth on: the head of a split keeps it, and so does what eviction
    leaves."""
    above = parent.key.to_bytes(KEY_BYTES, "little") if parent else repr(tuple(namespace)).encode()
    digest = blake2b(above + start.to_bytes(KEY_BYTES, "little") + first_block, digest_size=KEY_BYTES)
    return int.from_bytes(digest.digest(), "little")


def common_blocks(edge: bytes, data: bytes, offset: int, end: int, step: int) -> int:
    """Leading blocks of `step` bytes that `edge` and `data[offset:end]` share."""
    low, high = 0, min(len(edge), end - offset) // step
    while low < high:
        middle = (low + high + 1) // 2
        if data.startswith(edge[low * step : middle * step], offset + low * step):
            low = middle
        else:
            high = middle - 1
    return low
