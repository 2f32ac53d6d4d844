"""Contract of the router: which instance serves a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from sagellm.core.types import Request


@dataclass(frozen=True, slots=True)
class InstanceLoad:
    """A router's view of an instance: queue, running requests, free and cached blocks."""

    instance_id: str
    num_waiting: int
    num_running: int
    num_free_blocks: int
    num_cached_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """Prefill and decode instance (equal when not separated) and why."""

    prefill: str
    decode: str
    reason: str = ""


class Router(Protocol):
    def place(self, request: Request, loads: Sequence[InstanceLoad]) -> Placement:
        """Choose among `loads`; raises `CapacityError` if it is empty."""

    def observe(self, instance_id: str, latencies_s: Mapping[str, float]) -> None:
        """Learn from a finished request: ttft, tpot, e2e."""
