"""`sagellm serve`: the OpenAI-compatible HTTP server."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sagellm.cli._loading import load_llm
from sagellm.cli._options import Model, command, flag
from sagellm.cli._settings import ServerSettings
from sagellm.cli.run import EXIT_INTERRUPTED
from sagellm.core.errors import ConfigError, MissingExtraError
from sagellm.core.events import EventBus
from sagellm.core.log_lines import set_up_logging

if TYPE_CHECKING:
    from sagellm.core.config import Config
    from sagellm.core.config_layers import Resolved

NEEDED = ("fastapi", "uvicorn", "prometheus_client")


@command
def serve(
    record_trace: Path | None = flag("--record-trace FILE", "Record requests, as ids of their blocks."),
    prefill: int | None = flag("--prefill N", "A fleet: N instances that compute prompts.", min=1),
    decode: int | None = flag("--decode N", "A fleet: N instances that go on from there.", min=1),
    ray: bool = flag("--ray", "A fleet: instances are actors of a Ray cluster, RAY_ADDRESS or here.", False),
    instance: str | None = flag("NAME", "Serve this instance of a fleet file alone, for a front elsewhere."),
    *,
    model: Model,
    settings: ServerSettings,
) -> None:
    """Serve a model over HTTP as OpenAI's API until Ctrl-C."""
    resolved = settings.load(model=model.name)
    if counted := _counted(prefill, decode):
        if resolved.config.fleet.groups:
            groups = ", ".join(resolved.config.fleet.groups)
            raise ConfigError(f"--prefill and --decode make groups, and the configuration has some: {groups}")
        resolved = settings.load(model=model.name, more=counted)
    config = resolved.config
    if instance is not None:
        _serve_instance(resolved, instance)
        return
    if any(find_spec(package) is None for package in NEEDED):
        raise MissingExtraError("the HTTP server", "serve")
    if config.fleet.groups:
        if record_trace is not None:
            raise ConfigError("--record-trace: a fleet records no trace yet; serve one engine for that")
        _serve_fleet(resolved, ray=ray)
        return
    if ray:
        raise ConfigError(
            "--ray is for a fleet: give --config FILE with fleet.groups, or --prefill and --decode"
        )
    from sagellm import serving
    from sagellm.benchmarks.traces.recorder import TraceRecorder

    try:
        with (
            serving.bind(config.server.host, config.server.port) as listener,
            event_bus(config) as events,
            TraceRecorder(record_trace, events, block_tokens=config.kv.block_size)
            if record_trace is not None
            else nullcontext(),
        ):
            serving.serve(
                load_llm(config, events, log_level=logging.INFO),
                config.server,
                listener=listener,
                log_level=config.log.level,
                log_format=config.log.format,
                log_requests=config.log.requests,
                config=config,
            )
    except KeyboardInterrupt:
        print("sagellm: ended at once by Ctrl-C", file=sys.stderr)
        # Python's own end would crash a thread that is within a step of the engine
        os._exit(EXIT_INTERRUPTED)


def _counted(prefill: int | None, decode: int | None) -> dict[str, Any]:
    """The fleet's groups that `--prefill` and `--decode` count."""
    from sagellm.control_plane.fleet_instances import counted_groups

    given = {"prefilling": prefill, "decoding": decode}
    counts = {word: count for word, count in given.items() if count is not None}
    return {"fleet.groups": counted_groups(counts)} if counts else {}


def _serve_fleet(resolved: Resolved, *, ray: bool) -> None:
    """Serve by several processes until a signal; a second Ctrl-C ends them at once."""
    from sagellm.control_plane.fleet_instances import check_groups
    from sagellm.serving.fleet.local_launcher import LocalLauncher
    from sagellm.serving.fleet.ray_launcher import RayLauncher
    from sagellm.serving.fleet.supervisor import Supervisor
    from sagellm.serving.server import bind

    config = resolved.config
    check_groups(resolved)
    set_up_logging(config.log.level, config.log.format)
    with bind(config.server.host, config.server.port) as listener:
        supervisor = Supervisor(resolved, listener, RayLauncher if ray else LocalLauncher)

        def end(signal_number: int, _frame: object) -> None:
            if supervisor.stopping and signal_number == signal.SIGINT:
                os._exit(EXIT_INTERRUPTED)  # its processes end with it
            supervisor.stop()

        before = {each: signal.signal(each, end) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            supervisor.run()
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


def _serve_instance(resolved: Resolved, name: str) -> None:
    """Serve one instance of a fleet, at its address in the file.

    Raises `ConfigError` if it has none, or if the file names no key.
    """
    from sagellm.control_plane.fleet_instances import (
        elsewhere,
        instance_config,
        number_on_host,
        publishing,
        shared_key,
    )
    from sagellm.serving.fleet.instance_process import instance_server, listening_endpoint, serve_instance

    found, key = elsewhere(name, resolved.config.fleet), shared_key(resolved.config.fleet)
    host, _, port = found.address.removeprefix("tcp://").rpartition(":")
    number = number_on_host(name, resolved.config.fleet)
    config = publishing(instance_config(resolved, found.group), resolved.config.events, name, number)
    set_up_logging(config.log.level, config.log.format)
    server = instance_server(
        {
            "name": name,
            "kind": found.type.value,
            "report_s": resolved.config.fleet.heartbeat_s,
            "endpoint": listening_endpoint(name, host, int(port), resolved.config.fleet.listen_host),
            "key": key,
            "config": config.model_dump(mode="json"),
            "rank": number,
            "host": host,
        }
    )
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda _number, _frame: server.stop())
    serve_instance(server)


@contextmanager
def event_bus(config: Config) -> Iterator[EventBus]:
    """An event bus. With `events.endpoint` set, its KV events are published until the end.

    Raises `MissingExtraError` without the extra, `ConfigError` for an endpoint that cannot be bound.
    """
    bus, events = EventBus(), config.events
    if events.endpoint is None:
        yield bus
        return
    from sagellm.control_plane.kv_events import KVEventPublisher

    with KVEventPublisher.of(bus, events, config.kv.block_size):
        yield bus
