"""`CacheAccess`: one request as the cache sees it; `KeptAccesses`: the last ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from sagellm.core.errors import ConfigError
from sagellm.core.types import Tokens

MAX_BLOCK_NUMBERS = 20_000_000
"""Of all requests that are kept together: 80 MB."""


@dataclass(frozen=True, slots=True)
class CacheAccess:
    """The whole blocks of a request from its prompt's first on, numbered.

    Equal numbers are equal prefixes of one namespace. `num_queried` leading blocks are the prompt's, which
    were looked up; those behind are the answer's, which were stored only. `num_hit` leading blocks were in
    the server's cache. `instance`: index of the endpoint. `num_repeated` look-ups of the same blocks came in
    the steps after it: of this request while it waited, or of others with the same prompt.
    """

    time_s: float
    instance: int
    blocks: Tokens
    num_queried: int
    num_hit: int = 0
    num_repeated: int = 0


class KeptAccesses:
    """The last requests: at most `max_block_numbers` blocks of them together.

    `num_block_numbers` are kept, `num_dropped` older requests are not."""

    def __init__(self, max_block_numbers: int = MAX_BLOCK_NUMBERS) -> None:
        if max_block_numbers < 1:
            raise ConfigError(f"max_block_numbers must be at least 1, got {max_block_numbers}")
        self._max = max_block_numbers
        self._accesses: deque[CacheAccess] = deque()
        self.num_block_numbers = 0
        self.num_dropped = 0

    def add(self, access: CacheAccess) -> None:
        """Keep a request."""
        self._accesses.append(access)
        self.num_block_numbers += len(access.blocks)
        while self.num_block_numbers > self._max:
            self.num_block_numbers -= len(self._accesses.popleft().blocks)
            self.num_dropped += 1

    def __len__(self) -> int:
        return len(self._accesses)

    def __iter__(self) -> Iterator[CacheAccess]:
        """The requests in order of their look-ups."""
        return iter(sorted(self._accesses, key=lambda access: access.time_s))
