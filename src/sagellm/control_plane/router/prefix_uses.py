"""`PrefixUses`: how often requests have used the prefixes that a `PrefixIndex` knows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from heapq import nlargest

from sagellm.control_plane.router._tree import Edge
from sagellm.control_plane.router.prefix_index import PrefixIndex
from sagellm.core.clock import Clock
from sagellm.core.types import TOKEN_BYTES, Namespace, Tokens

MEMORY_S = 30.0
"""A use counts e times as little after so long (exponential decay)."""
MAX_PREFIXES = 4096


@dataclass(slots=True)
class _Uses:
    """`count` of an edge at `at_s`. `namespace`: of the last request that used it."""

    count: float
    at_s: float
    namespace: Namespace

    def now(self, now_s: float) -> float:
        return self.count * math.exp((self.at_s - now_s) / MEMORY_S)


class PrefixUses:
    """Counts by edge of the index's tree. An edge ends where prompts part, so it is a prefix that is shared.

    At most `MAX_PREFIXES` are remembered, those that were used most.
    """

    def __init__(self, index: PrefixIndex, clock: Clock) -> None:
        self._index, self._clock = index, clock
        self._uses: dict[int, _Uses] = {}

    def __len__(self) -> int:
        return len(self._uses)

    def count(self, tokens: Tokens, namespace: Namespace, indexed: Namespace) -> None:
        """A request with this prompt was placed. `indexed`: the namespace by which the index knows its KV."""
        now_s = self._clock.now()
        for edge in self._index.whole_edges(tokens, indexed):
            uses = self._uses.get(edge.number)
            count = 1.0 if uses is None else uses.now(now_s) + 1.0
            self._uses[edge.number] = _Uses(count, now_s, namespace)
        if len(self._uses) > MAX_PREFIXES:
            most = nlargest(MAX_PREFIXES // 2, self._uses.items(), key=lambda item: item[1].now(now_s))
            self._uses = dict(most)

    def most_used(self, least_per_s: float) -> list[tuple[Edge, float]]:
        """Edges, and how often each was used per second lately. `least_per_s` or more."""
        now_s, found = self._clock.now(), []
        for number, uses in list(self._uses.items()):
            edge = self._index.edge(number)
            if edge is None:
                del self._uses[number]
            elif (per_s := uses.now(now_s) / MEMORY_S) >= least_per_s:
                found.append((edge, per_s))
        return found

    def namespace(self, edge: Edge) -> Namespace:
        """Of the last request that used this edge."""
        return self._uses[edge.number].namespace


def prefix_tokens(edge: Edge) -> Tokens:
    """The tokens from the beginning to the end of an edge."""
    pieces, above = [], edge
    while above.parent is not None:
        pieces.append(bytes(above.tokens))
        above = above.parent
    return Tokens.frombytes(b"".join(reversed(pieces)))


def num_prefix_tokens(edge: Edge) -> int:
    """How many these are."""
    return edge.end * edge.block_bytes // TOKEN_BYTES


def device_holders(edge: Edge) -> int:
    """Bitmask of the instances that have all of that prefix in device memory."""
    mask, above = edge.device.full, edge.parent
    while above is not None and above.parent is not None and mask:
        mask &= above.device.full
        above = above.parent
    return mask
