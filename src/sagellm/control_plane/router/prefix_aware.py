"""`prefix_aware`: the longest cached prefix, minus the load."""

from __future__ import annotations

from collections.abc import Sequence

from sagellm.control_plane.router._choosing import ChoosingRouter
from sagellm.core.protocols.router import CachedPrefix, ExecutionInstance, RequestMetadata


class PrefixAwareRouter(ChoosingRouter):
    """Chooses by cached tokens minus `tokens_per_request` for each request of the instance. On ties the
    least loaded, then the first."""

    reads_cache = True

    def __init__(self, tokens_per_request: float = 512.0) -> None:
        self.tokens_per_request = tokens_per_request

    def choose(
        self,
        request: RequestMetadata,
        instances: Sequence[ExecutionInstance],
        cached: Sequence[CachedPrefix],
    ) -> tuple[int, str]:
        def score(i: int) -> tuple[float, int]:
            requests = instances[i].num_requests
            return cached[i].num_device_tokens - self.tokens_per_request * requests, -requests

        chosen = max(range(len(instances)), key=score)
        requests, tokens = instances[chosen].num_requests, cached[chosen].num_device_tokens
        return chosen, f"{tokens} tokens cached, {requests} requests"


PLUGIN = PrefixAwareRouter
