"""Contract of the prefix index: which leading tokens of a prompt already have their KV in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sagellm.core.types import Namespace, Tokens


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What `lookup` found: the first `num_tokens` tokens stand in `num_blocks` blocks of the index.

    `node` is the index's own handle and `version` its state at look-up; neither means anything to a caller.
    A hit that is not pinned may be gone at the next `evict`.
    """

    num_tokens: int
    num_blocks: int
    tokens: Tokens
    namespace: Namespace
    node: Any = None
    version: int = 0


@dataclass(frozen=True, slots=True)
class InsertResult:
    """`num_existing` leading blocks were already there (duplicates where the ids differ: they stay the
    caller's); the blocks after them belong to the index from now on. `hit` covers all that was inserted."""

    num_existing: int
    hit: PrefixHit


class PrefixReuseIndex(Protocol):
    """A map from token prefixes to blocks, in whole blocks, per namespace.

    `lookup` is read-only. A pinned hit, and every prefix of it, is never evicted. Blocks belong to the index
    from `insert` until `evict` or `clear` gives them back.
    """

    @property
    def block_size(self) -> int: ...

    def lookup(self, tokens: Tokens, namespace: Namespace = ..., max_tokens: int | None = None) -> PrefixHit:
        """The longest resident prefix of `tokens`, at most `max_tokens` long, in whole blocks."""
        ...

    def block_ids(self, hit: PrefixHit) -> list[int]:
        """The blocks of a hit, in order of position."""
        ...

    def pin(self, hit: PrefixHit) -> PrefixHit:
        """Hold the hit against eviction; returns the hit to hand to `unpin`. Counts: pin twice, unpin twice.

        If the index changed since the look-up the hit is looked up again, and may have become shorter.
        """
        ...

    def unpin(self, hit: PrefixHit) -> None:
        """Give one pin back; raises `BookkeepingError` if there is none."""
        ...

    def insert(self, tokens: Tokens, block_ids: Sequence[int], namespace: Namespace = ...) -> InsertResult:
        """Register `block_ids[i]` for tokens `[i * block_size, (i + 1) * block_size)`.

        `tokens` may be longer than the blocks; the rest is ignored.
        """
        ...

    def evict(self, num_blocks: int, cause: str = ...) -> list[int] | None:
        """Give up exactly `num_blocks` unpinned blocks, chosen by the policy, or none and change nothing."""
        ...

    def num_unpinned_on_path(self, hit: PrefixHit) -> int:
        """Blocks of the hit that nobody pins: what pinning it takes away from `num_evictable`."""
        ...

    def num_held_alone(self, hit: PrefixHit) -> int:
        """Blocks of a pinned hit that no other pin holds: what unpinning it adds to `num_evictable`."""
        ...

    @property
    def num_cached(self) -> int:
        """Blocks in the index."""
        ...

    @property
    def num_evictable(self) -> int:
        """Blocks in the index that no pin holds."""
        ...

    def clear(self) -> list[int]:
        """Give up every unpinned block."""
        ...

    def check(self) -> None:
        """Raise `BookkeepingError` naming the first invariant that does not hold."""
        ...
