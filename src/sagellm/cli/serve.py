"""`sagellm serve`: the OpenAI-compatible HTTP server."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from sagellm.cli._loading import load_llm
from sagellm.cli._options import Model, command, flag
from sagellm.cli._settings import ServerSettings
from sagellm.cli.run import EXIT_INTERRUPTED
from sagellm.core.errors import MissingExtraError
from sagellm.core.events import EventBus

if TYPE_CHECKING:
    from sagellm.core.config import Config

NEEDED = ("fastapi", "uvicorn", "prometheus_client")


@command
def serve(
    record_trace: Path | None = flag("--record-trace FILE", "Record requests, as ids of their blocks."),
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
