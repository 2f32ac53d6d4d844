"""What instances of each type serve, and how an instance changes its type without losing a request."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType

from sagellm.core.clock import Clock
from sagellm.core.errors import BookkeepingError, ConfigError
from sagellm.core.protocols.router import ExecutionInstance, InstanceType


class Service(Enum):
    """What a request wants of an instance: all of it, its prompt, its answer, or an embedding."""

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
    """Whether the others still serve whole requests and embeddings, if the fleet serves them now.

    Prefill and decode apart need no instance: the others serve such requests whole.
    """
    needed = services_of([each.kind for each in instances]) & {Service.GENERATE, Service.EMBED}
    rest = services_of([each.kind for each in instances if each.instance_id != instance_id])
    return needed <= rest


class RoleState(Enum):
    """SERVING takes requests. DRAINING ends those that it has, and takes none. SWITCHING has none: its
    process changes its type, restarts or ends. STOPPED has ended for good."""

    SERVING = "serving"
    DRAINING = "draining"
    SWITCHING = "switching"
    STOPPED = "stopped"


class InstanceRole:
    """The type of an instance, and the requests on it while it drains.

    One way for a change of type, a restart and a stop: drain, switch, serve. The owner asks `accepts` before
    it submits a request, says `began` and `ended` of each, and calls `poll`. Requests that have not ended
    `drain_timeout_s` after the drain began are named by `poll`: the owner submits them elsewhere, with what
    they have generated, and says `ended` here.
    """

    def __init__(
        self, instance_id: str, kind: InstanceType, clock: Clock, *, drain_timeout_s: float = 60.0
    ) -> None:
        self.instance_id, self.kind = instance_id, kind
        self.state = RoleState.SERVING
        self.target: InstanceType | None = kind
        self._clock, self._drain_timeout_s = clock, drain_timeout_s
        self._drain_ends_s = 0.0
        self._requests: dict[str, Service] = {}

    @property
    def requests(self) -> Mapping[str, Service]:
        """Requests that are here, by id."""
        return dict(self._requests)

    def accepts(self, service: Service) -> bool:
        """Whether a new request may come here; whether a better instance is there, the router asks."""
        served = SERVES[self.kind] | ALSO_SERVES.get(self.kind, frozenset())
        return self.state is RoleState.SERVING and service in served

    def began(self, request_id: str, service: Service) -> None:
        """A request was submitted. Raises `BookkeepingError` if this instance does not accept it."""
        if not self.accepts(service):
            raise BookkeepingError(f"{self.instance_id} is {self.state.value}: it takes no {service.value}")
        if request_id in self._requests:
            raise BookkeepingError(f"{self.instance_id} has request {request_id}")
        self._requests[request_id] = service

    def ended(self, request_id: str) -> bool:
        """A request has ended, failed, or moved elsewhere. False if it is not here: it ended before."""
        return self._requests.pop(request_id, None) is not None

    def change(self, target: InstanceType | None) -> None:
        """Begin to drain for another type, for a restart (the same type), or for the end (None).

        While it drains, another target replaces the first, and the time to drain goes on. Raises
        `ConfigError` once it is switching or stopped.
        """
        if self.state not in (RoleState.SERVING, RoleState.DRAINING):
            raise ConfigError(f"{self.instance_id} is {self.state.value}: wait until it serves")
        if self.state is RoleState.SERVING:
            self._drain_ends_s = self._clock.now() + self._drain_timeout_s
        self.target, self.state = target, RoleState.DRAINING

    def cancel(self) -> bool:
        """Serve again as before; False if it does not drain (any more)."""
        if self.state is not RoleState.DRAINING:
            return False
        self.target, self.state = self.kind, RoleState.SERVING
        return True

    def poll(self) -> list[str]:
        """Go on: from draining to switching when no request is left. Returns requests to move elsewhere."""
        if self.state is not RoleState.DRAINING:
            return []
        if not self._requests:
            self.state = RoleState.SWITCHING
            return []
        return list(self._requests) if self._clock.now() >= self._drain_ends_s else []

    def switched(self) -> None:
        """Its process has changed, and serves as `target`, or has ended. Only after `poll` said so."""
        self._leave_switching()
        if self.target is None:
            self.state = RoleState.STOPPED
        else:
            self.kind, self.state = self.target, RoleState.SERVING

    def not_switched(self) -> None:
        """The change failed: it serves as before."""
        self._leave_switching()
        self.target, self.state = self.kind, RoleState.SERVING

    def died(self) -> list[str]:
        """Its process is gone. Returns the requests that must be submitted elsewhere; none is here then."""
        lost = list(self._requests)
        self._requests.clear()
        self.state = RoleState.STOPPED
        return lost

    def check(self) -> None:
        """Raises `BookkeepingError` where a request is on an instance that cannot serve it."""
        if self._requests and self.state not in (RoleState.SERVING, RoleState.DRAINING):
            raise BookkeepingError(f"{self.instance_id} is {self.state.value} and has {list(self._requests)}")
        if self.state is RoleState.SERVING and self.target is not self.kind:
            raise BookkeepingError(f"{self.instance_id} serves as {self.kind} and shall be {self.target}")

    def _leave_switching(self) -> None:
        if self.state is not RoleState.SWITCHING:
            raise BookkeepingError(f"{self.instance_id} is {self.state.value}: it did not switch")
