"""`wait_for_instance`: turns a front until an instance is there, and answers HTTP meanwhile.

    GET /health      200: the front lives
    GET /v1/fleet    200: each instance, and why it is not there yet; with an API key, if clients need one
    all else         503: the fleet starts

Nothing about the model is known before an instance says it, so this is a server of its own. It ends before
the one that serves begins; the supervisor holds the socket, so connections that are made between them wait.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from concurrent.futures import Future
from typing import Any

import uvicorn
from fastapi import FastAPI, Request

from sagellm.control_plane.fleet.engine import FleetEngine
from sagellm.core.config import ServerConfig
from sagellm.core.errors import EngineFailedError
from sagellm.serving import errors
from sagellm.serving.app import client_checks
from sagellm.serving.fleet.status import FleetStatus, fleet_status

log = logging.getLogger("sagellm.fleet")
QUIET_S = 1.0
"""A front whose instances are there sooner, as one that is started again, begins to serve right away."""
MAX_CONNECTIONS = 128


def wait_for_instance(
    engine: FleetEngine, settings: ServerConfig, listener: socket.socket, limit_s: float | None
) -> None:
    """Return once an instance is there, and log those that are not.

    Raises `EngineFailedError` without any within `limit_s`; None: wait as long as it takes.
    """
    began_s = engine.clock.now()
    server: StartingServer | None = None
    try:
        while not engine.has_instance:
            engine.step()
            waited_s = engine.clock.now() - began_s
            if limit_s is not None and waited_s >= limit_s:
                away = ", ".join(engine.missing)
                raise EngineFailedError(f"no instance was there within {limit_s:g} s: {away}")
            if server is None and waited_s >= QUIET_S:
                server = StartingServer(engine, settings, listener)
    finally:
        if server is not None:
            server.close()
    if missing := engine.missing:
        log.warning("the fleet serves; these are not there yet: %s", ", ".join(missing))


class StartingServer:
    """Answers on a thread of its own while another steps the engine, until `close`."""

    def __init__(self, engine: FleetEngine, settings: ServerConfig, listener: socket.socket) -> None:
        config = uvicorn.Config(
            _app(engine, settings), ws="none", log_config=None, log_level="error", access_log=False,
            limit_concurrency=MAX_CONNECTIONS, timeout_graceful_shutdown=1,
        )  # fmt: skip
        self._engine, self._server = engine, uvicorn.Server(config)
        bound = listener.dup()  # the server closes it
        target, arguments = self._server.run, ([bound],)
        self._thread = threading.Thread(target=target, args=arguments, name="starting", daemon=True)
        self._thread.start()
        host, port = bound.getsockname()[:2]
        away = ", ".join(engine.missing)
        log.info("the fleet starts, http://%s:%d/v1/fleet shows how; not there: %s", host, port, away)

    def close(self) -> None:
        self._server.should_exit = True
        while self._thread.is_alive():  # an answer may need the engine
            self._engine.step()


def _app(engine: FleetEngine, settings: ServerConfig) -> FastAPI:
    app = FastAPI(openapi_url=None)
    errors.install(app)

    began_s = engine.clock.now()

    async def health() -> dict[str, Any]:
        return {"status": "ok"}

    async def status() -> FleetStatus:
        found: Future[FleetStatus] = Future()
        engine.call_soon(lambda: found.set_result(fleet_status(engine, "", began_s)))
        return await asyncio.wrap_future(found)

    async def starts(_request: Request) -> None:
        away = ", ".join(engine.missing)
        raise errors.UnavailableError(f"the fleet starts, no instance is there yet: {away}")

    methods = ["GET", "HEAD"]
    app.add_api_route("/health", health, methods=methods)
    app.add_api_route("/v1/fleet", status, methods=methods, dependencies=client_checks(settings))
    app.add_api_route("/{path:path}", starts, methods=[*methods, "POST", "PUT", "DELETE", "OPTIONS"])
    return app
