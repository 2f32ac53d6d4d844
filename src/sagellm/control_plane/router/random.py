"""`random`: any instance, drawn by seed."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from sagellm.control_plane.router._choosing import ChoosingRouter
from sagellm.core.protocols.router import CachedPrefix, ExecutionInstance, RequestMetadata


class RandomRouter(ChoosingRouter):
    """Chooses each instance with the same probability."""

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)

    def choose(
        self,
        request: RequestMetadata,
        instances: Sequence[ExecutionInstance],
        cached: Sequence[CachedPrefix],
    ) -> tuple[int, str]:
        return self._random.randrange(len(instances)), "drawn"


PLUGIN = RandomRouter
