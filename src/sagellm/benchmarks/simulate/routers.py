"""Chooses the instance that serves a request: routers by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from sagellm.core.errors import CapacityError, UnknownNameError, nearest
from sagellm.core.protocols.router import InstanceLoad, Placement, Router
from sagellm.core.types import Request


class _ChoosingRouter(ABC):
    """Places a request on the instance that `choose` returns, with its reason; learns nothing."""

    @abstractmethod
    def choose(self, loads: Sequence[InstanceLoad]) -> tuple[InstanceLoad, str]: ...

    def place(self, request: Request, loads: Sequence[InstanceLoad]) -> Placement:
        if not loads:
            raise CapacityError("there is no instance to place a request on")
        chosen, reason = self.choose(loads)
        return Placement(chosen.instance_id, chosen.instance_id, reason)

    def observe(self, instance_id: str, latencies_s: Mapping[str, float]) -> None:  # noqa: B027 - no hook
        """Latencies change nothing."""


class RoundRobinRouter(_ChoosingRouter):
    """Chooses the instances in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, loads: Sequence[InstanceLoad]) -> tuple[InstanceLoad, str]:
        chosen = loads[self._turn % len(loads)]
        self._turn += 1
        return chosen, "its turn"


class LeastLoadedRouter(_ChoosingRouter):
    """Chooses the fewest requests, waiting and running. On ties the most free blocks, then the first."""

    def choose(self, loads: Sequence[InstanceLoad]) -> tuple[InstanceLoad, str]:
        chosen = min(loads, key=lambda load: (_requests(load), -load.num_free_blocks))
        return chosen, f"{_requests(chosen)} requests"


class PrefixAwareRouter(_ChoosingRouter):
    """Chooses the longest cached prefix minus the load. On ties the least loaded, then the first. Each
    request of an instance counts as `blocks_per_request` blocks."""

    def __init__(self, blocks_per_request: float = 32.0) -> None:
        self.blocks_per_request = blocks_per_request

    def choose(self, loads: Sequence[InstanceLoad]) -> tuple[InstanceLoad, str]:
        def score(load: InstanceLoad) -> float:
            return load.num_cached_blocks - self.blocks_per_request * _requests(load)

        chosen = max(loads, key=lambda load: (score(load), -_requests(load)))
        return chosen, f"{chosen.num_cached_blocks} blocks cached, {_requests(chosen)} requests"


def _requests(load: InstanceLoad) -> int:
    return load.num_waiting + load.num_running


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
