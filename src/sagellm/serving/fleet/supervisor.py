"""`Supervisor`: starts the processes of a fleet on this host, again if they end.

It holds the listening socket, so a front that is started again serves the same address, and connections that
are made meanwhile wait. Its children end with it, even by `kill -9`: each reads a pipe from it.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sagellm.control_plane.chip_pool import ChipLease, RequestWork
from sagellm.control_plane.chip_pool.from_fleet import needs_of
from sagellm.control_plane.fleet.keys import FleetKey
from sagellm.control_plane.fleet_instances import (
    FleetInstance,
    api_key,
    fleet_instances,
    instance_config,
    instance_name,
    shared_key,
)
from sagellm.control_plane.router.prefix_index import PrefixIndex
from sagellm.core.clock import MonotonicClock
from sagellm.core.config import Config
from sagellm.core.config_layers import Resolved
from sagellm.core.errors import CapacityError, EngineFailedError
from sagellm.core.processes import ProcessGroup, Role
from sagellm.serving.fleet.chips import host_pool
from sagellm.serving.fleet.policies import make_admission, make_fleet_router, make_replicator

log = logging.getLogger("sagellm.fleet")
FRONT = "front"
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 10.0
STEADY_S = 3.0
"""Only a process that ends sooner is on its way into a loop: between its starts is more and more time."""
MAX_STARTS = 5
"""A front that ends so often in a row, each time within `STEADY_S`, ends the fleet."""
INSTANCE_ENTRY = "sagellm.serving.fleet.instance_process:run"
FRONT_ENTRY = "sagellm.serving.fleet.front_process:run"


@dataclass(slots=True)
class _Process:
    """One process of the fleet, and how often it was started in a row."""

    role: Role
    group: ProcessGroup | None = None
    started_s: float = 0.0
    num_starts: int = 0
    restart_s: float | None = None
    wanted: bool = True
    successor: FleetInstance | None = None
    """Of a process that ends: what is to be started in its place."""


class Supervisor:
    """The fleet of a configuration on this host. `run` serves until `stop`, which any thread may call."""

    def __init__(self, resolved: Resolved, listener: socket.socket) -> None:
        self._resolved, self._listener = resolved, listener
        config = resolved.config
        make_fleet_router(config.fleet, MonotonicClock())
        make_admission(config.fleet, MonotonicClock())
        make_replicator(config.fleet, PrefixIndex(), MonotonicClock())
        given = shared_key(config.fleet)
        self._key = FleetKey.new() if given is None else FleetKey(given)
        self._folder = Path(tempfile.mkdtemp(prefix="sagellm-fleet-"))
        self._processes: dict[str, _Process] = {}
        self._endpoints: dict[str, str] = {}
        self._ended: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._stopping = False
        self._reader, self._writer = os.pipe()
        self._is_complete = False
        try:
            self._pool = host_pool(config.fleet)
            self._know(fleet_instances(config.fleet))
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    @property
    def pids(self) -> dict[str, int]:
        """The process id of each process that runs."""
        return {
            name: process.group.pids[0]
            for name, process in self._processes.items()
            if process.group is not None and process.group.failure is None
        }

    def run(self) -> None:
        """Start all, watch them, and carry out what the front asks for."""
        threading.Thread(target=self._read_commands, name="commands", daemon=True).start()
        for name in list(self._processes):
            self._start(name)
        self._processes[FRONT] = _Process(self._front_role())
        self._start(FRONT)
        try:
            while not self._stopping:
                self._turn()
        finally:
            self._end()

    @property
    def stopping(self) -> bool:
        return self._stopping

    def stop(self) -> None:
        self._stopping = True
        self._ended.put(("", None))

    def _turn(self) -> None:
        now_s = time.monotonic()
        due = [process.restart_s for process in self._processes.values() if process.restart_s is not None]
        try:
            name, what = self._ended.get(timeout=max(0.0, min(due, default=now_s + 1.0) - now_s))
        except queue.Empty:
            name, what = "", None
        if isinstance(what, dict):
            self._carry_out(what)
        elif what is not None:
            self._on_end(name, what)
        for each, process in list(self._processes.items()):
            if process.restart_s is not None and process.restart_s <= time.monotonic():
                self._start(each)

    def _on_end(self, name: str, group: ProcessGroup) -> None:
        process = self._processes.get(name)
        if process is None or process.group is not group or self._stopping:
            return
        process.group = None
        if not process.wanted:
            del self._processes[name]
            self._pool.release(name)
            if process.successor is not None:
                self._add(process.successor)
            return
        now_s = time.monotonic()
        if name == FRONT and not self._is_complete and " failed: " in (group.failure or ""):
            raise EngineFailedError(f"the fleet cannot start: {group.failure}")
        if now_s - process.started_s >= STEADY_S:
            process.num_starts = 0
        if process.num_starts >= MAX_STARTS and name == FRONT:
            raise EngineFailedError(f"the front has ended {MAX_STARTS} times in a row: {group.failure}")
        apart_s = min(FIRST_BACKOFF_S * 2**process.num_starts, LONGEST_BACKOFF_S)
        process.restart_s = max(now_s, process.started_s + apart_s)
        log.warning("%s has ended and is started again in %.1f s", name, process.restart_s - now_s)

    def _start(self, name: str) -> None:
        process = self._processes[name]
        process.restart_s, process.started_s = None, time.monotonic()
        process.num_starts += 1
        role = self._front_role() if name == FRONT else process.role
        group: list[ProcessGroup] = []
        try:
            process.group = ProcessGroup.start([role], lambda _reason: self._ended.put((name, group[0])))
        except OSError as error:  # no process can be made now
            process.restart_s = time.monotonic() + LONGEST_BACKOFF_S
            log.error("%s cannot be started: %s", name, error)
            return
        group.append(process.group)

    # ---------------------------------------------------------------------------- what the front asks for

    def _read_commands(self) -> None:
        with os.fdopen(self._reader, "rb") as commands:
            for line in commands:
                try:
                    self._ended.put((FRONT, json.loads(line)))
                except ValueError:
                    log.warning("a line of the front is no command: %r", line[:100])

    def _carry_out(self, command: Mapping[str, Any]) -> None:
        match command:
            case {"command": "complete"}:
                self._is_complete = True
            case {"command": "restart", "name": str(name)} if name in self._endpoints:
                process = self._processes.get(name)
                if process is not None:
                    process.num_starts = 0
                    if process.group is not None:
                        self._end_soon(name, process.group)
                    else:
                        process.restart_s = time.monotonic()
            case {"command": "start", "group": str(group), "number": int(number)}:
                kind = self._resolved.config.fleet.groups[group].type
                instance = FleetInstance(instance_name(group, number), group, kind)
                former = self._processes.get(instance.name)
                if former is None:
                    self._add(instance)
                elif not former.wanted:
                    former.successor = instance
            case {"command": "end", "name": str(name)} if name in self._processes and name != FRONT:
                process = self._processes[name]
                process.wanted = False
                self._endpoints.pop(name)
                self._tell_front()
                if process.group is not None:
                    self._end_soon(name, process.group)
                else:
                    del self._processes[name]
                    self._pool.release(name)
            case _:
                log.warning("the front asks for what is unknown: %s", dict(command))

    def _end_soon(self, name: str, group: ProcessGroup) -> None:
        """End a process without waiting for it; `_on_end` follows."""

        def end() -> None:
            group.close()
            self._ended.put((name, group))

        threading.Thread(target=end, name=f"end of {name}", daemon=True).start()

    def _tell_front(self) -> None:
        front = self._processes.get(FRONT)
        if front is not None and front.group is not None:
            try:
                front.group.send(json.dumps({"instances": self._endpoints}).encode())
            except (OSError, EngineFailedError, ValueError):
                log.debug("the front has ended; the next one is told at its start")

    # --------------------------------------------------------------------------------------- roles, end

    def _add(self, instance: FleetInstance) -> None:
        """Start one more, unless the host has no place for it."""
        try:
            self._know([instance])
        except CapacityError as error:
            log.warning("%s is not started: %s", instance.name, error)
            return
        self._start(instance.name)
        self._tell_front()

    def _know(self, instances: Sequence[FleetInstance]) -> None:
        """Reserve chips and cores for those that start here. Raises `CapacityError` if not all fit.

        An instance keeps its chips when it is started again, and gives them back when it ends for good.
        """
        needs = needs_of(self._resolved, instances, self._pool, RequestWork())
        assignment = self._pool.assign(needs)
        self._pool.reserve(assignment)
        for name, reason in assignment.reasons.items():
            log.debug("%s has %s", name, reason)
        for lease in assignment.leases:
            cores = f", {len(lease.cores)} CPU cores of its own" if lease.has_own_cores else ""
            log.info("%s runs on %s%s", lease.owner, ", ".join(lease.chips), cores)
        leases = {lease.owner: lease for lease in assignment.leases}
        for instance in instances:
            if instance.server is not None:  # the front speaks to it by itself
                api_key(instance.name, instance.server)
            elif instance.address:
                self._endpoints[instance.name] = instance.address
            else:
                self._processes[instance.name] = self._local(instance, leases[instance.name])

    def _local(self, instance: FleetInstance, lease: ChipLease) -> _Process:
        endpoint = f"ipc://{self._folder}/{instance.name}"
        self._endpoints[instance.name] = endpoint
        config = instance_config(self._resolved, instance.group)
        options = {
            "name": instance.name,
            "kind": instance.type.value,
            "endpoint": endpoint,
            "report_s": self._resolved.config.fleet.heartbeat_s,
            "key": self._key.text,
            "config": _as_json(config),
            "cpus": sorted(lease.cpus),
        }
        return _Process(Role(instance.name, INSTANCE_ENTRY, options, lease.environment))

    def _front_role(self) -> Role:
        options = {
            "config": _as_json(self._resolved.config),
            "key": self._key.text,
            "instances": self._endpoints,
            "listener": self._listener.fileno(),
            "commands": self._writer,
            "is_first": not self._is_complete,
        }
        return Role(FRONT, FRONT_ENTRY, options, files=(self._listener.fileno(), self._writer))

    def _end(self) -> None:
        """The front first: it lets requests end within its grace period. Then the instances, together."""
        self._stopping = True
        grace_s = self._resolved.config.server.shutdown_grace_s + 10.0
        front = self._processes.pop(FRONT, None)
        if front is not None and front.group is not None:
            front.group.ask_to_end(b'{"stop": true}', grace_s)
        groups = [process.group for process in self._processes.values() if process.group is not None]
        threads = [threading.Thread(target=group.close) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os.close(self._writer)
        shutil.rmtree(self._folder, ignore_errors=True)


def _as_json(config: Config) -> dict[str, Any]:
    made: dict[str, Any] = config.model_dump(mode="json")
    return made
