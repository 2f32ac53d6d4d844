"""The event bus of a served model, and the publisher of its KV events where one is configured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sagellm.core.config import Config
from sagellm.core.events import EventBus


@contextmanager
def event_bus(config: Config) -> Iterator[EventBus]:
    """A bus; with `events.endpoint` set, what happens on it to KV blocks is published until the end.

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
