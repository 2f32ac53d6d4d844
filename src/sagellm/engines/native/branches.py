"""Token trees as sequences that attend by slot.

The tokens of a tree lie in a step's flat batch, and their KV in the row's slots, as those of a chain would.
Each branch attends to the row's context, to its ancestors and to itself, wherever these have their slots: a
sequence whose blocks are single slots (`PagedKV.by_slot`). So the attention of trees is that of chains.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from sagellm.core.token_trees import path_to
from sagellm.engines.native.attention import Span


def branches_of(tree: Span, parents: Sequence[int], block_size: int) -> list[Span]:
    """The branches of a tree, in order of their rows. Their blocks are slots.

    `tree`: the row's last token and the tree's tokens, as if they were a chain. The first branch begins with
    the last token. A further one begins with a token that does not follow the token before it.
    """
    blocks, offsets = np.asarray(tree.block_ids, dtype=np.int32), np.arange(block_size, dtype=np.int32)
    slots = (blocks[:, None] * block_size + offsets).ravel()[: tree.end]
    context, own = slots[: tree.start + 1], slots[tree.start + 1 :]
    heads = [node for node, parent in enumerate(parents) if parent != node - 1]
    found: list[Span] = []
    for first, stop in zip([-1, *heads], [*heads, len(parents)], strict=True):
        ancestors = path_to(parents, parents[first]) if first >= 0 else []
        seen = np.concatenate((context, own[ancestors], own[max(0, first) : stop]))
        table = array("i")
        table.frombytes(seen.tobytes())
        count = stop - first
        found.append(Span(tree.first_row + 1 + first, count, len(table) - count, table, tree.num_dropped))
    return found
