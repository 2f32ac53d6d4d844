"""A fleet whose instances move: supervisor, `RayLauncher`, `RayInstance` and a front.

Ray itself is stood in for, so instances are threads of the test; requests and KV go over TCP as on Ray.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx2
import pytest

from sagellm.control_plane.fleet.keys import FleetKey
from sagellm.core.errors import CapacityError
from sagellm.serving.fleet.launcher import Launcher, instance_options
from sagellm.serving.fleet.ray_instance import RayInstance
from sagellm.serving.fleet.ray_launcher import RayLauncher
from sagellm.serving.fleet.supervisor import Supervisor
from sagellm.serving.server import bind
from tests.serving.fleet.ray_stand_in import StandInCluster, resolved_fleet

ADMIN = {"Authorization": "Bearer an admin key"}
WAIT_S = 120.0
GROUPS = {
    "prefill": {"type": "prefilling"},
    "decode": {"type": "decoding"},
}


class Running:
    """A supervisor in a thread, and the front's address."""

    def __init__(self, cluster: StandInCluster, groups: dict[str, Any], **keys: Any) -> None:
        self.cluster = cluster
        self.error: CapacityError | None = None
        resolved = resolved_fleet(
            groups, **{"server.admin_key": "an admin key", "server.shutdown_grace_s": 1.0, **keys}
        )
        self._listener = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

        def launcher(given: Any, key: FleetKey) -> Launcher:
            return RayLauncher(given, key, cluster)

        self.supervisor = Supervisor(resolved, self._listener, launcher)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.supervisor.run()
        except CapacityError as error:
            self.error = error

    def wait_until_ready(self) -> None:
        until_s, is_ready = time.monotonic() + WAIT_S, False
        while not is_ready:
            assert time.monotonic() < until_s
            assert self.thread.is_alive()
            time.sleep(0.05)
            with suppress(httpx2.ConnectError):
                is_ready = all(each["state"] == "ready" for each in self.status())

    def status(self) -> list[dict[str, Any]]:
        answer = httpx2.get(f"{self.url}/v1/fleet", timeout=WAIT_S)
        answer.raise_for_status()
        found: list[dict[str, Any]] = answer.json()["instances"]
        return found

    def operate(self, what: str, **body: Any) -> dict[str, Any]:
        answer = httpx2.post(f"{self.url}/v1/admin/fleet/{what}", json=body, headers=ADMIN, timeout=WAIT_S)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def text(self) -> str:
        body = {"model": "sagellm-demo", "prompt": list(range(1, 60)), "max_tokens": 20, "temperature": 0}
        answer = httpx2.post(f"{self.url}/v1/completions", json={**body, "ignore_eos": True}, timeout=WAIT_S)
        assert answer.status_code == 200, answer.text
        found: str = answer.json()["choices"][0]["text"]
        return found

    def close(self) -> None:
        self.supervisor.stop()
        self.thread.join(WAIT_S)
        self._listener.close()
        assert not self.thread.is_alive()


@contextmanager
def running(cluster: StandInCluster, groups: dict[str, Any], **keys: Any) -> Iterator[Running]:
    made = Running(cluster, groups, **keys)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Instances are threads here, and name the chips that they may see for the whole process."""
    with patch.dict(os.environ):
        yield


@pytest.fixture
def cluster() -> Iterator[StandInCluster]:
    level = logging.getLogger().level
    yield StandInCluster([{"CPU": 8.0}], lambda name: RayInstance(name, "127.0.0.1"))
    logging.getLogger().setLevel(level)


def test_operations_and_deaths(cluster: StandInCluster) -> None:
    with running(cluster, GROUPS) as fleet:
        fleet.wait_until_ready()
        text = fleet.text()
        assert {each["name"] for each in fleet.status()} == {"prefill-0", "decode-0"}
        cluster.actors["prefill-0"][0].kill(for_good=False)
        assert fleet.text() == text
        fleet.operate("scale", group="decode", count=2)
        assert fleet.text() == text
        assert len(cluster.groups) == 2
        fleet.operate("restart", name="decode-0")
        assert len(cluster.actors["decode-0"]) == 2
        assert fleet.text() == text
        fleet.operate("scale", group="decode", count=1)
        assert {each["name"] for each in fleet.status()} == {"prefill-0", "decode-0"}
        assert fleet.text() == text
    assert not cluster.groups
    assert cluster.is_closed
    assert all(each.is_gone for made in cluster.actors.values() for each in made)


def test_a_cluster_without_room_ends_the_command(cluster: StandInCluster) -> None:
    cluster.has_room = False
    groups = {"a": {"ray_resources": {"h100": 1}}}
    made = Running(cluster, groups, **{"fleet.ray_timeout_s": 0.2})
    made.thread.join(WAIT_S)
    made.close()
    assert "h100 1 asked, the cluster has h100 0" in str(made.error)
    assert not cluster.groups


def test_an_actor_serves_once_and_says_why_it_cannot(tmp_path: Path) -> None:
    resolved = resolved_fleet({"a": {}}, **{"model.name": str(tmp_path / "not_there")})
    from sagellm.control_plane.fleet_instances import fleet_instances

    [instance] = fleet_instances(resolved.config.fleet)
    options = instance_options(resolved, instance, 0, FleetKey.new())
    options |= {"log_level": "warning", "log_format": "text", "environment": {}}
    actor = RayInstance("a-0", "127.0.0.1")
    answer = json.loads(actor.start(json.dumps(options)))
    assert "each node needs the model at the same path" in answer["error"]
    assert actor.stop() == ""
    options["config"]["model"]["name"] = None
    actor = RayInstance("a-0", "127.0.0.1")
    first = json.loads(actor.start(json.dumps(options)))["endpoint"]
    assert first.startswith("tcp://127.0.0.1:")
    assert json.loads(actor.start(json.dumps(options)))["endpoint"] == first
    watching = threading.Thread(target=actor.watch)
    watching.start()
    while actor._watch.is_set():
        pass
    again = threading.Thread(target=actor.watch, daemon=True)
    again.start()
    watching.join(WAIT_S)
    assert not watching.is_alive()
    actor.stop()
    assert repr(actor) == "a-0"
