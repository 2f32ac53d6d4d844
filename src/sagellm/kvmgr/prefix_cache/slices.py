"""`SliceRegistry`: which runs of a prompt's tokens were in earlier prompts, at any position.

A prompt is cut into slices of `slice_tokens` tokens when it is registered. A later prompt is searched at
every offset with a rolling hash, so text that has moved by any number of tokens is found: all of a repeated
run but less than `slice_tokens` at either end. This is the algorithm of rsync (Tridgell and Mackerras 1996);
LMCache's blending looks chunks up in the same way. Chunks whose borders depend on content (LBFS:
Muthitacharoen et al. 2001) find about as much of the traces we have, but their sizes vary, and blocks of a KV
pool have one size.

It only tells what is equal. The KV of an equal slice behind another prefix is not equal, so nothing of this
enters a prefix index. `engines/approximate.py` copies such KV for requests that ask for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sagellm.core.errors import BookkeepingError, ConfigError
from sagellm.core.types import TOKEN_BYTES, Tokens

_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 1 << 64)
DEFAULT_MAX_SLICES = 1 << 20


class SliceMatch(NamedTuple):
    """Tokens `[start, start + slice_tokens)` of a prompt equal those of a slice.

    `source_start`: where the slice began in the prompt that registered it, and `source`: what `observe` was
    given for that prompt. `slice_id` is unique in a registry.
    """

    start: int
    source_start: int
    slice_id: int
    source: object = None


@dataclass(frozen=True, slots=True)
class _Slice:
    data: bytes
    source_start: int
    slice_id: int
    source: object


class SliceRegistry:
    """Slices of the prompts that were observed, by content.

    It keeps the tokens of at most `max_slices` slices and forgets those that were used longest ago. A prompt
    takes linear time: a hash and at most one comparison of `slice_tokens` tokens at each of its offsets.
    Every match is compared token by token. Two slices of one hash are never mixed up: the second is not kept.
    """

    def __init__(self, slice_tokens: int, max_slices: int = DEFAULT_MAX_SLICES) -> None:
        if slice_tokens < 1 or max_slices < 1:
            raise ConfigError(
                f"slice_tokens and max_slices must be at least 1, got {slice_tokens} and {max_slices}"
            )
        self.slice_tokens = slice_tokens
        self._max_slices = max_slices
        self._slices: dict[int, _Slice] = {}  # the one used longest ago comes first
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._slices)

    def find(self, tokens: Tokens, start: int = 0) -> list[SliceMatch]:
        """Matches in `tokens[start:]` that do not overlap, from left to right. Changes nothing."""
        return [
            SliceMatch(at, known.source_start, known.slice_id, known.source)
            for at, key in self._matches(tokens.tobytes(), window_hashes(tokens, self.slice_tokens), start)
            for known in (self._slices[key],)
        ]

    def observe(self, tokens: Tokens, start: int = 0, source: object = None) -> list[SliceMatch]:
        """Returns what `find` does, then registers the rest of `tokens[start:]`, with `source`.

        Slices of the rest begin where a match ended, and the last may reach into the next match. A run at the
        end that is shorter than a slice is not kept. A prompt finds nothing of its own.
        """
        data, hashes = tokens.tobytes(), window_hashes(tokens, self.slice_tokens)
        found = []
        keys = list(self._matches(data, hashes, start))
        for at, key in keys:
            known = self._slices[key] = self._slices.pop(key)  # used last
            found.append(SliceMatch(at, known.source_start, known.slice_id, known.source))
        for at in _gap_starts([at for at, _ in keys], start, len(hashes), self.slice_tokens):
            own = data[at * TOKEN_BYTES : (at + self.slice_tokens) * TOKEN_BYTES]
            self._add(int(hashes[at]), own, at, source)
        return found

    def forget(self, tokens: Tokens, start: int) -> None:
        """Forget the slice that a match found at `start`: its KV is gone."""
        own = Tokens(tokens.slice(start, start + self.slice_tokens))
        for key in window_hashes(own, self.slice_tokens).tolist():
            if key in self._slices and self._slices[key].data == own.tobytes():
                del self._slices[key]

    def check(self) -> None:
        """Raise `BookkeepingError` for a wrong hash or too many slices."""
        if len(self._slices) > self._max_slices:
            raise BookkeepingError(f"{len(self._slices)} slices are kept, of at most {self._max_slices}")
        for key, known in self._slices.items():
            if window_hashes(Tokens.frombytes(known.data), self.slice_tokens).tolist() != [key]:
                raise BookkeepingError(f"slice {known.slice_id} has another hash than its key")

    def _matches(self, data: bytes, hashes: npt.NDArray[np.uint64], start: int) -> Iterator[tuple[int, int]]:
        """Yields offset and hash of each match."""
        keys, known, size, at = hashes.tolist(), self._slices, self.slice_tokens, start
        while at < len(keys):
            found = known.get(keys[at])
            if found is None or data[at * TOKEN_BYTES : (at + size) * TOKEN_BYTES] != found.data:
                at += 1
                continue
            yield at, keys[at]
            at += size

    def _add(self, key: int, data: bytes, source_start: int, source: object) -> None:
        if key in self._slices:
            return
        if len(self._slices) >= self._max_slices:
            del self._slices[next(iter(self._slices))]
        self._slices[key] = _Slice(data, source_start, self._next_id, source)
        self._next_id += 1


def window_hashes(tokens: Tokens, size: int) -> npt.NDArray[np.uint64]:
    """The hash of each window of `size` tokens, by offset; empty for fewer tokens.

    A polynomial of the tokens in 64 bits (Karp and Rabin 1987), the same at every offset: sums of
    token x base^position up to each position are subtracted, and divided by base^offset.
    """
    values = np.frombuffer(tokens.tobytes(), dtype=np.uint32).astype(np.uint64)
    if len(values) < size:
        return np.empty(0, dtype=np.uint64)
    sums = np.zeros(len(values) + 1, dtype=np.uint64)
    np.cumsum(values * _powers(_BASE, len(values)), out=sums[1:])
    return (sums[size:] - sums[:-size]) * _powers(_INVERSE, len(values) - size + 1)


def _powers(base: int, count: int) -> npt.NDArray[np.uint64]:
    """base^0 to base^(count - 1), modulo 2^64."""
    powers = np.full(count, base, dtype=np.uint64)
    powers[0] = 1
    return np.cumprod(powers, dtype=np.uint64)


def _gap_starts(matches: Sequence[int], start: int, stop: int, size: int) -> Iterator[int]:
    """Offsets below `stop` of slices that cover what lies between matches of `size` tokens."""
    at = start
    for match in (*matches, stop):
        yield from range(at, min(match, stop), size)
        at = match + size
