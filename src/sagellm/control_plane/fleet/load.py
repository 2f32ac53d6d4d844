"""`LoadMeter`: what an instance reports of itself, measured from its engine's events."""

from __future__ import annotations

import math
from collections import deque

from sagellm.core.clock import Clock
from sagellm.core.events import BlocksRemoved, EventBus, StepDone
from sagellm.core.protocols.engine import EngineStats
from sagellm.core.protocols.router import ExecutionInstance, InstanceType
from sagellm.core.types import CapabilityDescriptor

WINDOW_S = 2.0
"""Utilization is the share of so many last seconds."""
_MEMORY = 0.9
"""What of a mean stays after one more step. A step of another size thus shows within about ten."""


class LoadMeter:
    """Listens to an engine. `enter` and `leave` count prompt tokens that are not computed."""

    def __init__(self, capability: CapabilityDescriptor, events: EventBus, clock: Clock) -> None:
        self._capability, self._clock = capability, clock
        self._began_s = clock.now()
        self._steps: deque[tuple[float, float]] = deque()
        self._busy_s = 0.0
        self._prefill_token_s = capability.prefill_token_s
        self._step_s = 0.0
        self._num_evicted = 0
        self._queued: dict[str, int] = {}
        self._num_queued_tokens = 0
        self._subscriptions = [
            events.subscribe(StepDone, self._on_step),
            events.subscribe(BlocksRemoved, self._on_removed),
        ]

    def enter(self, request_id: str, num_tokens: int) -> None:
        """A request with so many tokens to compute waits from now on."""
        self._num_queued_tokens += num_tokens - self._queued.get(request_id, 0)
        self._queued[request_id] = num_tokens

    def leave(self, request_id: str) -> None:
        """Its prompt is computed, or it has ended."""
        self._num_queued_tokens -= self._queued.pop(request_id, 0)

    def report(self, instance_id: str, kind: InstanceType, stats: EngineStats) -> ExecutionInstance:
        now_s = self._clock.now()
        self._forget_steps(now_s)
        total = stats.blocks_active + stats.blocks_cached + stats.blocks_free
        window_s = min(WINDOW_S, now_s - self._began_s)
        return ExecutionInstance(
            instance_id,
            kind,
            num_waiting=stats.num_waiting,
            num_running=stats.num_running,
            num_queued_tokens=self._num_queued_tokens,
            num_free_blocks=stats.blocks_free + stats.blocks_cached,
            num_blocks=total,
            block_size=self._capability.block_size,
            max_num_seqs=self._capability.max_num_seqs,
            kv_cache_usage=stats.blocks_active / total if total else 0.0,
            eviction_count=self._num_evicted,
            utilization=min(1.0, self._busy_s / window_s) if window_s > 0 else 0.0,
            prefill_token_s=self._prefill_token_s,
            step_s=self._step_s,
            reported_s=now_s,
        )

    def close(self) -> None:
        for unsubscribe in self._subscriptions:
            unsubscribe()
        self._subscriptions = []

    def _on_step(self, step: StepDone) -> None:
        now_s = self._clock.now()
        self._steps.append((now_s, step.duration_s))
        self._busy_s += step.duration_s
        self._forget_steps(now_s)
        if step.num_prefill_tokens > step.num_decode_tokens:
            self._prefill_token_s = running_mean(
                self._prefill_token_s, step.duration_s / step.num_prefill_tokens
            )
        elif step.num_decode_tokens:
            self._step_s = running_mean(self._step_s, step.duration_s)

    def _forget_steps(self, now_s: float) -> None:
        while self._steps and self._steps[0][0] <= now_s - WINDOW_S:
            self._busy_s -= self._steps.popleft()[1]
        if not self._steps:
            self._busy_s = 0.0

    def _on_removed(self, event: BlocksRemoved) -> None:
        if event.cause != "cleared":
            self._num_evicted += len(event.hashes)


def running_mean(before: float, value: float) -> float:
    """The mean with one more value. What is no time is passed over; the first value is the mean."""
    if not math.isfinite(value) or value < 0:
        return before
    return value if before == 0.0 else _MEMORY * before + (1 - _MEMORY) * value
