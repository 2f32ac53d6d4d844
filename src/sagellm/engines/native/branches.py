"""Branches of token trees, as rows of a step that attend by slot.

A tree's tokens have slots one after the other, as those of a chain: token i in the slot of the position that a
chain's token i has. Its first branch goes on with the row, as a chain does. A further branch sees the row's
context, its own ancestors and itself, wherever these have their slots: a sequence whose blocks are single slots
(`PagedKV.by_slot`). So the attention of trees is that of chains.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sagellm.core.token_trees import path_to
from sagellm.engines.native.attention import Span


@dataclass(frozen=True, slots=True)
class Branch:
    """Tokens `[first, stop)` of a tree, which follow each other and leave an earlier branch.

    The row decodes at position `start`. Behind it the branch sees these `places`: indices of slots in the row's
    table, its own the last of them.
    """

    first: int
    stop: int
    start: int
    places: Sequence[int]

    def span(self, first_row: int, table: Sequence[int], block_size: int) -> Span:
        """The branch in flat rows from `first_row` on, where its row has this block table."""
        blocks, offsets = np.asarray(table, dtype=np.int32), np.arange(block_size, dtype=np.int32)
        slots, own = (blocks[:, None] * block_size + offsets).ravel(), array("i")
        own.frombytes(np.concatenate((slots[: self.start + 1], slots[list(self.places)])).tobytes())
        count = self.stop - self.first
        return Span(first_row, count, len(own) - count, own)


def num_in_first_branch(parents: Sequence[int]) -> int:
    """How many tokens the first branch of a tree has."""
    return next((node for node, parent in enumerate(parents) if parent != node - 1), len(parents))


def further_branches(parents: Sequence[int], start: int) -> Iterator[Branch]:
    """The other branches of a tree, in order. Its row decodes at position `start`."""
    heads = [node for node, parent in enumerate(parents) if parent != node - 1]
    for first, stop in zip(heads, [*heads[1:], len(parents)], strict=False):
        nodes = (*path_to(parents, parents[first]), *range(first, stop))
        yield Branch(first, stop, start, [start + 1 + node for node in nodes])
