"""A front before its first instance: it lives, says what is missing, and serves once one is there."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from sagellm.control_plane.fleet.engine import FleetEngine
from sagellm.core.config import ServerConfig
from sagellm.core.errors import EngineFailedError
from sagellm.serving.fleet import starting
from sagellm.serving.fleet.routes import first_to_end
from sagellm.serving.fleet.starting import wait_for_instance
from sagellm.serving.server import bind
from tests.control_plane.fleet.scene import Scene

KEY = {"Authorization": "Bearer an api key"}


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """A front whose two instances do not run yet."""
    monkeypatch.setattr(starting, "QUIET_S", 0.0)
    made = Scene(tmp_path, 0)
    for name in ("i-0", "i-1"):
        made.front.know(made.instances.add(name, made.endpoint(name)))
    yield made
    made.close()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with bind("127.0.0.1", 0) as made:
        yield made


class Waiting:
    """`wait_for_instance` in a thread, as the front's process has it."""

    def __init__(self, front: FleetEngine, settings: ServerConfig, listener: socket.socket) -> None:
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, args=(front, settings, listener), daemon=True)
        self.thread.start()

    def _run(self, front: FleetEngine, settings: ServerConfig, listener: socket.socket) -> None:
        try:
            wait_for_instance(front, settings, listener, None)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def ask(self, method: str, path: str, **given: Any) -> httpx2.Response:
        while True:
            try:
                return httpx2.request(method, self.url + path, timeout=60.0, **given)
            except httpx2.ConnectError:
                assert self.thread.is_alive()
                time.sleep(0.01)

    def until_over(self, turn: Callable[[], None]) -> None:
        while self.thread.is_alive():
            turn()
        assert self.error is None


def test_it_lives_before_an_instance_is_there(
    scene: Scene, listener: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sagellm.fleet")
    waiting = Waiting(scene.front, ServerConfig(), listener)
    assert waiting.ask("GET", "/health").status_code == 200
    assert waiting.ask("GET", "/ready").status_code == 503
    refused = waiting.ask("POST", "/v1/completions", json={"prompt": [1]})
    assert refused.status_code == 503
    assert "i-0" in refused.json()["error"]["message"]
    shown = waiting.ask("GET", "/v1/fleet").json()["instances"]
    assert [(each["name"], each["state"]) for each in shown] == [("i-0", "starting"), ("i-1", "starting")]
    assert all(each["fault"] for each in shown)
    server = scene.start("i-1")
    waiting.until_over(server.turn)
    assert scene.front.has_instance
    assert "not there yet: i-0" in caplog.text
    with pytest.raises(httpx2.ReadTimeout):  # it is connected, and the next server would answer
        httpx2.get(waiting.url + "/health", timeout=0.3)


def test_the_state_of_the_fleet_is_for_clients(scene: Scene, listener: socket.socket) -> None:
    waiting = Waiting(scene.front, ServerConfig(api_key="an api key"), listener)
    assert waiting.ask("GET", "/v1/fleet").status_code == 401
    assert waiting.ask("GET", "/v1/fleet", headers=KEY).status_code == 200
    assert waiting.ask("GET", "/health").status_code == 200
    server = scene.start("i-0")
    waiting.until_over(server.turn)


def test_a_fleet_without_any_instance_ends_and_says_why(scene: Scene, listener: socket.socket) -> None:
    with pytest.raises(EngineFailedError, match=r"0.2 s: i-0 \(.*\), i-1 \("):
        wait_for_instance(scene.front, ServerConfig(), listener, 0.2)


def test_what_is_drained_ends_before_what_is_lost_and_then_the_highest_number(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 4)
    assert first_to_end(scene.front) == ["i-3", "i-2", "i-1", "i-0"]
    scene.kill("i-1")
    scene.until(lambda: not scene.front.members["i-1"].is_ready)
    scene.front.drain("i-0")
    assert first_to_end(scene.front) == ["i-0", "i-1", "i-3", "i-2"]
    scene.close()
