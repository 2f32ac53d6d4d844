"""`PlainEvents`: the KV events of a plain server as `KVChanges`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import msgspec

from sagellm.control_plane.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventError,
    KVEventSubscriber,
    ReceivedBatch,
    Restart,
    from_wire,
)
from sagellm.control_plane.kv_events.codec import KVEvent
from sagellm.core.events import IndexCleared
from sagellm.core.protocols.fleet import KVChanges

MOST_TOGETHER = 256
"""Batches that are handed over together at most."""


class PlainEvents:
    """Reads one publisher from `start` to `close`, on a thread of its own.

    It begins with what is replayed, or else with what is sent from now on. `give` is called on that thread.
    `is_fresh`: all events have been read since the server's cache was empty. Without a replay that is known
    from its first batch on. Raises `ConfigError` for an endpoint that cannot be one.
    """

    def __init__(
        self, endpoint: str, replay: str | None, topic: str, give: Callable[[KVChanges], None]
    ) -> None:
        self._subscriber = KVEventSubscriber(endpoint, replay, topic)
        self._give = give
        self._is_closed = False
        self._is_complete = True
        self.is_fresh = replay is not None
        self.num_evicted = 0
        self._thread = threading.Thread(target=self._read, name=f"KV events of {endpoint}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Nothing is given any more when this returns."""
        self._is_closed = True
        self._subscriber.close()
        if self._thread.ident is not None:
            self._thread.join()

    def _read(self) -> None:
        while not self._is_closed:
            for changes in self._next_changes():
                self.is_fresh = self._is_complete
                if not self._is_closed:
                    self._give(changes)

    def _next_changes(self) -> Iterator[KVChanges]:
        """Wait for something, and take what else is there."""
        events: list[KVEvent] = []
        timeout_s: float | None = None
        for _ in range(MOST_TOGETHER):
            try:
                item = self._subscriber.poll(timeout_s)
                if item is None:
                    break
                if isinstance(item, ReceivedBatch):
                    for each in item.batch.events:
                        events += self._event(each)
                elif isinstance(item, Restart):
                    events.append(IndexCleared())
                    self._is_complete = True
                else:  # a gap, or what cannot be read
                    raise KVEventError(str(item))
            except KVEventError:
                self._is_complete = False
                if events:
                    yield KVChanges(events)
                    events = []
                yield KVChanges([], is_complete=False)
            timeout_s = 0.0
        if events:
            yield KVChanges(events)

    def _event(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> list[KVEvent]:
        """The event of the bus.

        None for further KV groups of a model: the first stands for all."""
        if isinstance(event, AllBlocksCleared):
            self._is_complete = True
        elif event.group_idx:
            return []
        elif isinstance(event, BlockRemoved):
            self.num_evicted += len(event.block_hashes)
        elif not event.cache_salt and event.parent_block_hash is None:
            event = msgspec.structs.replace(event, cache_salt=_salt(event))
        return [from_wire(event)]


def _salt(event: BlockStored) -> str | None:
    """The salt of a prompt.

    In vLLM's form it is the last of the first block's extra keys."""
    keys = event.extra_keys[0] if event.extra_keys else None
    texts = [key for key in keys or () if isinstance(key, str) and key != event.lora_name]
    return texts[-1] if texts else None
