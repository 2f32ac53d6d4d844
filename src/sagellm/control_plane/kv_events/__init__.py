"""KV events for routers: what the prefix index stores and removes.

Published in vLLM's wire form."""

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
