"""`PhaseQueue`: the requests of one phase that wait for a place.

A front has two: `prefill_queue` holds requests that no instance has begun, `decode_queue` those whose prompt
is computed elsewhere and that wait for a place to go on. The first looks past a request that fits nowhere, as
throughput counts there; the second keeps its order, as clients read these answers already.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import BookkeepingError, CapacityError
from sagellm.core.protocols.router import RequestMetadata


class QueuePhase(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


LOOK_PAST = {QueuePhase.PREFILL: 16, QueuePhase.DECODE: 0}
"""Requests that are passed over in one `drain`, before it ends."""
Order = Callable[[RequestMetadata, float], float]
"""`order(request, arrived_s)`: the smallest goes first."""


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request, since when it waits, and its place in the order."""

    request: RequestMetadata
    since_s: float
    order: float


class PhaseQueue:
    """At most `max_waiting` requests of one phase. All calls take logarithmic time, `drain` for each request
    that leaves or is passed over."""

    def __init__(
        self, phase: QueuePhase, order: Order, *, max_waiting: int = 4096, clock: Clock | None = None
    ) -> None:
        self.phase = phase
        self.max_waiting = max_waiting
        self._order = order
        self._clock = clock or MonotonicClock()
        self._waiting: dict[str, tuple[QueuedRequest, int]] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._next_number = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._waiting

    def push(self, request: RequestMetadata, since_s: float | None = None) -> None:
        """Raises `CapacityError` if the queue is full, `BookkeepingError` if the request waits already."""
        name = request.request_id
        if name in self._waiting:
            raise BookkeepingError(f"request {name!r} waits in the {self.phase.value} queue already")
        if len(self._waiting) >= self.max_waiting:
            raise CapacityError(
                f"the {self.phase.value} queue is full with {self.max_waiting} requests: try again later",
                name,
            )
        since_s = self._clock.now() if since_s is None else since_s
        entry = QueuedRequest(request, since_s, self._order(request, since_s))
        self._waiting[name] = entry, self._next_number
        heapq.heappush(self._heap, (entry.order, self._next_number, name))
        self._next_number += 1
        self.num_tokens += len(request.tokens)

    def remove(self, request_id: str) -> bool:
        """Take a request out; False if it does not wait here."""
        found = self._waiting.pop(request_id, None)
        if found is None:
            return False
        self.num_tokens -= len(found[0].request.tokens)
        if len(self._heap) > 2 * len(self._waiting) + 64:
            self._heap = [(entry.order, number, name) for name, (entry, number) in self._waiting.items()]
            heapq.heapify(self._heap)
        return True

    def drain(self, place: Callable[[QueuedRequest], bool]) -> int:
        """Offer requests in order; those for which `place` returns true leave. Returns how many did. Ends
        when as many were passed over as the phase allows, plus one."""
        passed: list[tuple[float, int, str]] = []
        placed = 0
        try:
            while self._heap and len(passed) <= LOOK_PAST[self.phase]:
                entry = heapq.heappop(self._heap)
                found = self._waiting.get(entry[2])
                if found is None or found[1] != entry[1]:
                    continue  # it was removed
                passed.append(entry)
                if place(found[0]):
                    passed.pop()
                    self.remove(entry[2])
                    placed += 1
        finally:
            for entry in passed:
                if entry[2] in self._waiting:
                    heapq.heappush(self._heap, entry)
        return placed

    def check(self) -> None:
        """Raise `BookkeepingError` where the heap and the requests contradict each other."""
        live = {
            (order, number, name)
            for order, number, name in self._heap
            if name in self._waiting and self._waiting[name][1] == number
        }
        if live != {(entry.order, number, name) for name, (entry, number) in self._waiting.items()}:
            raise BookkeepingError(f"the {self.phase.value} queue has lost a request")
        if self.num_tokens != sum(len(entry.request.tokens) for entry, _ in self._waiting.values()):
            raise BookkeepingError(f"the {self.phase.value} queue does not count its tokens")
        if len(self._waiting) > self.max_waiting:
            raise BookkeepingError(f"the {self.phase.value} queue has more than {self.max_waiting} requests")
