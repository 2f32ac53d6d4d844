"""Settings of a channel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias

from sagellm.comm.kv_transfer.messages import MAX_TOGETHER
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.kv_tiers import KVCodec
from sagellm.core.protocols.kv_transfer import BlockLayout
from sagellm.core.types import Namespace

HashesOf: TypeAlias = Callable[[bytes, Namespace], Sequence[bytes]]
"""The chained hash of each whole block, from the int32 bytes of tokens."""
CodecOf: TypeAlias = Callable[[BlockLayout | None], KVCodec]
"""Makes the codec of blocks with a layout; None where they have none that can be named."""


LEAST_CHUNK_BYTES = 1024
"""Of a chunk: a transfer of smaller ones would take more memory for its books than for its blocks."""


@dataclass(frozen=True, slots=True)
class ChannelOptions:
    """Settings of a channel.

    `credits`: chunks of an arrival on their way, at least one for each rank that sends heads of it;
    `max_credits`: of all arrivals. `together`: chunks of one message, at most; each has a checksum and a
    credit of its own.

    An offer waits for room at most `offer_wait_s`. After `stall_s` without progress a transfer is given up
    or, if its link shows no sign of life either, the link is disconnected. A transfer is tried `num_retries`
    times more, with a pause of `backoff_s` that doubles; so is a damaged chunk, without a pause. An ended
    transfer whose blocks a link still reads gets `drain_s`, and at most `stall_s` while the link is alive;
    then the link is disconnected. Offers of a link beyond `max_offers` are sent back. A transfer whose link
    was lost is reported to this engine if it is not offered again within `resume_s`.
    """

    chunk_bytes: int = 1 << 20
    together: int = 8
    credits: int = 16
    max_credits: int = 128
    stall_s: float = 10.0
    drain_s: float = 1.0
    num_retries: int = 2
    backoff_s: float = 0.05
    max_offers: int = 256
    offer_wait_s: float = 5.0
    resume_s: float = 2.0

    def __post_init__(self) -> None:
        for option in fields(self):
            value, least = getattr(self, option.name), 0 if option.name == "num_retries" else 1e-9
            if value < least:
                raise ConfigError(f"KV transfer: {option.name} must be above 0, not {value}")
        if self.chunk_bytes < LEAST_CHUNK_BYTES:
            raise ConfigError(
                f"KV transfer: chunk_bytes is {self.chunk_bytes}, at least {LEAST_CHUNK_BYTES}; 1 MB is fast"
            )
        if self.together > MAX_TOGETHER:
            raise ConfigError(f"KV transfer: together is {self.together}, at most {MAX_TOGETHER}")
        if self.credits > self.max_credits or self.offer_wait_s >= self.stall_s:
            raise ConfigError("KV transfer: max_credits is at least credits, stall_s above offer_wait_s")
