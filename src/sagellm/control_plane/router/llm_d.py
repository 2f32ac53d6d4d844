"""`llm_d`: llm-d's rule, to stay with the prefix until its instance is saturated.

llm-d/llm-d-router, `prefix-cache-affinity-filter` and `token-load-scorer` (READMEs of 2026-09), as its guide
"optimized baseline" joins them:

1. keep the instances that have at least `affinity_threshold` of the prompt cached, if there are any;
2. drop that restriction if the least loaded of them would give the first token more than `max_ttft_penalty_s`
   later than the least loaded of the others, at `peak_prefill_tokens_per_s`;
3. of those kept, take the fewest uncached tokens: those in flight there, and this request's.
"""

from __future__ import annotations

from collections.abc import Sequence

from sagellm.control_plane.router._choosing import ChoosingRouter
from sagellm.control_plane.router._history import PlacedLoad
from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.router import CachedPrefix, ExecutionInstance, Placement, RequestMetadata


class LlmDRouter(ChoosingRouter):
    """Defaults are llm-d's. Its throughput is that of Qwen 32B on two H100: measure yours."""

    reads_cache = True

    def __init__(
        self,
        affinity_threshold: float = 0.8,
        max_ttft_penalty_s: float = 18.0,
        peak_prefill_tokens_per_s: float = 15_928.0,
        clock: Clock | None = None,
    ) -> None:
        if not peak_prefill_tokens_per_s > 0:
            raise ConfigError("peak_prefill_tokens_per_s is the speed of one instance: a number above 0")
        self._threshold = affinity_threshold
        self._max_penalty_tokens = max_ttft_penalty_s * peak_prefill_tokens_per_s
        self._placed = PlacedLoad(clock or MonotonicClock())

    def place(
        self,
        request: RequestMetadata,
        instances: Sequence[ExecutionInstance],
        cached: Sequence[CachedPrefix],
    ) -> Placement:
        placement = super().place(request, instances, cached)
        for instance, prefix in zip(instances, cached, strict=True):
            if instance.instance_id == placement.prefill:
                uncached = max(0, len(request.tokens) - prefix.num_device_tokens)
                self._placed.add(placement.prefill, uncached)
        return placement

    def choose(
        self,
        request: RequestMetadata,
        instances: Sequence[ExecutionInstance],
        cached: Sequence[CachedPrefix],
    ) -> tuple[int, str]:
        num_tokens = len(request.tokens)
        in_flight = [instance.num_queued_tokens + self._placed.of(instance)[1] for instance in instances]
        kept = [
            i for i, prefix in enumerate(cached) if prefix.num_device_tokens >= self._threshold * num_tokens
        ]
        others = sorted(set(range(len(instances))) - set(kept)) if kept else []
        reason = "prefix" if kept else "load"
        if others and self._max_penalty_tokens:
            late = min(in_flight[i] for i in kept) - min(in_flight[i] for i in others)
            if late > self._max_penalty_tokens:
                kept, reason = [], "saturated"
        chosen = min(
            kept or range(len(instances)),
            key=lambda i: in_flight[i] + max(0, num_tokens - cached[i].num_device_tokens),
        )
        return (
            chosen,
            f"{reason}: {cached[chosen].num_device_tokens} tokens cached, {in_flight[chosen]} ahead",
        )


PLUGIN = LlmDRouter
