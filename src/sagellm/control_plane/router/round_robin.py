"""`round_robin`: the instances in turn."""

from __future__ import annotations

from collections.abc import Sequence

from sagellm.control_plane.router._choosing import ChoosingRouter
from sagellm.core.protocols.router import CachedPrefix, ExecutionInstance, InstanceType, RequestMetadata


class RoundRobinRouter(ChoosingRouter):
    """Chooses the instances in turn, those of each phase by themselves."""

    def __init__(self) -> None:
        self._turns: dict[InstanceType, int] = {}

    def choose(
        self,
        request: RequestMetadata,
        instances: Sequence[ExecutionInstance],
        cached: Sequence[CachedPrefix],
    ) -> tuple[int, str]:
        phase = instances[0].kind
        turn = self._turns.get(phase, 0)
        self._turns[phase] = turn + 1
        return turn % len(instances), "its turn"


PLUGIN = RoundRobinRouter
