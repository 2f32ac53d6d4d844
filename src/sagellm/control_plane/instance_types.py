"""What instances of each type serve, and how an instance changes its type."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType

from sagellm.core.clock import Clock
from sagellm.core.errors import BookkeepingError, ConfigError
from sagellm.core.protocols.router import ExecutionInstance, InstanceType


class Service(Enum):
    """What a request wants of an instance: everything, its prompt, its answer, an embedding."""

    GENERATE = "generate"
    PREFILL = "prefill"
    DECODE = "decode"
    EMBED = "embed"


SERVES: Mapping[InstanceType, frozenset[Service]] = MappingProxyType(
    {
        InstanceType.GENERAL: frozenset({Service.GENERATE}),
        InstanceType.PREFILLING: frozenset({Service.PREFILL}),
        InstanceType.DECODING: frozenset({Service.DECODE}),
        InstanceType.HYBRID: frozenset({Service.GENERATE, Service.PREFILL, Service.DECODE}),
        InstanceType.EMBEDDING: frozenset({Service.EMBED}),
        InstanceType.LLM_EMBEDDING: frozenset({Service.GENERATE, Service.EMBED}),
    }
)
"""What each type is for."""
ALSO_SERVES: Mapping[InstanceType, frozenset[Service]] = MappingProxyType(
    {
        InstanceType.PREFILLING: frozenset({Service.GENERATE}),
        InstanceType.DECODING: frozenset({Service.GENERATE}),
    }
)
"""What a type serves where no instance of the fleet is for it."""


def candidates(instances: Iterable[ExecutionInstance], service: Service) -> list[ExecutionInstance]:
    """The instances that are for a service; without any, those that also serve it."""
    found = list(instances)
    best = [each for each in found if service in SERVES[each.kind]]
    return best or [each for each in found if service in ALSO_SERVES.get(each.kind, ())]


def services_of(kinds: Collection[InstanceType]) -> frozenset[Service]:
    """What a fleet of instances of these types serves."""
    found = [SERVES[kind] | ALSO_SERVES.get(kind, frozenset()) for kind in kinds]
    return frozenset().union(*found)


def serves_answers(kind: InstanceType) -> bool:
    """Whether its main work includes to decode."""
    return bool(SERVES[kind] & {Service.GENERATE, Service.DECODE})


def may_leave(instances: Sequence[ExecutionInstance], instance_id: str) -> bool:
    """Whether the others still serve the whole requests and embeddings that all serve.

    Prefill and decode apart need no instance: the others serve such requests whole.
    """
    needed = services_of([each.kind for each in instances]) & {Service.GENERATE, Service.EMBED}
    rest = services_of([each.kind for each in instances if each.instance_id != instance_id])
    return needed <= rest


class RoleState(Enum):
    """SERVING takes requests. DRAINING takes none, and ends those that its new type does not serve. SWITCHING
    has none of those: its process changes its type."""

    SERVING = "serving"
    DRAINING = "draining"
    SWITCHING = "switching"


class InstanceRole:
    """The type of an instance, and its change: drain, switch, serve.

    The owner gives it no new request unless it `takes_requests`, and calls `poll` with those that are there.
    Requests that the new type does not serve, and that have not ended `drain_timeout_s` after the drain
    began, are named by `poll`: the owner submits them elsewhere, with what they have generated.
    """

    def __init__(
        self, instance_id: str, kind: InstanceType, clock: Clock, *, drain_timeout_s: float = 60.0
    ) -> None:
        self.instance_id, self.kind = instance_id, kind
        self.state = RoleState.SERVING
        self.target = kind
        self._clock, self._drain_timeout_s = clock, drain_timeout_s
        self._drain_ends_s = 0.0

    @property
    def takes_requests(self) -> bool:
        return self.state is RoleState.SERVING

    def change(self, target: InstanceType) -> None:
        """Begin to drain for another type.

        While it drains, another target replaces the first, and the time to drain goes on. Raises
        `ConfigError` once it is switching.
        """
        if self.state is RoleState.SWITCHING:
            raise ConfigError(f"{self.instance_id} is switching: wait until it serves")
        if self.state is RoleState.SERVING:
            self._drain_ends_s = self._clock.now() + self._drain_timeout_s
        self.target, self.state = target, RoleState.DRAINING

    def cancel(self) -> bool:
        """Serve again as before; False if it does not drain (any more)."""
        if self.state is not RoleState.DRAINING:
            return False
        self.target, self.state = self.kind, RoleState.SERVING
        return True

    def poll(self, requests: Mapping[str, Service]) -> list[str]:
        """Go on: from draining to switching when no request is left that must end. `requests`: those here.

        Returns requests to move elsewhere.
        """
        if self.state is not RoleState.DRAINING:
            return []
        served = services_of([self.target])
        left = [request_id for request_id, service in requests.items() if service not in served]
        if not left:
            self.state = RoleState.SWITCHING
            return []
        return left if self._clock.now() >= self._drain_ends_s else []

    def switched(self) -> None:
        """Its process has changed, and serves as `target`. Only after `poll` said so."""
        if self.state is not RoleState.SWITCHING:
            raise BookkeepingError(f"{self.instance_id} is {self.state.value}: it did not switch")
        self.kind, self.state = self.target, RoleState.SERVING

    def check(self) -> None:
        """Raise `BookkeepingError` where it serves, and shall be something else."""
        if self.state is RoleState.SERVING and self.target is not self.kind:
            raise BookkeepingError(f"{self.instance_id} serves as {self.kind} and shall be {self.target}")
