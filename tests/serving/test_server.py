"""The address: had before anything is loaded, said once it is served, and by whom it may be used."""

from __future__ import annotations

import logging
import socket
import threading

import pytest

from sagellm import serving
from sagellm.core.config import ServerConfig
from sagellm.core.errors import ConfigError
from sagellm.serving.server import SageServer, _announcement, serve
from tests.scripted_engine import ScriptedEngine, scripted_llm
from tests.serving.live import LOCALHOST, PATIENCE_S, wait_until


def test_bind_takes_a_free_port() -> None:
    with serving.bind(LOCALHOST, 0) as listener:
        assert listener.getsockname()[1] > 0


def test_connections_do_not_wait_for_acknowledgements() -> None:
    """With Nagle's algorithm and delayed acknowledgements, each request on a kept connection takes 44 ms."""
    llm = scripted_llm()
    with serving.bind(LOCALHOST, 0) as listener:
        server = SageServer(serving.create_app(llm), log_level="warning")
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        wait_until(lambda: server.started)
        try:
            with socket.create_connection(listener.getsockname()):
                wait_until(lambda: bool(server.server_state.connections))
                [connection] = server.server_state.connections
                accepted = connection.transport.get_extra_info("socket")
                no_delay = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        finally:
            server.should_exit = True
            thread.join(PATIENCE_S)
    llm.close()
    assert no_delay


def test_what_cannot_be_bound_is_a_config_error() -> None:
    with socket.socket() as taken:
        taken.bind((LOCALHOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"cannot listen on {LOCALHOST}:{port} \(Address already in use"
        ):
            serving.bind(LOCALHOST, port)
    for host in ("no such host", "x" * 300, "300.1.2.3", "a\0b", "::zz"):
        with pytest.raises(ConfigError, match="choose another address by --host and --port"):
            serving.bind(host, 0)


def test_a_port_that_another_takes_meanwhile_is_a_config_error_too() -> None:
    llm = scripted_llm()
    with serving.bind(LOCALHOST, 0) as listener, socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(listener.getsockname())
        other.listen()
        with pytest.raises(ConfigError, match="cannot listen on"):
            serve(llm, listener=listener, log_level="critical")
    assert isinstance(llm._engine, ScriptedEngine)
    assert llm._engine.closed


@pytest.mark.parametrize(
    ("host", "wants_key", "level", "text"),
    [
        (
            LOCALHOST,
            False,
            logging.INFO,
            "http://127.0.0.1:80; no API key is required, and only this machine",
        ),
        (LOCALHOST, True, logging.INFO, "http://127.0.0.1:80; clients must send the API key"),
        ("0.0.0.0", True, logging.INFO, "clients must send the API key"),
        ("0.0.0.0", False, logging.WARNING, "anyone who reaches it may use it"),
        ("::1", False, logging.INFO, "http://[::1]:80; no API key is required, and only"),
    ],
)
def test_the_start_says_whether_a_key_is_required(
    host: str, *, wants_key: bool, level: int, text: str
) -> None:
    said = _announcement(host, 80, wants_key=wants_key)
    assert said[0] == level
    assert text in said[1]


@pytest.mark.parametrize("key", ["", "  "])
def test_an_empty_key_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="api_key is empty"):
        serving.create_app(scripted_llm(), ServerConfig.model_construct(api_key=key))
