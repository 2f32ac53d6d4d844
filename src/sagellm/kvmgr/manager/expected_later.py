"""`ExpectedLater`: which prefixes are expected later, and from when on to prepare for each."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from typing import NamedTuple, TypeAlias

from sagellm.core.errors import BookkeepingError
from sagellm.core.types import Account, Namespace, Tokens

Prefix: TypeAlias = tuple[Namespace, bytes]
"""What two equal prefixes have in common: the namespace and the tokens' bytes."""


def prefix_of(tokens: Tokens, namespace: Namespace) -> Prefix:
    return namespace, tokens.tobytes()


class Expected(NamedTuple):
    """A prefix to prepare for from `due_s` on; `account` pays for what is loaded."""

    due_s: float
    tokens: Tokens
    namespace: Namespace
    account: Account


class ExpectedLater:
    """Holds prefixes until they are due, each once.

    Together at most `max_prefixes`, with at most `max_tokens` tokens: of more, those that are due last are
    dropped.
    """

    def __init__(self, max_prefixes: int, max_tokens: int) -> None:
        self._max_prefixes, self._max_tokens = max_prefixes, max_tokens
        self._entries: dict[Prefix, Expected] = {}
        self._order: list[tuple[float, Prefix]] = []  # the next one first
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, prefix: Prefix) -> bool:
        return prefix in self._entries

    @property
    def next_s(self) -> float:
        """When the next one is due; infinite without any."""
        return self._order[0][0] if self._order else math.inf

    def add(self, expected: Expected) -> list[Expected]:
        """Expect a prefix, in place of what was said of it before.

        Returns those that are dropped for it, maybe itself.
        """
        prefix, dropped = prefix_of(expected.tokens, expected.namespace), []
        self.forget(prefix)
        insort(self._order, (expected.due_s, prefix))
        self._entries[prefix] = expected
        self._num_tokens += len(expected.tokens)
        while len(self._order) > self._max_prefixes or self._num_tokens > self._max_tokens:
            dropped.append(self._entries[self._order[-1][1]])
            self.forget(self._order[-1][1])
        return dropped

    def forget(self, prefix: Prefix) -> None:
        """Nothing happens if it is not expected."""
        entry = self._entries.pop(prefix, None)
        if entry is not None:
            self._num_tokens -= len(entry.tokens)
            del self._order[bisect_left(self._order, (entry.due_s, prefix))]

    def take_due(self, now_s: float) -> list[Expected]:
        """Those that are due, which are not held any more."""
        due = []
        while self.next_s <= now_s:
            due.append(self._entries[self._order[0][1]])
            self.forget(self._order[0][1])
        return due

    def check(self) -> None:
        """Raise `BookkeepingError` where order, entries and bounds disagree."""
        if self._order != sorted((entry.due_s, prefix) for prefix, entry in self._entries.items()):
            raise BookkeepingError("prefixes that are expected later are not in their order")
        num_tokens = sum(len(entry.tokens) for entry in self._entries.values())
        if num_tokens != self._num_tokens or num_tokens > self._max_tokens:
            raise BookkeepingError(f"{num_tokens} tokens are expected later, {self._num_tokens} are counted")
        if len(self._order) > self._max_prefixes:
            raise BookkeepingError(f"{len(self._order)} prefixes are expected later")
