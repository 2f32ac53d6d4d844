"""Runs the application under uvicorn until a signal or a failure of the engine."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from sagellm.core.config import ServerConfig
from sagellm.core.errors import ConfigError, EngineFailedError
from sagellm.core.log_lines import LogFormat, set_up_logging
from sagellm.engines.llm import LLM
from sagellm.serving.app import DEFAULT_SETTINGS, create_app
from sagellm.serving.connection import Connection, RateLimitedLog
from sagellm.serving.gateway import Gateway

FORCED_EXIT_S = 1.5
"""From the second Ctrl-C to the end of the process, even if threads still run."""
INTERRUPTED = 130
"""Exit status of a process that was ended by Ctrl-C, as shells have it."""

_FINAL_EVENTS_S = 2.0
"""After the grace period, for the error events to reach their clients."""
_POLL_S = 0.02
_SPARE_DESCRIPTORS = 128
"""For files, libraries and connections that are being refused."""
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

log = logging.getLogger("sagellm.serving")


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, for `serve`; port 0 takes a free one.

    Clients can connect only when it is served. Raises `ConfigError`.
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
    """A uvicorn server that drains on SIGINT or SIGTERM.

    It refuses new requests and lets running ones end within the grace period; then it ends the rest with an
    error that their clients receive. A second SIGINT ends them at once. A failed engine ends the server too.
    `app` is one of `create_app`; `run` without a listener binds the address in its settings.
    """

    def __init__(self, app: FastAPI, *, log_level: str = "info") -> None:
        self._gateway: Gateway = app.state.gateway
        settings = self._gateway.settings
        connection = partial(
            Connection, settings=settings, request_log=app.state.request_log, full=RateLimitedLog()
        )
        config = uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            http=connection,  # type: ignore[arg-type] # uvicorn only calls it
            ws="none",
            log_config=None,
            log_level=log_level,
            access_log=False,
            timeout_graceful_shutdown=int(_FINAL_EVENTS_S) + 1,
        )
        super().__init__(config)
        self.forced = False
        self._grace_s = settings.shutdown_grace_s
        self._wants_key: bool = app.state.wants_key
        self._accept_errors = RateLimitedLog()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then log the model, the address and whether clients need a key."""
        asyncio.get_running_loop().set_exception_handler(self._on_loop_error)
        try:
            await super().startup(sockets)
        except OSError as error:  # another process listens on the same address already
            await self.lifespan.shutdown()
            host, port = (sockets[0].getsockname() if sockets else (self.config.host, self.config.port))[:2]
            raise _not_available(f"{host}:{port}", error) from error
        if self.started:
            llm, stats = self._gateway.llm, self._gateway.llm.stats()
            blocks = stats.blocks_active + stats.blocks_cached + stats.blocks_free
            context = f"context of {llm.max_model_len} tokens, {blocks} KV blocks"
            log.info(f"model {llm.model_name}: {context}")
            address = self.servers[0].sockets[0].getsockname()
            log.log(*_announcement(address[0], address[1], wants_key=self._wants_key))

    async def on_tick(self, counter: int) -> bool:
        """Whether to shut down; uvicorn calls it ten times per second."""
        return await super().on_tick(counter) or self._gateway.failure is not None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; a second SIGINT ends the process, even if threads still run."""
        if not self.should_exit:
            super().handle_exit(sig, frame)
        elif sig == signal.SIGINT and not self.forced:
            self.forced = True
            self._gateway.hurry()
            killer = threading.Timer(FORCED_EXIT_S, self._exit_at_once)
            killer.daemon = True
            killer.start()

    def _exit_at_once(self) -> None:
        self._gateway.llm.engine.end_ranks(0.0)
        os._exit(INTERRUPTED)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, then end. The listener stays open meanwhile, and answers new requests 503."""
        self._gateway.refuse_new()
        if self._gateway.num_open and not self.forced:
            limit = f"{self._grace_s:g} s (server.shutdown_grace_s); Ctrl-C again ends them now"
            log.info("requests that run: %d; they may end within %s", self._gateway.num_open, limit)
        await self._wait_until(lambda: not self._gateway.num_open, self._grace_s)
        self._gateway.fail_open("the server is shutting down")
        aborting = asyncio.create_task(self._abort_connections())
        try:
            await super().shutdown(sockets)
        finally:
            aborting.cancel()

    async def _abort_connections(self) -> None:
        """Abort connections that uvicorn would wait for: they do not read, or still upload."""
        await self._wait_until(lambda: False, _FINAL_EVENTS_S)
        await asyncio.sleep(5 * _POLL_S)  # a forced end still sends the error events
        for connection in list(self.server_state.connections):
            assert isinstance(connection, Connection)
            connection.abort()

    async def _wait_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait until the condition holds, the time is over or the end is forced."""
        until_s = asyncio.get_running_loop().time() + timeout_s
        while not (condition() or self.forced) and asyncio.get_running_loop().time() < until_s:
            await asyncio.sleep(_POLL_S)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log errors that no task receives, rate-limited if file descriptors run out."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _OUT_OF_DESCRIPTORS:
            advice = "raise its limit (ulimit -n) or lower server.max_connections"
            self._accept_errors.warning(f"cannot accept connections: {error.strerror}: {advice}")
        elif "_start_serving" in repr(context.get("handle")):
            log.debug("asyncio tried to accept again, after the listener was closed")
        else:
            loop.default_exception_handler(context)


def _announcement(host: str, port: int, *, wants_key: bool) -> tuple[int, str]:
    """Log level and text: a warning for an open server that other machines reach."""
    where = f"listening on http://{f'[{host}]' if ':' in host else host}:{port}"
    if wants_key:
        return logging.INFO, f"{where}; clients must send the API key"
    if ipaddress.ip_address(host).is_loopback:
        return logging.INFO, f"{where}; no API key is required, and only this machine reaches it"
    return logging.WARNING, f"{where}; no API key is required: anyone who reaches it may use it (--api-key)"


def serve(
    llm: LLM,
    settings: ServerConfig = DEFAULT_SETTINGS,
    *,
    listener: socket.socket | None = None,
    log_level: str = "info",
    log_format: LogFormat = "text",
    **options: Any,
) -> None:
    """Serve until SIGINT or SIGTERM, then close the `llm`; `options` as of `create_app`.

    Logs to stderr unless the caller has set up logging. A `listener`, made by `bind`, replaces the address in
    `settings`. Raises `ConfigError` for an address that is not available, `EngineFailedError` when the engine
    has failed, and `KeyboardInterrupt` after a second SIGINT. If its last step hangs, the `llm` stays open
    and its other ranks are ended.
    """
    set_up_logging(log_level, log_format)
    app = create_app(llm, _within_descriptors(settings), **options)
    server: SageServer | None = None
    try:
        with listener or bind(settings.host, settings.port) as bound, _sigterm_as_interrupt():
            server = SageServer(app, log_level=log_level)
            server.run([bound])
    except KeyboardInterrupt:
        if server is None:
            raise
    finally:
        if app.state.gateway.stopped:
            llm.close()
    if server.forced:
        raise KeyboardInterrupt
    failure = app.state.gateway.failure
    if failure is not None:
        raise EngineFailedError(f"the engine has failed, restart the server: {failure}") from failure


def _within_descriptors(settings: ServerConfig) -> ServerConfig:
    """The settings, with no more connections than the process may open files.

    Raises the soft limit of the process as needed.
    """
    try:
        import resource
    except ImportError:  # not on Windows, which has no such limit
        return settings
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = settings.max_connections + _SPARE_DESCRIPTORS
    if soft == unlimited or soft >= wanted:
        return settings
    granted = wanted if hard == unlimited else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (granted, hard))
    except (OSError, ValueError):  # macOS has a lower limit beside
        granted = soft
    if granted == wanted:
        return settings
    fitting = max(1, granted - _SPARE_DESCRIPTORS)
    log.warning("at most %d connections: the process may open only %d files (ulimit -n)", fitting, granted)
    return settings.model_copy(update={"max_connections": fitting})


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Make SIGTERM raise `KeyboardInterrupt`, because uvicorn raises the signal again at its end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
