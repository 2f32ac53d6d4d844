"""Chooses the instance that serves a request: routers by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sagellm.core.errors import CapacityError, UnknownNameError, nearest
from sagellm.core.protocols.router import InstanceLoad, Placement, Router
from sagellm.core.types import Request


class RoundRobinRouter:
    """Chooses the instances in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def place(self, request: Request, loads: Sequence[InstanceLoad]) -> Placement:
        _check(loads)
        chosen = loads[self._turn % len(loads)]
        self._turn += 1
        return _placed(chosen, "its turn")

    def observe(self, instance_id: str, latencies_s: Mapping[str, float]) -> None:
        """Latencies change nothing."""


class LeastLoadedRouter:
    """Chooses the fewest requests, waiting and running. On ties the most free blocks, then the first."""

    def place(self, request: Request, loads: Sequence[InstanceLoad]) -> Placement:
        _check(loads)
        chosen = min(loads, key=lambda load: (_requests(load), -load.num_free_blocks))
        return _placed(chosen, f"{_requests(chosen)} requests")

    def observe(self, instance_id: str, latencies_s: Mapping[str, float]) -> None:
        """Latencies change nothing."""


class PrefixAwareRouter:
    """Chooses the longest cached prefix minus the load. On ties the least loaded, then the first. Each
    request of an instance counts as `blocks_per_request` blocks."""

    def __init__(self, blocks_per_request: float = 32.0) -> None:
        self.blocks_per_request = blocks_per_request

    def place(self, request: Request, loads: Sequence[InstanceLoad]) -> Placement:
        _check(loads)
        chosen = max(loads, key=lambda load: (self._score(load), -_requests(load)))
        return _placed(chosen, f"{chosen.num_cached_blocks} blocks cached, {_requests(chosen)} requests")

    def observe(self, instance_id: str, latencies_s: Mapping[str, float]) -> None:
        """Latencies change nothing."""

    def _score(self, load: InstanceLoad) -> float:
        return load.num_cached_blocks - self.blocks_per_request * _requests(load)


def _requests(load: InstanceLoad) -> int:
    return load.num_waiting + load.num_running


def _placed(load: InstanceLoad, reason: str) -> Placement:
    return Placement(load.instance_id, load.instance_id, reason)


def _check(loads: Sequence[InstanceLoad]) -> None:
    if not loads:
        raise CapacityError("there is no instance to place a request on")


ROUTERS: Mapping[str, Callable[[], Router]] = {
    "round-robin": RoundRobinRouter,
    "least-loaded": LeastLoadedRouter,
    "prefix-aware": PrefixAwareRouter,
}


def make_router(name: str) -> Router:
    """Returns a new router; raises `UnknownNameError` with the known names."""
    if name not in ROUTERS:
        raise UnknownNameError(f"unknown router {name!r}.{nearest(name, ROUTERS)}")
    return ROUTERS[name]()
