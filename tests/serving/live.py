"""A server in this process on a free port, and clients for it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from openai import OpenAI

from sagellm.core.config import Config, ServerConfig
from sagellm.engines.llm import LLM
from sagellm.serving import create_app
from sagellm.serving.app import DEFAULT_STOP_TIMEOUT_S
from sagellm.serving.gateway import Gateway
from sagellm.serving.server import SageServer
from tests import quick_servers  # noqa: F401

LOCALHOST = "127.0.0.1"
PATIENCE_S = 20.0


@dataclass
class Live:
    """A running server; `http` is bare, `openai()` makes a client that does not retry."""

    llm: LLM
    server: SageServer
    gateway: Gateway
    thread: threading.Thread
    url: str
    http: httpx.Client

    @property
    def address(self) -> tuple[str, int]:
        return LOCALHOST, int(self.url.rpartition(":")[2])

    def openai(self, api_key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=PATIENCE_S)

    def metric(self, name: str, **labels: str) -> float:
        """A value from /metrics; labels beside the model's name."""
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        for line in self.http.get("/metrics").text.splitlines():
            head, _, value = line.rpartition(" ")
            if head.split("{")[0] == name and all(label in head for label in wanted):
                return float(value)
        raise KeyError(name)


@contextmanager
def serving(
    llm: LLM,
    *,
    config: Config | None = None,
    model_name: str | None = None,
    stop_timeout_s: float = DEFAULT_STOP_TIMEOUT_S,
    log_requests: bool = True,
    **settings: Any,
) -> Iterator[Live]:
    """A server; `settings` are of the section `server`.

    It computes no next turns of chats unless asked: they would come and go under tests that count blocks.
    """
    settings.setdefault("prefill_next_turn", False)
    chosen = ServerConfig(port=0, shutdown_grace_s=settings.pop("shutdown_grace_s", 5.0), **settings)
    app = create_app(
        llm,
        chosen,
        config=config,
        model_name=model_name,
        stop_timeout_s=stop_timeout_s,
        log_requests=log_requests,
    )
    server = SageServer(app, log_level="warning")
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started or not thread.is_alive())
    url = f"http://{LOCALHOST}:{server.servers[0].sockets[0].getsockname()[1]}"
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
        try:
            yield Live(llm, server, app.state.gateway, thread, url, http)
        finally:
            http.close()
            server.should_exit = True
            thread.join(PATIENCE_S)
            if app.state.gateway.stopped:
                llm.close()
    assert not thread.is_alive(), "the server did not shut down"


def wait_until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "what the test waits for did not happen"
        time.sleep(0.005)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOCALHOST, 0))
        return int(probe.getsockname()[1])
