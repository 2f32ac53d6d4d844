"""`PromptLookup`: proposes what followed the last tokens of a request where they came before.

Prompt lookup decoding (Saxena 2023), with an index of n-grams that grows with the tokens in place of a scan
in each step. Good where an answer repeats its prompt or itself: edited code, extraction, quotes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sagellm.core.protocols.speculative import Asked, Proposal
from sagellm.core.types import Request, Tokens


class PromptLookup:
    """Implements `Proposer`: of `max_ngram` to `min_ngram` tokens, the longest known n-gram counts.

    Of its places the last counts. A look-up takes time in the new tokens alone. The index has about 250 bytes
    for each token and length of n-gram.
    """

    def __init__(self, max_ngram: int = 3, min_ngram: int = 2) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(
                f"min_ngram must be from 1 to max_ngram, got min_ngram {min_ngram} and max_ngram {max_ngram}"
            )
        self._lengths = range(max_ngram, min_ngram - 1, -1)
        self._indexes: dict[str, NgramIndex] = {}

    def propose(self, asked: Sequence[Asked]) -> Sequence[Proposal]:
        return [self._behind(*each) for each in asked]

    def _behind(self, request: Request, tokens: Tokens, num_tokens: int) -> Proposal:
        """The tokens behind the place of the last n-gram."""
        index = self._indexes.get(request.request_id)
        if index is None:
            index = self._indexes[request.request_id] = NgramIndex({length: {} for length in self._lengths})
        index.extend(tokens)
        start = index.find(tokens)
        if start is None:
            return Proposal()
        found, period = tokens.slice(start, start + num_tokens), len(tokens) - start
        while len(found) < num_tokens:  # the place reaches the end: the repetition goes on
            found.append(found[-period])
        return Proposal(tuple(found))

    def observe(self, request_id: str, num_accepted: int) -> None:
        """Nothing is learned from it."""

    def forget(self, request: Request, tokens: Tokens) -> None:
        self._indexes.pop(request.request_id, None)

    def close(self) -> None:
        """Nothing is held but memory."""


@dataclass(slots=True)
class NgramIndex:
    """Where the n-grams of one sequence stand.

    `positions`: by length and n-gram, the position behind its last place. It holds those that a token
    follows, up to the first `num_tokens` tokens.
    """

    positions: dict[int, dict[tuple[int, ...], int]]
    num_tokens: int = field(default=0)

    def extend(self, tokens: Tokens) -> None:
        """Take in the tokens behind the first `num_tokens`."""
        for length, places in self.positions.items():
            first = max(length, self.num_tokens)
            new = tokens.slice(first - length)
            ngrams = zip(*(new[i:] for i in range(length)), strict=False)
            places.update(zip(ngrams, range(first, len(tokens)), strict=False))
        self.num_tokens = len(tokens)

    def find(self, tokens: Tokens) -> int | None:
        """The position behind the last place of the n-gram that ends `tokens`, or None."""
        for length, places in self.positions.items():
            found = places.get(tuple(tokens.slice(max(0, len(tokens) - length))))
            if found is not None:
                return found
        return None


PLUGIN = PromptLookup
