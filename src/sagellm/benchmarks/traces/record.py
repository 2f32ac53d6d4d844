"""The common form of every trace, and the numbers of its blocks."""

from __future__ import annotations

import itertools
from array import array
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from sagellm.core.errors import ConfigError
from sagellm.core.types import TOKEN_BYTES, Namespace, Tokens

DEFAULT_BLOCK_TOKENS = 16
"""The default for a trace of tokens, which has no blocks of its own."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace. `time_s`: arrival, seconds since the trace's start. `ids`: one per block of
    the trace's `block_tokens` prompt tokens, or the tokens themselves if that is 1; empty if the format
    has lengths only. Ids are comparable within `namespace` only. `meta`: further fields of the format."""

    time_s: float
    ids: Tokens
    namespace: Namespace
    num_input_tokens: int
    num_output_tokens: int
    session: str | None = None
    tenant: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BadLine:
    """A skipped line. `number` is in the decompressed file, from 1 on."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of time. Those of the same moment in the order of the file. `sha256`: of the
    file's decompressed bytes, in hexadecimal; empty for a trace without a file."""

    name: str
    format: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]
    sha256: str = ""
    skipped: tuple[BadLine, ...] = ()


def block_size(trace: Trace, block_tokens: int | None = None) -> int:
    """Tokens per block: the trace's own. For a trace of tokens `block_tokens`, by default 16. Raises
    `ConfigError` for another size than that of the trace's ids."""
    if trace.block_tokens == 1:
        size = DEFAULT_BLOCK_TOKENS if block_tokens is None else block_tokens
        if size < 1:
            raise ConfigError(f"block_tokens must be at least 1, got {size}")
        return size
    if block_tokens not in (None, trace.block_tokens):
        raise ConfigError(
            f"an id of trace {trace.name!r} stands for {trace.block_tokens} tokens: blocks of {block_tokens} "
            "tokens cannot be made of it"
        )
    return trace.block_tokens


def block_ids(trace: Trace, block_tokens: int | None = None) -> Iterator[list[int]]:
    """Yields for each request the numbers of its blocks, in order of position. Numbers are consecutive in
    order of first appearance. They are equal if namespace and id are equal; in a trace of tokens, if the
    namespace and all tokens up to the block's end are. A last block may be partial."""
    step = block_size(trace, block_tokens) * TOKEN_BYTES
    fresh = itertools.count().__next__
    by_namespace: defaultdict[Namespace, defaultdict[int, int]] = defaultdict(lambda: defaultdict(fresh))
    by_path: defaultdict[tuple[Hashable, bytes], int] = defaultdict(fresh)
    for request in trace.requests:
        if trace.block_tokens > 1:
            numbers = by_namespace[request.namespace]
            yield [numbers[block] for block in request.ids]
            continue
        data, above = request.ids.tobytes(), cast("Hashable", request.namespace)
        starts = range(0, len(data), step)  # a block is identified by the block before it and its bytes
        yield [above := by_path[above, data[start : start + step]] for start in starts]


def infinite_cache_hits(requests: Sequence[TraceRequest], capacity: int | None = None) -> array[int]:
    """Hit blocks of each request in a cache that never evicts. No policy can exceed them. Prompts are cut
    to `capacity` blocks, if given."""
    seen: dict[object, set[int]] = {}
    hits = array("i")
    for request in requests:
        known = seen.setdefault(request.namespace, set())
        ids = request.ids.slice(0, capacity)
        hits.append(next((n for n, block in enumerate(ids) if block not in known), len(ids)))
        known.update(ids)
    return hits
