"""`LocalLauncher`: instances as child processes, each on chips and cores of its own."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sagellm.control_plane.chip_pool import RequestWork
from sagellm.control_plane.chip_pool.from_fleet import needs_of
from sagellm.control_plane.fleet.keys import FleetKey
from sagellm.control_plane.fleet_instances import FleetInstance
from sagellm.core.config_layers import Resolved
from sagellm.core.processes import ProcessGroup, Role
from sagellm.serving.fleet.chips import host_pool
from sagellm.serving.fleet.launcher import StartEvents, free_number, instance_options

log = logging.getLogger("sagellm.fleet")
INSTANCE_ENTRY = "sagellm.serving.fleet.instance_process:run"


class LocalLauncher:
    """Implements `Launcher`. Sockets are files in a folder of its own, which `close` removes.

    An instance keeps its chips and its number while it has its place.
    """

    def __init__(self, resolved: Resolved, key: FleetKey) -> None:
        self._resolved, self._key = resolved, key
        self._pool = host_pool(resolved.config.fleet)
        self._roles: dict[str, Role] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="sagellm-fleet-"))

    def reserve(self, instances: Sequence[FleetInstance]) -> None:
        needs = needs_of(self._resolved, instances, self._pool, RequestWork())
        assignment = self._pool.assign(needs)
        self._pool.reserve(assignment)
        for name, reason in assignment.reasons.items():
            log.debug("%s has %s", name, reason)
        leases = {lease.owner: lease for lease in assignment.leases}
        for instance in instances:
            lease = leases[instance.name]
            cores = f", {len(lease.cores)} CPU cores of its own" if lease.has_own_cores else ""
            log.info("%s runs on %s%s", lease.owner, ", ".join(lease.chips), cores)
            number = free_number({role.options["rank"] for role in self._roles.values()})
            options = instance_options(self._resolved, instance, number, self._key)
            options |= {"endpoint": self.endpoint(instance.name), "cpus": sorted(lease.cpus)}
            self._roles[instance.name] = Role(instance.name, INSTANCE_ENTRY, options, lease.environment)

    def release(self, name: str) -> None:
        del self._roles[name]
        self._pool.release(name)

    def endpoint(self, name: str) -> str:
        return f"ipc://{self._folder}/{name}"

    def start(self, instance: FleetInstance, events: StartEvents) -> ProcessGroup:
        return ProcessGroup.start([self._roles[instance.name]], events.on_end)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
