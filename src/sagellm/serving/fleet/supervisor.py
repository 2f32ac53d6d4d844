"""`Supervisor`: starts the front and the instances of a fleet, again if they end.

It holds the listening socket, so a front that is started again serves the same address, and connections that
are made meanwhile wait. Where instances run is up to a `Launcher`. All ends with the supervisor, even by
`kill -9`: children of this host read a pipe from it, and Ray ends the actors of a driver that is gone.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from sagellm.control_plane.fleet.keys import FleetKey
from sagellm.control_plane.fleet_instances import (
    FleetInstance,
    api_key,
    fleet_instances,
    instance_name,
    shared_key,
)
from sagellm.control_plane.router.prefix_index import PrefixIndex
from sagellm.core.clock import MonotonicClock
from sagellm.core.config_layers import Resolved
from sagellm.core.errors import CapacityError, ConfigError, EngineFailedError
from sagellm.core.processes import ProcessGroup, Role
from sagellm.serving.fleet.launcher import Launcher, Running, StartEvents
from sagellm.serving.fleet.policies import make_admission, make_fleet_router, make_replicator

log = logging.getLogger("sagellm.fleet")
FRONT = "front"
FIRST_BACKOFF_S, LONGEST_BACKOFF_S, SERVED_BACKOFF_S = 0.1, 10.0, 1.0
"""From start to start of a process: at first, at most, and at most if it had come to serve."""
STEADY_S = 3.0
"""Only a process that ends sooner is on its way into a loop: between its starts is more and more time."""
MAX_STARTS = 5
"""A front that ends so often in a row, each time within `STEADY_S`, ends the fleet."""
FRONT_ENTRY = "sagellm.serving.fleet.front_process:run"
MakeLauncher: TypeAlias = Callable[[Resolved, FleetKey], Launcher]


@dataclass(slots=True)
class _Process:
    """One process of the fleet, and how often it was started in a row.

    `instance`: None for the front. `start_id`: of the last start; what is reported of others is passed over.
    """

    instance: FleetInstance | None
    running: Running | None = None
    start_id: int = 0
    started_s: float = 0.0
    num_starts: int = 0
    restart_s: float | None = None
    has_served: bool = False
    """Whether the front says so of the last start."""
    wanted: bool = True
    is_added: bool = False
    """After the start, as by `sagellm fleet scale`: the fleet goes on if there is no place for it."""
    successor: FleetInstance | None = None
    """Of a process that ends: what is to be started in its place."""


class Supervisor:
    """The fleet of a configuration. `run` serves until `stop`, which any thread may call.

    `make_launcher`: `LocalLauncher` or `RayLauncher`. Raises `CapacityError` for instances that have no place
    there.
    """

    def __init__(self, resolved: Resolved, listener: socket.socket, make_launcher: MakeLauncher) -> None:
        self._resolved, self._listener = resolved, listener
        config = resolved.config
        make_fleet_router(config.fleet, MonotonicClock())
        make_admission(config.fleet, MonotonicClock())
        make_replicator(config.fleet, PrefixIndex(), MonotonicClock())
        given = shared_key(config.fleet)
        self._key = FleetKey.new() if given is None else FleetKey(given)
        self._processes: dict[str, _Process] = {}
        self._front: ProcessGroup | None = None
        self._endpoints: dict[str, str] = {}
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stopping = False
        self._reader, self._writer = os.pipe()
        self._start_ids = itertools.count(1)
        self._is_complete = False
        self._launcher = make_launcher(resolved, self._key)
        try:
            self._know(fleet_instances(config.fleet))
        except BaseException:
            self._launcher.close()
            raise

    def run(self) -> None:
        """Start all, watch them, and carry out what the front asks for."""
        threading.Thread(target=self._read_commands, name="commands", daemon=True).start()
        for name in list(self._processes):
            self._start(name)
        self._processes[FRONT] = _Process(None)
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
        self._events.put(None)

    def _turn(self) -> None:
        now_s = time.monotonic()
        due = [process.restart_s for process in self._processes.values() if process.restart_s is not None]
        try:
            event = self._events.get(timeout=max(0.0, min(due, default=now_s + 1.0) - now_s))
        except queue.Empty:
            event = None
        if event is not None:
            event()
        for each, process in list(self._processes.items()):
            if process.restart_s is not None and process.restart_s <= time.monotonic():
                self._start(each)

    def _on_endpoint(self, name: str, start_id: int, endpoint: str) -> None:
        process = self._processes.get(name)
        if process is not None and process.start_id == start_id and process.wanted:
            self._endpoints[name] = endpoint
            self._tell_front({"instances": self._endpoints})

    def _on_refusal(self, name: str, start_id: int, reason: str) -> None:
        """Without a place for it the fleet cannot begin, or goes on without it."""
        process = self._processes.get(name)
        if process is None or process.start_id != start_id or not process.wanted:
            return
        if not process.is_added:
            raise CapacityError(reason)
        log.warning("%s is not started: %s", name, reason)
        process.running = None
        self._give_up(name)

    def _on_end(self, name: str, start_id: int, reason: str) -> None:
        """A start has ended. `reason`: empty where it was asked to."""
        process = self._processes.get(name)
        if process is None or process.start_id != start_id or process.running is None or self._stopping:
            return
        process.running = None
        if reason:
            self._tell_front({"ended": {name: reason}})
        if not process.wanted:
            self._drop(name)
            if process.successor is not None:
                self._add(process.successor)
            return
        now_s = time.monotonic()
        if name == FRONT and not self._is_complete and " failed: " in reason:
            raise EngineFailedError(f"the fleet cannot start: {reason}")
        if now_s - process.started_s >= STEADY_S:
            process.num_starts = 0
        if process.num_starts >= MAX_STARTS and name == FRONT:
            raise EngineFailedError(f"the front has ended {MAX_STARTS} times in a row: {reason}")
        longest_s = SERVED_BACKOFF_S if process.has_served else LONGEST_BACKOFF_S
        apart_s = min(FIRST_BACKOFF_S * 2**process.num_starts, longest_s)
        process.restart_s = max(now_s, process.started_s + apart_s)
        log.warning("%s has ended and is started again in %.1f s", name, process.restart_s - now_s)

    def _start(self, name: str) -> None:
        process = self._processes[name]
        process.restart_s, process.started_s, process.has_served = None, time.monotonic(), False
        process.num_starts += 1
        process.start_id = next(self._start_ids)

        def reported(method: Callable[[str, int, str], None], start_id: int) -> Callable[[str], None]:
            return lambda text: self._events.put(partial(method, name, start_id, text))

        methods = self._on_endpoint, self._on_end, self._on_refusal
        events = StartEvents(*(reported(method, process.start_id) for method in methods))
        try:
            if process.instance is None:
                process.running = self._front = ProcessGroup.start([self._front_role()], events.on_end)
            else:
                process.running = self._launcher.start(process.instance, events)
        except OSError as error:  # no process can be made now
            process.restart_s = time.monotonic() + LONGEST_BACKOFF_S
            log.error("%s cannot be started: %s", name, error)

    # ---------------------------------------------------------------------------- what the front asks for

    def _read_commands(self) -> None:
        with os.fdopen(self._reader, "rb") as commands:
            for line in commands:
                try:
                    self._events.put(partial(self._carry_out, json.loads(line)))
                except ValueError:
                    log.warning("a line of the front is no command: %r", line[:100])

    def _carry_out(self, command: Mapping[str, Any]) -> None:
        match command:
            case {"command": "complete"}:
                self._is_complete = True
            case {"command": "serves", "name": str(name)}:
                if name in self._processes:  # else it is gone, or runs on another host
                    self._processes[name].has_served = True
            case {"command": "restart", "name": str(name)} if name in self._endpoints:
                process = self._processes.get(name)
                if process is not None:
                    process.num_starts = 0
                    if process.running is not None:
                        self._end_soon(name, process.running)
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
                self._give_up(name)
            case _:
                log.warning("the front asks for what is unknown: %s", dict(command))

    def _give_up(self, name: str) -> None:
        """End an instance for good."""
        process = self._processes[name]
        process.wanted = False
        self._endpoints.pop(name, None)
        self._tell_front({"instances": self._endpoints})
        if process.running is not None:
            self._end_soon(name, process.running)
        else:
            self._drop(name)

    def _drop(self, name: str) -> None:
        del self._processes[name]
        self._launcher.release(name)

    def _end_soon(self, name: str, running: Running) -> None:
        """End what runs without waiting for it; `_on_end` follows."""
        start_id = self._processes[name].start_id

        def end() -> None:
            running.close()
            self._events.put(partial(self._on_end, name, start_id, ""))

        threading.Thread(target=end, name=f"end of {name}", daemon=True).start()

    def _tell_front(self, message: Mapping[str, Any]) -> None:
        if self._front is not None:
            try:
                self._front.send(json.dumps(message).encode())
            except (OSError, EngineFailedError, ValueError):
                log.debug("the front has ended; the next one is told at its start")

    # --------------------------------------------------------------------------------------- roles, end

    def _add(self, instance: FleetInstance) -> None:
        """Start one more, unless there is no place for it."""
        try:
            self._know([instance])
        except (CapacityError, ConfigError) as error:
            log.warning("%s is not started: %s", instance.name, error)
            return
        self._processes[instance.name].is_added = True
        self._start(instance.name)
        self._tell_front({"instances": self._endpoints})

    def _know(self, instances: Sequence[FleetInstance]) -> None:
        """Take a place for those that are started here. Raises `CapacityError` if not all have one.

        An instance keeps its place when it is started again, and gives it back when it ends for good.
        """
        self._launcher.reserve([instance for instance in instances if instance.is_local])
        for instance in instances:
            if instance.server is not None:  # the front speaks to it by itself
                api_key(instance.name, instance.server)
            elif instance.address:
                self._endpoints[instance.name] = instance.address
            else:
                self._endpoints[instance.name] = self._launcher.endpoint(instance.name)
                self._processes[instance.name] = _Process(instance)

    def _front_role(self) -> Role:
        options = {
            "config": self._resolved.config.model_dump(mode="json"),
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
        if self._front is not None:
            self._front.ask_to_end(b'{"stop": true}', grace_s)
        running = [process.running for process in self._processes.values() if process.running is not None]
        threads = [threading.Thread(target=each.close) for each in running]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os.close(self._writer)
        self._launcher.close()
