"""When a process that has ended is started again."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest

from sagellm.control_plane.fleet_instances import FleetInstance
from sagellm.serving.fleet.launcher import StartEvents
from sagellm.serving.fleet.supervisor import LONGEST_BACKOFF_S, SERVED_BACKOFF_S, Supervisor
from tests.serving.fleet.ray_stand_in import resolved_fleet


class Launched:
    """Implements `Launcher`, and is what it launches: nothing."""

    def reserve(self, instances: Sequence[FleetInstance]) -> None: ...

    def release(self, name: str) -> None: ...

    def endpoint(self, name: str) -> str:
        return "nowhere"

    def start(self, instance: FleetInstance, events: StartEvents) -> Launched:
        return self

    def close(self) -> None: ...


@pytest.mark.parametrize(("serves", "longest_s"), [(False, LONGEST_BACKOFF_S), (True, SERVED_BACKOFF_S)])
def test_one_that_had_come_to_serve_is_back_soon(serves: bool, longest_s: float) -> None:
    """One that ends while it starts is on its way into a loop: its pauses grow."""
    with closing(socket.socket()) as listener:
        supervisor: Any = Supervisor(resolved_fleet({"a": {}}), listener, lambda *_: Launched())
        [name] = supervisor._processes
        process, pauses = supervisor._processes[name], []
        for _ in range(9):
            supervisor._start(name)
            if serves:
                supervisor._carry_out({"command": "serves", "name": name})
            supervisor._on_end(name, process.start_id, "it was killed")
            pauses.append(process.restart_s - process.started_s)
    expected = [min(0.1 * 2**number, longest_s) for number in range(1, 10)]
    assert pauses == pytest.approx(expected, abs=0.05)
    supervisor._carry_out({"command": "serves", "name": "of another host"})
