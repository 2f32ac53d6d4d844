"""What the hits of a replay are worth: blocks, tokens, requests, seconds of prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sagellm.benchmarks.replay.block_trace import BlockTrace
from sagellm.core.errors import BookkeepingError, ConfigError
from sagellm.core.protocols.eviction import CostBenefitModel, SimpleExtent


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
        if warmup.endswith("%"):
            first = int(len(requests) * _not_negative(warmup.removesuffix("%")) / 100)
        else:
            end_s = requests[0].time_s + _not_negative(warmup.removesuffix("s"))
            first = sum(request.time_s < end_s for request in requests)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"warm-up {warmup!r}: write a share of the requests as 10%, or seconds") from error
    if first >= len(requests):
        raise ConfigError(f"warm-up {warmup!r} leaves none of {len(requests)} requests to be counted")
    return first


def _not_negative(text: str) -> float:
    value = float(text)
    if not value >= 0:
        raise ValueError(text)
    return value
