"""Replays requests through the real prefix index, and measures what the hits are worth.

Rules: a cold start; a hit is the leading run of cached blocks; missing blocks are inserted at once, which
evicts exactly that many blocks and none of the request's own; a request longer than the capacity is cut to
it; outputs are not inserted. There are no tensors and no service time.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from sagellm.benchmarks.replay.block_trace import BlockTrace
from sagellm.benchmarks.traces.record import TraceRequest
from sagellm.core.clock import ManualClock
from sagellm.core.errors import BookkeepingError, ConfigError
from sagellm.core.protocols.eviction import CostBenefitModel, SimpleExtent, Use
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


@dataclass(frozen=True, slots=True)
class HitMeasures:
    """Sums over the requests after the warm-up. A partial last block counts its actual tokens. `saved_s`
    is the prefill time of the hit tokens alone."""

    requests: int
    hit_requests: int
    blocks: int
    hit_blocks: int
    bound_blocks: int
    tokens: int
    hit_tokens: int
    prefill_s: float
    saved_s: float


def measure(trace: BlockTrace, hits: Sequence[int], first: int, cost: CostBenefitModel) -> HitMeasures:
    """Sums from request number `first` on; `cost` is for blocks of one token."""
    requests, counted = trace.requests[first:], hits[first:]
    hit_tokens = [
        min(hit * trace.block_tokens, request.num_input_tokens)
        for request, hit in zip(requests, counted, strict=True)
    ]
    return HitMeasures(
        requests=len(requests),
        hit_requests=sum(hit > 0 for hit in counted),
        blocks=sum(len(request.ids) for request in requests),
        hit_blocks=sum(counted),
        bound_blocks=sum(trace.bound[first:]),
        tokens=sum(request.num_input_tokens for request in requests),
        hit_tokens=sum(hit_tokens),
        prefill_s=sum(_prefill_s(request.num_input_tokens, cost) for request in requests),
        saved_s=sum(_prefill_s(tokens, cost) for tokens in hit_tokens),
    )


def _prefill_s(num_tokens: int, cost: CostBenefitModel) -> float:
    return cost.recompute_s(SimpleExtent(0, num_tokens)) if num_tokens else 0.0


def check_bound(hits: Sequence[int], bound: Sequence[int]) -> None:
    """Raises `BookkeepingError` for the first request with more hits than its bound."""
    if len(hits) != len(bound):
        raise BookkeepingError(f"{len(hits)} requests were replayed of {len(bound)}")
    for number, (hit, most) in enumerate(zip(hits, bound, strict=True)):
        if hit > most:
            raise BookkeepingError(
                f"request {number} reuses {hit} blocks, but a cache that never evicts has only {most}"
            )


def first_counted(trace: BlockTrace, warmup: str) -> int:
    """Returns the number of the first request after a warm-up. A warm-up is a share of the requests
    (`10%`) or seconds from the first request on (`600` or `600s`). Raises `ConfigError` for another text,
    or if no request is left."""
    requests = trace.requests
    try:
        amount = float(warmup[:-1] if warmup.endswith(("%", "s")) else warmup)
        if not amount >= 0:
            raise ValueError
        if warmup.endswith("%"):
            first = int(len(requests) * amount / 100)
        else:
            first = sum(request.time_s < requests[0].time_s + amount for request in requests)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"warm-up {warmup!r}: write a share of the requests as 10%, or seconds") from error
    if first >= len(requests):
        raise ConfigError(f"warm-up {warmup!r} leaves none of {len(requests)} requests to be counted")
    return first
