"""Runs the application under uvicorn, with a bound on how long a shutdown takes."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI

from sagellm.core.errors import ConfigError
from sagellm.core.ports import SagePorts
from sagellm.engines.llm import LLM
from sagellm.serving.app import create_app
from sagellm.serving.gateway import Gateway

DEFAULT_HOST = "127.0.0.1"
DEFAULT_GRACE_S = 5.0
_LAST_WORDS_S = 2

log = logging.getLogger("uvicorn.error")  # beside the other lines of a start; uvicorn gives it a handler


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, for `serve`; port 0 takes a free one. Nobody can connect before it is
    served. Raises `ConfigError`.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns off Nagle's algorithm only for connections of a socket made with this protocol number.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if os.name == "posix":  # elsewhere it would share a port that is taken
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, ValueError, TypeError, OverflowError) as error:  # an odd host raises any of them
        listener.close()
        raise _not_available(f"{host}:{port}", error) from error
    return listener


def _not_available(address: str, error: Exception) -> ConfigError:
    reason = (isinstance(error, OSError) and error.strerror) or str(error)
    return ConfigError(f"cannot listen on {address} ({reason}): choose another address by --host and --port")


class SageServer(uvicorn.Server):
    """On SIGINT or SIGTERM: refuse new requests, let running ones end within the grace period, end the rest.

    A stream that is cut off gets an error event; a second signal skips the wait.
    """

    def __init__(
        self, config: uvicorn.Config, gateway: Gateway, grace_s: float, *, wants_key: bool = False
    ) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._grace_s = grace_s
        self._wants_key = wants_key

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Also says what is served, where the server listens, and who may use it."""
        try:
            await super().startup(sockets)
        except OSError as error:  # bound with us by another process that was first to listen
            await self.lifespan.shutdown()
            raise _not_available(f"{self.config.host}:{self.config.port}", error) from error
        if self.started:
            log.info(_served(self._gateway.llm))
            address = self.servers[0].sockets[0].getsockname()
            log.log(*_announcement(address[0], address[1], wants_key=self._wants_key))

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
    return SageServer(config, app.state.gateway, grace_s, wants_key=app.state.wants_key)


def _served(llm: LLM) -> str:
    stats = llm.stats()
    blocks = stats.blocks_active + stats.blocks_cached + stats.blocks_free
    return f"model {llm.model_name}: context of {llm.max_model_len} tokens, {blocks} KV blocks"


def _announcement(host: str, port: int, *, wants_key: bool) -> tuple[int, str]:
    """Log level and text; an open server that others can reach is a warning."""
    where = f"listening on http://{f'[{host}]' if ':' in host else host}:{port}"
    if wants_key:
        return logging.INFO, f"{where}; clients must send the API key"
    if ipaddress.ip_address(host).is_loopback:
        return logging.INFO, f"{where}; no API key is required, and only this machine reaches it"
    return logging.WARNING, f"{where}; no API key is required: whoever reaches it may use it (--api-key)"


def serve(
    llm: LLM,
    host: str = DEFAULT_HOST,
    port: int = SagePorts.HTTP,
    *,
    listener: socket.socket | None = None,
    grace_s: float = DEFAULT_GRACE_S,
    log_level: str = "info",
    **options: Any,
) -> None:
    """Serve until SIGINT or SIGTERM, then close the `llm`; `options` as of `create_app`.

    A `listener`, made by `bind`, takes the place of `host` and `port`. Raises `ConfigError` for an address
    that is not to be had. An engine whose last step hangs is left to the end of the process.
    """
    app = create_app(llm, **options)
    try:
        with listener or bind(host, int(port)) as bound, _sigterm_as_interrupt():
            host, port = bound.getsockname()[:2]
            make_server(app, host=host, port=port, grace_s=grace_s, log_level=log_level).run([bound])
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
