"""Which blocks of another instance can be taken, and how they are converted.

On the wire, blocks have the order of the receiver's layout, and the heads that both sides have. The sender
reorders, the receiver only puts its heads in place; between equal layouts neither does anything.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sagellm.comm.kv_transfer.messages import PROTOCOL, Hello
from sagellm.comm.kv_transfer.options import LEAST_CHUNK_BYTES
from sagellm.core.errors import KVDataError
from sagellm.core.protocols.kv_tiers import Buffer
from sagellm.core.protocols.kv_transfer import AXES, ITEM_BYTES, BlockLayout

_ORDER = ("kv", "layer", "token", "head", "dim")
assert set(_ORDER) == AXES


class Agreement(NamedTuple):
    """What two sides found in their handshake.

    `wire_bytes`: of a block on the wire. `source`, `wire` and `target` are the layouts of blocks at the
    sender, on the wire and at the receiver, where they are not all equal; else all are None. `codec` may be
    empty. A side that has a transfer wait says every `beat_s` that it is alive.
    """

    wire_bytes: int
    chunk_bytes: int
    codec: str
    has_views: bool
    source: BlockLayout | None = None
    wire: BlockLayout | None = None
    target: BlockLayout | None = None
    beat_s: float = 1.0

    @property
    def goes_unchanged(self) -> bool:
        """Whether parts of blocks go as they are, so that several share a message."""
        return self.has_views and not self.codec

    @property
    def is_reordered(self) -> bool:
        """Whether the sender's blocks are not on the wire as they are."""
        return self.source != self.wire

    @property
    def is_partial(self) -> bool:
        """Whether the wire has a part of the receiver's heads."""
        return self.target != self.wire


def agree(sender: Hello, receiver: Hello) -> Agreement:
    """How blocks of one side reach the other. Raises `KVDataError`, which says what differs."""
    if sender.protocol != receiver.protocol or sender.protocol != PROTOCOL:
        raise KVDataError(
            f"protocols {sender.protocol} and {receiver.protocol}: run the same version on both sides"
        )
    _same(
        "model fingerprint", sender.fingerprint, receiver.fingerprint, "load the same weights on both sides"
    )
    chunk_bytes = min(sender.chunk_bytes, receiver.chunk_bytes)
    if chunk_bytes < LEAST_CHUNK_BYTES:
        raise KVDataError(f"chunks of {chunk_bytes} bytes: set chunk_bytes to {LEAST_CHUNK_BYTES} or more")
    codec = sender.codec if sender.codec == receiver.codec else ""
    has_views = sender.has_views and receiver.has_views
    beat_s = max(10, min(sender.stall_ms, receiver.stall_ms)) / 4000
    if sender.digest == receiver.digest and sender.bytes_per_block == receiver.bytes_per_block:
        equal = Agreement(receiver.bytes_per_block, chunk_bytes, codec, has_views, beat_s=beat_s)
        if (sender.axes, sender.first_head, sender.num_heads) == (
            receiver.axes, receiver.first_head, receiver.num_heads,
        ):  # fmt: skip
            return equal
    source, target = sender.layout, receiver.layout
    if source is None or target is None:
        raise KVDataError(
            "the layouts of blocks differ, and at least one side has a layout that is not converted "
            "(several KV groups, latent attention, layers of different shapes): use equal engines"
        )
    for name, hint in _MUST_MATCH.items():
        _same(name, getattr(source, name), getattr(target, name), hint)
    first, last = max(source.first_head, target.first_head), min(source.last_head, target.last_head)
    if first >= last:
        raise KVDataError(
            f"heads {source.first_head} to {source.last_head - 1} and {target.first_head} to "
            f"{target.last_head - 1} have none in common: send to the rank that has them"
        )
    wire = target.of_heads(first, last)
    if source == wire == target:
        return Agreement(wire.bytes_per_block, chunk_bytes, codec, has_views, beat_s=beat_s)
    return Agreement(wire.bytes_per_block, chunk_bytes, codec, False, source, wire, target, beat_s)


_MUST_MATCH = {
    "dtype": "set model.dtype to the same on both sides",
    "block_size": "set kv.block_size to the same on both sides",
    "num_layers": "load the same model on both sides",
    "total_heads": "load the same model on both sides",
    "head_dim": "load the same model on both sides",
}


def _same(name: str, ours: object, theirs: object, hint: str) -> None:
    if ours != theirs:
        raise KVDataError(f"{name}: {ours} at the sender, {theirs} at the receiver; {hint}")


def reorder(source: BlockLayout, data: Buffer, target: BlockLayout, result: Buffer) -> None:
    """Copy the heads that both layouts have from `data` to `result`, whole blocks each."""
    first, last = max(source.first_head, target.first_head), min(source.last_head, target.last_head)
    np.copyto(_heads(target, result, first, last), _heads(source, data, first, last))


def _heads(layout: BlockLayout, data: Buffer, first: int, last: int) -> npt.NDArray[Any]:
    """Heads `[first, last)` of the model: [block, kv, layer, token, head, dim]."""
    names = layout.axes.split(".")
    numbers = np.frombuffer(data, f"u{ITEM_BYTES[layout.dtype]}").reshape(-1, *layout.shape)
    ordered = numbers.transpose(0, *(1 + names.index(axis) for axis in _ORDER))
    return ordered[:, :, :, :, first - layout.first_head : last - layout.first_head]
