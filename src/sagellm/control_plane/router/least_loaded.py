"""`least_loaded`: the fewest requests, waiting and running."""

from __future__ import annotations

from collections.abc import Sequence

from sagellm.control_plane.router._choosing import ChoosingRouter
from sagellm.core.protocols.router import CachedPrefix, ExecutionInstance, RequestMetadata


class LeastLoadedRouter(ChoosingRouter):
    """Chooses the fewest requests. On ties the most free blocks, then the first."""

    def choose(
        self,
        request: RequestMetadata,
        instances: Sequence[ExecutionInstance],
        cached: Sequence[CachedPrefix],
    ) -> tuple[int, str]:
        chosen = min(
            range(len(instances)),
            key=lambda i: (instances[i].num_requests, -instances[i].num_free_blocks),
        )
        return chosen, f"{instances[chosen].num_requests} requests"


PLUGIN = LeastLoadedRouter
