"""Runs the application under uvicorn, with a bound on how long a shutdown takes."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI

from sagellm.core.ports import SagePorts
from sagellm.engines.llm import LLM
from sagellm.serving.app import create_app
from sagellm.serving.gateway import Gateway

DEFAULT_HOST = "127.0.0.1"
DEFAULT_GRACE_S = 5.0
_LAST_WORDS_S = 2


class SageServer(uvicorn.Server):
    """On SIGINT or SIGTERM: refuse new requests, let running ones end within the grace period, end the rest.

    A stream that is cut off gets an error event; a second signal skips the wait.
    """

    def __init__(self, config: uvicorn.Config, gateway: Gateway, grace_s: float) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._grace_s = grace_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._gateway.refuse_new()
        loop = asyncio.get_running_loop()
        message = "the server is shutting down"
        cut = loop.call_later(self._grace_s, self._gateway.fail_open, message)
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()


def make_server(
    app: FastAPI, *, host: str, port: int, grace_s: float = DEFAULT_GRACE_S, log_level: str = "info"
) -> SageServer:
    """A server for an app of `create_app`, not yet running; port 0 takes a free one."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level=log_level,
        access_log=False,
        timeout_graceful_shutdown=int(grace_s) + _LAST_WORDS_S,
    )
    return SageServer(config, app.state.gateway, grace_s)


def serve(
    llm: LLM,
    host: str = DEFAULT_HOST,
    port: int = SagePorts.HTTP,
    *,
    grace_s: float = DEFAULT_GRACE_S,
    log_level: str = "info",
    **options: Any,
) -> None:
    """Serve until SIGINT or SIGTERM, then close the `llm`; `options` as of `create_app`.

    An engine whose last step hangs is left to the end of the process.
    """
    app = create_app(llm, **options)
    server = make_server(app, host=host, port=int(port), grace_s=grace_s, log_level=log_level)
    try:
        with _sigterm_as_interrupt():
            server.run()
    except KeyboardInterrupt:
        return
    finally:
        if app.state.gateway.stopped:
            llm.close()


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Uvicorn raises the signal that ended it again: within, SIGTERM then does not kill but unwinds."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
