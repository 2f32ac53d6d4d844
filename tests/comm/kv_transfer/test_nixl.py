"""`NixlFabric` over an agent that waits and fails when told to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from sagellm.comm.kv_transfer.transports import nixl
from sagellm.comm.kv_transfer.transports.nixl import NixlFabric


class FakeAgent:
    """As NIXL's agent, as far as it is called."""

    backends = ("UCX",)

    def __init__(self, name: str, config: object) -> None:
        self.may_connect, self.is_connecting = threading.Event(), threading.Event()
        self.num_notifs, self.state, self.posts = 0, "DONE", "PROC"
        self.handles: list[object] = []
        self.removed: list[str] = []

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        self.num_notifs += 1
        return {}

    def add_remote_agent(self, description: bytes) -> str:
        self.is_connecting.set()
        assert self.may_connect.wait(20)
        return description.decode()

    def remove_remote_agent(self, name: str) -> None:
        self.removed.append(name)

    def get_xfer_descs(self, parts: list[tuple[int, int, int]], kind: str) -> Any:
        return parts

    def initialize_xfer(self, operation: str, into: Any, source: Any, peer: Any) -> object:
        self.handles.append(object())
        return self.handles[-1]

    def transfer(self, handle: object) -> str:
        if self.posts == "raise":
            raise RuntimeError("a fault of the backend")
        return self.posts

    def check_xfer_state(self, handle: object) -> str:
        return self.state

    def release_xfer_handle(self, handle: object) -> None:
        self.handles.remove(handle)


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Iterator[NixlFabric]:
    sync = Enum("sync", ["NIXL_THREAD_SYNC_STRICT"])
    api = SimpleNamespace(nixl_agent=FakeAgent, nixl_agent_config=dict, nixl_thread_sync_t=sync)
    monkeypatch.setattr(nixl, "load", lambda: api)
    made = NixlFabric()
    agent = made._agent
    yield made
    agent.may_connect.set()
    made.close()


def test_reads_go_on_while_a_peer_is_connected(fabric: NixlFabric) -> None:
    """And peers are served: the agent is called often meanwhile."""
    agent = fabric._agent
    agent.may_connect.set()
    peer = fabric.connect(b"a")
    agent.may_connect.clear()
    agent.is_connecting.clear()
    connecting = threading.Thread(target=fabric.connect, args=(b"b",))
    connecting.start()
    assert agent.is_connecting.wait(20)
    before = agent.num_notifs
    fabric.offered()
    done = threading.Event()

    def read() -> None:
        if fabric.is_done(fabric.read(peer, 0, 0, 1)):
            done.set()

    reading = threading.Thread(target=read)
    reading.start()
    try:
        assert done.wait(20)
        for _ in range(2000):
            if agent.num_notifs > before + 2:
                break
            threading.Event().wait(0.005)
        assert agent.num_notifs > before + 2
    finally:
        agent.may_connect.set()
        connecting.join()
        reading.join()


def test_a_peer_is_removed_with_its_last_use(fabric: NixlFabric) -> None:
    fabric._agent.may_connect.set()
    for _ in range(2):
        fabric.connect(b"a")
    fabric.disconnect("a")
    assert not fabric._agent.removed
    fabric.disconnect("a")
    assert fabric._agent.removed == ["a"]


@pytest.mark.parametrize("posts", ["ERR", "raise"])
def test_a_read_that_cannot_be_posted_leaves_no_handle(fabric: NixlFabric, posts: str) -> None:
    fabric._agent.posts = posts
    with pytest.raises(ConnectionError, match=r"cannot be posted|a fault of the backend"):
        fabric.read("a", 0, 0, 1)
    assert not fabric._agent.handles


@pytest.mark.parametrize("state", ["DONE", "ERR"])
def test_a_read_that_has_ended_leaves_no_handle(fabric: NixlFabric, state: str) -> None:
    agent, read = fabric._agent, fabric.read("a", 0, 0, 1)
    agent.state = "PROC"
    assert not fabric.is_done(read)
    agent.state = state
    if state == "ERR":
        with pytest.raises(ConnectionError, match="a read failed"):
            fabric.is_done(read)
    else:
        assert fabric.is_done(read)
    assert not agent.handles
