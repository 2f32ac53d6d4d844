"""KV events for routers: what the prefix index stores and removes.

Published in vLLM's wire form. Importing this package needs neither msgspec nor pyzmq; fetching a name from it
does (extra `events`)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sagellm.control_plane.kv_events.codec import (
        AllBlocksCleared,
        BlockRemoved,
        BlockStored,
        KVEventBatch,
        KVEventError,
        WireForm,
        decode_batch,
        encode_batch,
        from_wire,
        salt_digest,
        to_wire,
    )
    from sagellm.control_plane.kv_events.publisher import KVEventPublisher
    from sagellm.control_plane.kv_events.sequence import Gap, Malformed, ReceivedBatch, Restart
    from sagellm.control_plane.kv_events.subscriber import KVEventSubscriber

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "Gap",
    "KVEventBatch",
    "KVEventError",
    "KVEventPublisher",
    "KVEventSubscriber",
    "Malformed",
    "ReceivedBatch",
    "Restart",
    "WireForm",
    "decode_batch",
    "encode_batch",
    "from_wire",
    "salt_digest",
    "to_wire",
]

_HOMES = {
    "KVEventPublisher": "publisher",
    "KVEventSubscriber": "subscriber",
    "Gap": "sequence",
    "Malformed": "sequence",
    "ReceivedBatch": "sequence",
    "Restart": "sequence",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'codec')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
