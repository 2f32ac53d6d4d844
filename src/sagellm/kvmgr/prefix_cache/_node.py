"""The node of the radix tree: one edge of whole blocks, and the pins that hold it."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import TYPE_CHECKING

from sagellm.core.protocols.eviction import NO_USE, Hint
from sagellm.core.types import BlockIds, Namespace
from sagellm.kvmgr.prefix_cache._ghosts import Ghost
from sagellm.kvmgr.prefix_cache.fingerprint import chain

if TYPE_CHECKING:
    from sagellm.kvmgr.prefix_cache._leaves import Group

KEY_BYTES = 8
NO_CHILDREN: dict[bytes, Node] = {}
"""The children of every leaf. Never written to."""


class Node:
    """An edge of whole blocks below `parent`; for a policy, an `Extent`.

    `edge` holds the int32 bytes of its tokens, `blocks` one id per block. `end` and `stop` are the position
    behind its last block, in blocks and in bytes. What eviction cut off at the end may still stand in `edge`
    (`cut` says when and why it went); `stop` alone says what counts.

    `pins` counts the pinned hits that end here (`ends_here`) and the children that are pinned. So a hit holds
    its whole path, and pinning a path that is held already is one addition. `last_use`, `used_s` and
    `num_uses` are exact for leaves: a child that goes hands them to its parent. Whoever pinned a node holds
    its full edge: a split puts a new head above and leaves this object as the tail.
    """

    __slots__ = (
        "blocks", "bonus_s", "children", "cut", "edge", "end", "ends_here", "group", "hashes", "hint", "key",
        "last_use", "namespace", "num_blocks", "num_uses", "only", "parent", "pins", "stop", "use",
        "used_s",
    )  # fmt: skip

    def __init__(
        self, parent: Node | None, edge: bytes, blocks: BlockIds, namespace: Namespace, key: int, group: Group
    ) -> None:
        num_blocks = len(blocks)
        self.parent = parent
        self.edge = edge
        self.blocks = blocks
        self.num_blocks = num_blocks
        self.namespace = namespace
        self.key = key
        self.group = group
        self.children = NO_CHILDREN
        self.only: Node | None = None  # the child, where there is one alone: conversations are chains
        self.pins = 0
        self.ends_here = 0
        self.last_use = 0
        self.num_uses = 0
        self.used_s = 0.0
        self.bonus_s = 0.0
        self.use = NO_USE
        self.hint: Hint | None = None
        self.cut: Ghost | None = None
        self.hashes: list[bytes] | None = None
        if parent is None:
            self.end = self.stop = 0
        else:
            self.end = parent.end + num_blocks
            self.stop = parent.stop + len(edge)

    @property
    def first_position(self) -> int:
        """Blocks in front of this edge."""
        return self.end - self.num_blocks

    @property
    def tenant(self) -> str:
        return self.group.account.tenant or self.namespace.tenant

    @property
    def content(self) -> bytes:
        """The bytes of the blocks that are still here."""
        parent = self.parent
        length = self.stop - parent.stop if parent is not None else 0
        return self.edge if length == len(self.edge) else self.edge[:length]

    def path(self) -> Iterator[Node]:
        """This node and its ancestors, the root left out."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def subtree(self) -> Iterator[Node]:
        """All nodes below this one, parents first."""
        stack = list(self.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def add_child(self, first_block: bytes, child: Node) -> None:
        """A new child, or another in place of the one with that first block."""
        if self.children is NO_CHILDREN:
            self.children = {first_block: child}
        else:
            self.children[first_block] = child
        self.only = child if len(self.children) == 1 else None

    def drop_child(self, first_block: bytes) -> None:
        del self.children[first_block]
        if not self.children:
            self.children = NO_CHILDREN
        self.only = next(iter(self.children.values())) if len(self.children) == 1 else None

    def inherit(self, child: Node) -> None:
        """A child goes: its uses were uses of this node too."""
        self.num_uses += child.num_uses
        if child.last_use > self.last_use:
            self.last_use, self.used_s = child.last_use, child.used_s
            self.use = child.use


def hashes_of(node: Node, step: int) -> list[bytes]:
    """The chained content hashes of the node's blocks, computed now where nobody asked before."""
    missing = []
    for above in node.path():
        if above.hashes is not None:
            break
        missing.append(above)
    for below in reversed(missing):
        parent = below.parent
        last = parent.hashes[-1] if parent is not None and parent.hashes else None
        below.hashes = chain(below.content, step, below.namespace, last)
    return node.hashes or []


def content_key(parent: Node, first_block: bytes, salt: int = 0) -> int:
    """A 64-bit hash, equal in every process, of where an edge begins: below which edge, at which block, with
    which tokens. It names the edge from its birth on: the head of a split keeps it, and so does what eviction
    leaves. `salt` gives another one where two living edges would have the same."""
    above = parent.key.to_bytes(KEY_BYTES, "little")
    place = (parent.end + (salt << 32)).to_bytes(KEY_BYTES, "little")
    return int.from_bytes(blake2b(above + place + first_block, digest_size=KEY_BYTES).digest(), "little")


def root_key(namespace: Namespace) -> int:
    """The key of a namespace's root, over which all keys below it are made."""
    return int.from_bytes(blake2b(repr(tuple(namespace)).encode(), digest_size=KEY_BYTES).digest(), "little")


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
