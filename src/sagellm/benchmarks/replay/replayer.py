"""Replays a trace's requests through the real prefix index, without tensors or service time.

Rules: a cold start; a hit is the leading run of cached blocks; missing blocks are inserted at once, which
evicts exactly that many blocks and none of the request's own; a request longer than the capacity is cut to
it; outputs are not inserted.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from sagellm.benchmarks.traces.record import TraceRequest
from sagellm.core.clock import ManualClock
from sagellm.core.protocols.eviction import Use
from sagellm.core.protocols.prefix_cache import MissCounts, MissObserver, PrefixReuseIndex
from sagellm.core.types import Tokens


@dataclass(frozen=True, slots=True)
class Replayed:
    """The counts and times of one replay. `hits` are blocks per request. `cpu_s` is CPU time of this
    thread, `evict_s` the part inside `evict`. `misses` are missing blocks per request by cause, if causes
    were asked for."""

    hits: array[int]
    num_evicted: int
    cpu_s: float
    evict_s: float
    misses: tuple[MissCounts, ...] = ()


def replay(
    requests: Sequence[TraceRequest],
    index: PrefixReuseIndex,
    clock: ManualClock,
    capacity: int,
    causes: MissObserver | None = None,
) -> Replayed:
    """Drives an empty index of block size 1 with the requests. The index has the clock `clock`. `causes`
    observes each request; it then takes most of the time."""
    longest = max((len(request.ids) for request in requests), default=0)
    ids = array("i", bytes(4 * min(longest, capacity)))  # replay does not use block ids: all are 0
    hits, num_evicted = array("i"), 0
    misses: list[MissCounts] = []
    evict_s, began_s = 0.0, time.thread_time()
    for request in requests:
        tokens = request.ids
        if len(tokens) > capacity:
            tokens = Tokens(tokens.slice(0, capacity))
        clock.advance(max(0.0, request.time_s - clock.now()))
        hit = index.pin(index.lookup(tokens, request.namespace))
        hits.append(hit.num_blocks)
        if causes is not None:
            misses.append(causes.observe(index, tokens, request.namespace, hit.num_blocks))
        short = index.num_cached + len(tokens) - hit.num_blocks - capacity
        if short > 0:
            evict_s -= time.thread_time()
            index.evict(short)
            evict_s += time.thread_time()
            num_evicted += short
        if hit.num_blocks < len(tokens):
            whole = index.insert(tokens, ids[: len(tokens)], request.namespace, pin=True).hit
            index.unpin(hit)
            hit = whole
        index.unpin(hit, Use(request.num_output_tokens, hits[-1]))
    return Replayed(hits, num_evicted, time.thread_time() - began_s, evict_s, tuple(misses))
