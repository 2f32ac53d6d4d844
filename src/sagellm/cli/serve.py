"""`sagellm serve`: the OpenAI-compatible HTTP server."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from sagellm.cli._loading import load_llm
from sagellm.cli._options import Model, command, flag
from sagellm.cli._settings import ServerSettings
from sagellm.cli.run import EXIT_INTERRUPTED
from sagellm.core.errors import MissingExtraError
from sagellm.core.events import EventBus

if TYPE_CHECKING:
    from sagellm.core.config import Config, ServerConfig
    from sagellm.serving import ClientLimits

NEEDED = ("fastapi", "uvicorn", "prometheus_client")


@command
def serve(
    record_trace: Annotated[
        Path | None, flag("--record-trace FILE", "Record requests, as ids of their blocks.")
    ] = None,
    *,
    model: Model,
    settings: ServerSettings,
) -> None:
    """Serve a model over HTTP as OpenAI's API until Ctrl-C."""
    config = settings.load(model=model.name).config
    if any(find_spec(package) is None for package in NEEDED):
        raise MissingExtraError("the HTTP server", "serve")
    from sagellm import serving
    from sagellm.benchmarks.traces.recorder import TraceRecorder

    server = config.server
    limits = serving.ConnectionLimits(
        max_connections=server.max_connections,
        header_timeout_s=server.header_timeout_s,
        send_timeout_s=server.send_timeout_s,
        keep_alive_timeout_s=server.keep_alive_timeout_s,
    )
    try:
        with (
            serving.bind(server.host, server.port) as listener,
            event_bus(config) as events,
            TraceRecorder(record_trace, events, block_tokens=config.kv.block_size)
            if record_trace is not None
            else nullcontext(),
        ):
            serving.serve(
                load_llm(config, events, log_level=logging.INFO),
                listener=listener,
                log_level=config.log.level,
                log_format=config.log.format,
                log_requests=config.log.requests,
                limits=limits,
                grace_s=server.shutdown_grace_s,
                config=config,
                api_key=server.api_key,
                client_keys=server.client_keys,
                client_limits=_client_limits(server),
                admin_key=server.admin_key,
                cors_origins=server.cors_origins,
                max_waiting=server.max_waiting,
                max_body_bytes=server.max_body_bytes,
                body_timeout_s=server.body_timeout_s,
            )
    except KeyboardInterrupt:
        print("sagellm: ended at once by Ctrl-C", file=sys.stderr)
        os._exit(
            EXIT_INTERRUPTED
        )  # Python's own end would crash a thread that is within a step of the engine


def _client_limits(server: ServerConfig) -> ClientLimits:
    from sagellm.serving import ClientLimits

    return ClientLimits(
        max_n=server.max_n,
        max_request_tokens=server.max_request_tokens,
        max_client_tokens=server.max_client_tokens,
        waiting_share=server.client_waiting_share,
        max_priority=server.max_priority,
        tier_priorities=server.tier_priorities,
        trust_user=server.trust_user,
    )


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

    with KVEventPublisher(
        bus,
        events.endpoint,
        events.replay_endpoint,
        events.topic,
        block_size=config.kv.block_size,
        buffer_steps=events.buffer_steps,
        hash_form=events.hash_form,
    ):
        yield bus
