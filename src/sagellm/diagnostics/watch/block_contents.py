"""`BlockContents`: blocks by what they hold, whichever server holds them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from sagellm.control_plane.kv_events import BlockStored
from sagellm.core.errors import BookkeepingError
from sagellm.core.types import TOKEN_BYTES

MAX_NAMESPACES = 65_536
"""Salts and adapters that are told apart; all others count as one."""
MAX_SIBLINGS = 4
"""Blocks behind one block that a new one is compared with, token by token."""


class BlockContent:
    """All tokens up to the end of a block, in one namespace.

    `text_key` is the same for equal tokens in all namespaces. `is_whole`: all blocks before it are known.
    `holders`: bits of the instances that have it. A root has no tokens and no parent;
    a forgotten block has no parent either.
    """

    __slots__ = ("children", "holders", "is_whole", "namespace", "number", "parent", "text_key", "tokens")

    def __init__(
        self, number: int, parent: BlockContent | None, tokens: bytes, namespace: int, media: bytes = b""
    ) -> None:
        self.number = number
        self.parent = parent
        self.tokens = tokens
        self.namespace = namespace
        self.text_key: int = hash((parent.text_key, tokens, media)) if parent is not None else 0
        self.is_whole: bool = parent is None or parent.is_whole
        self.children: list[BlockContent] = []
        self.holders = 0


class BlockContents:
    """Numbers blocks: equal numbers hold equal tokens and all before.

    Remembers `max_blocks` of them; those that were stored longest ago are forgotten, and get another number
    when they come again. A namespace is an adapter and a salt; images are part of what a block holds.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._contents: dict[int, BlockContent] = {}
        self._next_number = 0
        self._namespaces: dict[tuple[str, ...], int] = {}
        self._roots: dict[int, BlockContent] = {}
        self._in_namespaces: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._contents)

    def begin(self, event: BlockStored) -> BlockContent:
        """What is before the event's first block: a root or an unknown block."""
        keys = event.extra_keys[0] if event.extra_keys else None
        salts = (key for key in keys or () if isinstance(key, str))
        name = (event.lora_name or "", event.cache_salt or "", *salts)
        known = min(len(self._namespaces), MAX_NAMESPACES)
        number = self._namespaces.get(name if any(name) else (), known)
        if number < MAX_NAMESPACES:
            self._namespaces[name if any(name) else ()] = number
        if number == 1 and 1 not in self._roots:
            for content in self._contents.values():  # until now there was one namespace only
                self._note_namespace(content)
        root = self._roots.get(number)
        if root is None:
            root = self._roots[number] = BlockContent(self._next_number, None, b"", number)
            self._next_number += 1
        if event.parent_block_hash is None:
            return root
        unknown = self.behind(root, repr(event.parent_block_hash).encode())
        unknown.is_whole = False
        return unknown

    def below(self, content: BlockContent, event: BlockStored, data: bytes) -> Iterator[BlockContent]:
        """The event's blocks, in order, below `content`. `data`: their tokens as bytes."""
        step = event.block_size * TOKEN_BYTES
        for index in range(len(event.block_hashes)):
            tokens = data[index * step : (index + 1) * step]
            content = self.behind(content, tokens, media_of(event, index))
            yield content

    def behind(self, parent: BlockContent, tokens: bytes, media: bytes = b"") -> BlockContent:
        """The block of these tokens below `parent`. `media`: see `media_of`."""
        key = hash((parent.number, tokens, media))
        content = self._contents.pop(key, None)
        if content is None:
            content = BlockContent(self._next_number, parent, tokens, parent.namespace, media)
            self._next_number += 1
            parent.children = [*parent.children[1 - MAX_SIBLINGS :], content]
            if len(self._contents) >= self._max_blocks:
                forgotten = self._contents.pop(next(iter(self._contents)))
                forgotten.children, forgotten.parent = [], None  # else an endless chain would keep all of it
        self._contents[key] = content  # the last one that was stored is the last to be forgotten
        return content

    def _note_namespace(self, content: BlockContent) -> int:
        """Mark that the block's namespace has seen its text; returns all marks."""
        bits = self._in_namespaces.get(content.text_key, 0) | 1 << min(content.namespace, 63)
        self._in_namespaces[content.text_key] = bits
        if len(self._in_namespaces) > self._max_blocks:
            del self._in_namespaces[next(iter(self._in_namespaces))]
        return bits

    def is_in_other_namespace(self, content: BlockContent) -> bool:
        if len(self._namespaces) < 2:
            return False
        bits = self._note_namespace(content)
        return bool(bits & ~(1 << min(content.namespace, 63)))

    def check(self) -> None:
        """Raise `BookkeepingError` if there are too many."""
        if len(self._contents) > self._max_blocks:
            raise BookkeepingError("more blocks are remembered than allowed")


def path_to(content: BlockContent) -> list[BlockContent]:
    """The blocks up to this one, without what is before a forgotten one."""
    path = []
    while content.parent is not None:
        path.append(content)
        content = content.parent
    return path[::-1]


def most_equal_tokens(content: BlockContent) -> int:
    """Leading tokens in which the block equals another one behind the same block."""
    siblings = content.parent.children if content.parent is not None else []
    return max((_equal_tokens(content.tokens, other.tokens) for other in siblings), default=0)


def _equal_tokens(tokens: bytes, other: bytes) -> int:
    """Leading tokens that are equal; 0 for two equal blocks."""
    length = min(len(tokens), len(other))
    difference = int.from_bytes(tokens[:length], "big") ^ int.from_bytes(other[:length], "big")
    return (length - (difference.bit_length() + 7) // 8) // TOKEN_BYTES if difference else 0


def media_of(event: BlockStored, index: int) -> bytes:
    """Images and embeddings of a block: its hash covers them beside its tokens.

    vLLM names them in `extra_keys`, as pairs of a hash and an offset, and as bytes.
    """
    keys = event.extra_keys[index] if event.extra_keys and index < len(event.extra_keys) else None
    media = [key for key in keys or () if not isinstance(key, str)]
    return repr(media).encode() if media else b""


def token_bytes(event: BlockStored) -> bytes | None:
    """The tokens of the blocks, 4 bytes each.

    None if they do not fill the blocks or are no token ids."""
    if event.block_size < 1 or len(event.token_ids) != len(event.block_hashes) * event.block_size:
        return None
    try:
        return array("i", event.token_ids).tobytes()
    except OverflowError:
        return None
