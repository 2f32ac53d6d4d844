"""What a router has placed on instances that their last reports do not show yet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from sagellm.core.clock import Clock
from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.router import ExecutionInstance

MOST_KEPT = 4096
"""Placements on one instance that are counted, should it never report."""


@dataclass(slots=True)
class _Placed:
    """Times and uncached prompt tokens of placements, in order, and their sum."""

    entries: deque[tuple[float, int]] = field(default_factory=deque)
    num_tokens: int = 0

    def drop_first(self) -> None:
        self.num_tokens -= self.entries.popleft()[1]


class PlacedLoad:
    """Placements since each instance's last report.

    Without them, all requests between two reports would go to the instance that had the least load. A
    placement counts until a report that is later than it. An instance that never reports (`reported_s` is 0)
    loses the oldest one with each finished request instead.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._placed: dict[str, _Placed] = {}

    def add(self, instance_id: str, num_tokens: int) -> None:
        placed = self._placed.setdefault(instance_id, _Placed())
        placed.entries.append((self._clock.now(), num_tokens))
        placed.num_tokens += num_tokens
        if len(placed.entries) > MOST_KEPT:
            placed.drop_first()

    def of(self, instance: ExecutionInstance) -> tuple[int, int]:
        """Requests and uncached prompt tokens that its report does not include."""
        placed = self._placed.get(instance.instance_id)
        if placed is None:
            return 0, 0
        entries, reported_s = placed.entries, instance.reported_s
        while entries and entries[0][0] < reported_s:
            placed.drop_first()
        if not entries:
            del self._placed[instance.instance_id]
        return len(entries), placed.num_tokens

    def finished(self, instance_id: str, *, reports: bool) -> None:
        """A request of that instance has ended."""
        placed = self._placed.get(instance_id)
        if placed is not None and placed.entries and not reports:
            placed.drop_first()

    def check(self) -> None:
        """Raise `BookkeepingError` where sums and entries contradict each other."""
        for name, placed in self._placed.items():
            if placed.num_tokens != sum(tokens for _, tokens in placed.entries):
                raise BookkeepingError(f"{name}: the placed tokens do not add up")
