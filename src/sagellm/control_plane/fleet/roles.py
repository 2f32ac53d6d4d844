"""`RoleSwitches`: instances of a front that change their type, or have changed it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sagellm.control_plane.fleet.members import Member
from sagellm.control_plane.fleet.served import FleetRequest, ServedRequests
from sagellm.control_plane.instance_types import InstanceRole, RoleState
from sagellm.core.clock import Clock
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.fleet import InstanceFacts
from sagellm.core.protocols.router import ExecutionInstance, InstanceType

SWITCHABLE = (InstanceType.GENERAL, InstanceType.PREFILLING, InstanceType.DECODING, InstanceType.HYBRID)


class RoleSwitches:
    """For the front's thread. `move(request, reason)`: have a request go on elsewhere.

    An instance that is started again has the type of the fleet file, and is told the changed one. It keeps
    that while it lives, so a new front finds it in its first report. Only where a front and an instance end
    together, the instance has the file's type again.
    """

    def __init__(
        self, clock: Clock, requests: ServedRequests, move: Callable[[FleetRequest, str], None]
    ) -> None:
        self._clock, self._requests, self._move = clock, requests, move
        self._roles: dict[str, InstanceRole] = {}
        """Of instances that are changing."""
        self._kinds: dict[str, InstanceType] = {}
        """The types of those that are not what their file says."""

    def begin(self, member: Member, kind: InstanceType, drain_timeout_s: float) -> None:
        """Have an instance drain what `kind` does not serve, and be that.

        Raises `ConfigError` for an instance that cannot change now, or not to that.
        """
        name, load = member.client.instance_id, member.load
        if kind not in SWITCHABLE:
            words = ", ".join(each.value for each in SWITCHABLE)
            raise ConfigError(f"an engine cannot serve as {kind.value}: {words}")
        if member.facts is None or load is None:
            raise ConfigError(f"{name} is not connected: wait until it is, and switch it then")
        if not member.facts.transfers and kind is not InstanceType.GENERAL:
            raise ConfigError(f"{name} exchanges no KV with other instances: it can be general alone")
        role = self._roles.get(name) or InstanceRole(
            name, load.kind, self._clock, drain_timeout_s=drain_timeout_s
        )
        role.change(kind)
        self._roles[name] = role

    def is_changing(self, instance_id: str) -> bool:
        """Whether it gets no requests for that. For any thread."""
        return instance_id in self._roles

    def forget(self, instance_id: str) -> None:
        """It has left the fleet. Another of its name has the type of the file."""
        self._roles.pop(instance_id, None)
        self._kinds.pop(instance_id, None)

    def poll(self, members: Mapping[str, Member]) -> None:
        """Move all changes on."""
        for name, role in list(self._roles.items()):
            role.check()
            member = members[name]
            if role.state is RoleState.DRAINING:
                self._drain(role, member)
            elif member.load is not None and member.load.kind is role.target:
                role.switched()
                del self._roles[name]

    def _drain(self, role: InstanceRole, member: Member) -> None:
        reason = f"{role.instance_id} becomes {role.target.value}"
        late = set(role.poll(self._requests.services_on(role.instance_id)))
        for served in self._requests.on(role.instance_id) if late else ():
            if served.request_id in late:
                self._move(served, reason)
        if role.state is RoleState.SWITCHING:
            self._kinds[role.instance_id] = role.target
            member.client.call("set_kind", (role.target,))

    def connected(self, member: Member, facts: InstanceFacts) -> None:
        """Tell an instance that was started again what it has been."""
        kind = self._kinds.get(facts.instance_id)
        if kind is not None and kind is not facts.kind:
            member.client.call("set_kind", (kind,))

    def reported(self, member: Member, load: ExecutionInstance) -> None:
        """Its first report: it may have been changed by a front before this one."""
        if member.load is None and member.facts is not None and load.kind is not member.facts.kind:
            self._kinds.setdefault(load.instance_id, load.kind)
