"""What the simple routers share: one rule, which chooses an instance for each phase."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from sagellm.core.errors import CapacityError
from sagellm.core.protocols.router import (
    CachedPrefix,
    ExecutionInstance,
    InstanceType,
    Placement,
    RequestMetadata,
)


class ChoosingRouter(ABC):
    """Places a request on the instance that `choose` returns; learns nothing.

    Where there are instances for each phase, it chooses twice, and every request is separated.
    """

    reads_cache = False

    @abstractmethod
    def choose(
        self,
        request: RequestMetadata,
        instances: Sequence[ExecutionInstance],
        cached: Sequence[CachedPrefix],
    ) -> tuple[int, str]: ...

    def place(
        self,
        request: RequestMetadata,
        instances: Sequence[ExecutionInstance],
        cached: Sequence[CachedPrefix],
    ) -> Placement:
        prefill, decode = phases(instances)
        names, reasons = [], []
        for places in (prefill, decode) if decode else (prefill,):
            at, reason = self.choose(request, [instances[i] for i in places], [cached[i] for i in places])
            names.append(instances[places[at]].instance_id)
            reasons.append(reason)
        return Placement(names[0], names[-1], "; ".join(reasons))

    def observe(self, instance_id: str, latencies_s: Mapping[str, float]) -> None:  # noqa: B027 - no hook
        """Latencies change nothing."""


def phases(instances: Sequence[ExecutionInstance]) -> tuple[list[int], list[int]]:
    """The places of instances that begin requests, and that go on with them.

    Without any of the second kind the first serve whole requests. Raises `CapacityError` without an
    instance that serves."""
    kinds = [instance.kind for instance in instances]
    prefill = [i for i, kind in enumerate(kinds) if kind is InstanceType.PREFILLING]
    decode = [i for i, kind in enumerate(kinds) if kind is InstanceType.DECODING]
    if prefill and decode:
        return prefill, decode
    found = [i for i, kind in enumerate(kinds) if kind is not InstanceType.EMBEDDING]
    if not found:
        got = f"{len(instances)} that only embed" if instances else "none at all"
        raise CapacityError(f"there is no instance to place a request on, but {got}: start one that serves")
    return found, []
