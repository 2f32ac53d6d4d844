"""From an engine to its KV transfers. Part of `build.py`: it joins modules and holds no logic."""

from __future__ import annotations

from functools import partial

from sagellm.comm.kv_transfer.channel import TransferChannel
from sagellm.comm.kv_transfer.chunks import can_cut_by_layer
from sagellm.comm.kv_transfer.options import ChannelOptions
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.kv_tiers import BlockBytes, KVCodec
from sagellm.core.protocols.kv_transfer import BlockLayout, TransportEngine
from sagellm.engines.build_kv import hashes_of
from sagellm.engines.engine import Engine
from sagellm.engines.transfers import KVTransfers


def build_transfers(
    engine: Engine,
    node: str,
    transport: TransportEngine,
    *,
    first_head: int = 0,
    total_heads: int = 0,
    codec: str = "raw",
    options: ChannelOptions | None = None,
) -> KVTransfers:
    """KV transfers of an engine, under the name `node`.

    With tensor parallelism an engine's rank has the KV heads from `first_head` on, of `total_heads`. `codec`:
    how chunks are encoded, if the other side has the same. Raises `ConfigError` for an engine whose KV cannot
    be sent: its backend gives no blocks, or its model has sliding windows or recurrent states.
    """
    source, arrivals = getattr(engine.backend, "kv_bytes", None), engine.kv.arrivals
    if source is None or arrivals is None:
        raise ConfigError(
            "KV of this engine cannot be sent: it needs kv.prefix_caching, a backend that gives its blocks "
            "as bytes, and a model without sliding windows and recurrent states"
        )
    memory: BlockBytes = source()
    schema, axes = engine.backend.get_kv_schema(), getattr(engine.backend, "block_axes", str)()
    layout = None
    if axes:
        layout = BlockLayout(
            axes, schema.num_layers, total_heads or schema.num_kv_heads, schema.head_dim, schema.block_size,
            schema.dtype, first_head, schema.num_kv_heads,
        )  # fmt: skip
    channel = TransferChannel(
        node, transport, memory, schema, layout, arrivals, partial(hashes_of, schema.block_size),
        codec=_codec(codec, schema.dtype), options=options, clock=engine.clock,
    )  # fmt: skip
    by_layer = bool(getattr(memory, "has_views", False)) and can_cut_by_layer(layout)
    return KVTransfers(engine, channel, memory.follow_steps, by_layer=by_layer)


def _codec(name: str, dtype: str) -> KVCodec | None:
    if name == "raw":
        return None
    from sagellm.kvmgr.kv_pool.tiers.codecs import CODECS

    return CODECS.create(name, dtype=dtype)
