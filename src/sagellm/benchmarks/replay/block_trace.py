"""`BlockTrace`: a trace for replay, whose prompts are lists of numbered blocks."""

from __future__ import annotations

import itertools
from array import array
from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

from sagellm.benchmarks.traces import Trace, TraceRequest, block_size
from sagellm.benchmarks.traces.record import infinite_cache_hits
from sagellm.core.errors import ConfigError
from sagellm.core.types import TOKEN_BYTES, Namespace, Tokens


@dataclass(frozen=True, slots=True)
class BlockTrace:
    """Requests whose ids are block numbers; a block has `block_tokens` tokens.

    Two blocks have the same number if all tokens up to the block's end are equal. `num_blocks`: of all
    prompts, partial last blocks included. `num_unique`: different blocks, those of two namespaces counted
    twice. `bound`: hits of each request in a cache that never evicts. `across_namespaces`: whether equal
    numbers in two namespaces mean equal blocks.
    """

    name: str
    format: str
    sha256: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]
    num_blocks: int
    num_unique: int
    bound: array[int]
    across_namespaces: bool

    @property
    def infinite_ratio(self) -> float:
        """Share of all blocks that a cache which never evicts finds."""
        return sum(self.bound) / self.num_blocks

    @property
    def longest(self) -> int:
        """Blocks of the longest prompt."""
        return max(len(request.ids) for request in self.requests)

    def counts(self) -> dict[str, float]:
        """The trace's size and the upper bound of every hit ratio, for result files."""
        return {
            "requests": len(self.requests),
            "blocks": self.num_blocks,
            "unique_blocks": self.num_unique,
            "infinite_cache_ratio": self.infinite_ratio,
        }

    def bound_at(self, capacity: int) -> array[int]:
        """Returns `bound` for prompts that are cut to `capacity` blocks."""
        return self.bound if capacity >= self.longest else infinite_cache_hits(self.requests, capacity)


def block_trace(trace: Trace, block_tokens: int | None = None) -> BlockTrace:
    """Numbers the blocks of a trace. `block_tokens` is the block size for a trace of tokens, by default
    16. Raises `ConfigError` for a trace that has lengths only."""
    size = block_size(trace, block_tokens)
    numbered = _by_tokens(trace, size) if trace.block_tokens == 1 else _by_ids(trace)
    requests = tuple(
        replace(request, ids=ids, meta={}) for request, ids in zip(trace.requests, numbered, strict=True)
    )
    unique: defaultdict[Namespace, set[int]] = defaultdict(set)
    for request in requests:
        unique[request.namespace].update(request.ids)
    num_blocks = sum(len(request.ids) for request in requests)
    if not num_blocks:
        raise ConfigError(
            f"trace {trace.name!r} ({trace.format}) says how long prompts are, not what they share: replay "
            "needs block ids or tokens, as in the formats sagellm, mooncake, coding_agents and lmcache_agents"
        )
    return BlockTrace(
        name=trace.name,
        format=trace.format,
        sha256=trace.sha256,
        block_tokens=size,
        requests=requests,
        num_blocks=num_blocks,
        num_unique=sum(map(len, unique.values())),
        bound=infinite_cache_hits(requests),
        across_namespaces=trace.block_tokens == 1,
    )


def _by_ids(trace: Trace) -> Iterator[Tokens]:
    """Ids are comparable within one namespace only: no number occurs in two."""
    numbers: defaultdict[tuple[Hashable, int], int] = defaultdict(itertools.count().__next__)
    for request in trace.requests:
        above: Hashable = request.namespace
        yield Tokens([above := numbers[above, block] for block in request.ids])


def _by_tokens(trace: Trace, size: int) -> Iterator[Tokens]:
    """Tokens mean the same in all namespaces."""
    numbers: defaultdict[tuple[int, bytes], int] = defaultdict(itertools.count().__next__)
    step = size * TOKEN_BYTES
    for request in trace.requests:
        data, above = request.ids.tobytes(), -1
        starts = range(0, len(data), step)
        yield Tokens([above := numbers[above, data[start : start + step]] for start in starts])
