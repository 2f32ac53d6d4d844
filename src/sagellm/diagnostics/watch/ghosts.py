"""`GhostStack`: evicted blocks in the order in which LRU would still hold them.

LRU is a stack algorithm (Mattson, Gecsei, Slutz and Traiger 1970): a cache of C + d blocks holds what one of
C blocks holds, and the last d blocks that this one evicted. So the depth of an evicted block at its next use
tells how much more memory would have kept it, and no hit has to be seen for that.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

import numpy as np

from sagellm.core.errors import BookkeepingError, ConfigError

Key = TypeVar("Key", bound=Hashable)
CHUNK = 1024
"""Places whose ghosts are one integer of bits and one count."""
LEAST_AT_RISK = 0.1
"""Share of the tokens that must be known to be deeper before a depth is believed."""


class DepthCurve:
    """How many tokens are at most so deep in a stack.

    `depths`: tokens by their depth; `beyond`: tokens of which only a depth is known that they exceed, since
    the server evicted before it was watched. These are taken to be as deep as the others that exceed it
    (product-limit estimate; Kaplan and Meier 1958). `known_until`: the depth up to which enough tokens were
    seen; what is deeper counts as out of reach.
    """

    def __init__(self, depths: Mapping[int, float], beyond: Mapping[int, float]) -> None:
        places = sorted(depths.keys() | beyond.keys())
        self._depths = np.array(places, dtype=np.int64)
        ended = np.array([depths.get(depth, 0.0) for depth in places])
        self.known_until = math.inf
        if not beyond:
            self._within = np.cumsum(ended)
            return
        left = np.cumsum(ended + [beyond.get(depth, 0.0) for depth in places])
        at_risk = left[-1] - np.concatenate(([0.0], left[:-1]))
        deeper = np.cumprod(1.0 - ended / np.maximum(at_risk, 1e-9))
        end = int((at_risk >= LEAST_AT_RISK * left[-1]).sum())  # they fall with the depth
        deeper[end:] = deeper[end - 1]
        self.known_until = float(places[end - 1])
        self._within = left[-1] * (1.0 - deeper)

    def within(self, limit: float) -> float:
        """Tokens that are at most that deep."""
        place = int(np.searchsorted(self._depths, limit, side="right"))
        return float(self._within[place - 1]) if place else 0.0


class GhostStack(Generic[Key]):
    """Evicted blocks, the last one on top.

    There are at most `max_ghosts`; then the bottom one is forgotten.
    `push` and `pop` take O(1), and `depth` sums one number for each `CHUNK` places above the block: 2 us for
    two million ghosts. A ghost takes about 200 bytes, key included."""

    def __init__(self, max_ghosts: int) -> None:
        if max_ghosts < 1:
            raise ConfigError(f"max_ghosts must be at least 1, got {max_ghosts}")
        self._max_ghosts = max_ghosts
        self._places: dict[Key, int] = {}  # in order of place: the first one is the bottom
        self._next_place = 0
        self._bits: list[int] = []
        self._counts = np.zeros(64, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: Key) -> bool:
        return key in self._places

    def push(self, key: Key) -> Key | None:
        """Put a block on top, which must not be in the stack. Returns the block that is forgotten for it."""
        if key in self._places:
            raise BookkeepingError(f"block {key!r} is evicted twice")
        forgotten = None
        if len(self._places) == self._max_ghosts:
            forgotten = next(iter(self._places))
            self.pop(forgotten)
        if self._next_place >= 4 * max(CHUNK, len(self._places)):
            self._close_ranks()
        chunk, offset = divmod(self._next_place, CHUNK)
        if chunk == len(self._bits):
            self._bits.append(0)
            if chunk == len(self._counts):
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._bits[chunk] |= 1 << offset
        self._counts[chunk] += 1
        self._places[key] = self._next_place
        self._next_place += 1
        return forgotten

    def pop(self, key: Key) -> bool:
        """Take a block out; returns whether it was there."""
        place = self._places.pop(key, None)
        if place is None:
            return False
        chunk, offset = divmod(place, CHUNK)
        self._bits[chunk] ^= 1 << offset
        self._counts[chunk] -= 1
        return True

    def depth(self, key: Key) -> int | None:
        """How many blocks are above this one. None: it is not there."""
        place = self._places.get(key)
        if place is None:
            return None
        chunk, offset = divmod(place, CHUNK)
        above = int(self._counts[chunk + 1 : len(self._bits)].sum())
        return above + (self._bits[chunk] >> offset + 1).bit_count()

    def clear(self) -> None:
        self._places.clear()
        self._close_ranks()

    def _close_ranks(self) -> None:
        """Number the places anew, without those that were left."""
        keys = list(self._places)
        self._places = {key: place for place, key in enumerate(keys)}
        self._next_place = len(keys)
        whole, rest = divmod(len(keys), CHUNK)
        self._bits = [(1 << CHUNK) - 1] * whole + ([(1 << rest) - 1] if rest else [])
        self._counts = np.zeros(max(64, 2 * len(self._bits)), dtype=np.int64)
        self._counts[: len(self._bits)] = [bits.bit_count() for bits in self._bits]

    def check(self) -> None:
        """Raise `BookkeepingError` unless bits, counts and places agree."""
        places = list(self._places.values())
        if places != sorted(places) or len(places) > self._max_ghosts:
            raise BookkeepingError("ghosts are out of order, or too many")
        marked = [
            chunk * CHUNK + offset
            for chunk, bits in enumerate(self._bits)
            for offset in range(CHUNK)
            if bits >> offset & 1
        ]
        counts = [bits.bit_count() for bits in self._bits]
        told = self._counts.tolist()
        if marked != places or counts != told[: len(counts)] or any(told[len(counts) :]):
            raise BookkeepingError("the bits of ghosts do not agree with their places")
