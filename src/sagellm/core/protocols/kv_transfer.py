"""Contract of KV transfer: blocks of one instance's pool into the pool of another.

    ticket = channel.transfer(blocks, target_node)      returns at once
    for report in channel.poll(): ...                   never blocks

The receiver allocates first and the sender frees last: a transfer that fails at any point leaves the source
as it was and the target with blocks that it gives back. What does not verify at the target (fingerprint,
dtype, layout, token hash, checksum) counts as not sent: a miss, never an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from sagellm.core.types import KVCacheSchema, KVChunk, TransportPlan


class TransferStatus(Enum):
    """Outcome of a transfer.

    `RETRY`: the target had no room or the link was down; nothing changed, and the same call may succeed
    later. `REFUSED`: the schemas differ, so it never will. `CORRUPT`: bytes arrived that failed verification.
    """

    PENDING = "pending"
    DONE = "done"
    RETRY = "retry"
    REFUSED = "refused"
    CORRUPT = "corrupt"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Ticket:
    """Names one transfer on its channel."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class TransferReport:
    """How far a transfer is. `num_tokens` counts from the first token on, without gaps, what the target may
    use."""

    ticket: Ticket
    status: TransferStatus
    num_tokens: int
    bytes_sent: int
    duration_s: float
    reason: str = ""


class KVTransferChannel(Protocol):
    """From one instance to others. Single-threaded; the bytes move behind `poll`."""

    def transfer(self, blocks: Sequence[KVChunk], target_node: str) -> Ticket:
        """Begin. The caller keeps the blocks pinned until the report that ends the ticket."""

    def poll(self) -> Sequence[TransferReport]:
        """Reports since the last call: at most one per ticket, exactly one ends it."""

    def cancel(self, ticket: Ticket) -> None:
        """Stop the transfer as soon as possible. The ticket still ends with a report, which may be `DONE`."""

    def close(self) -> None: ...


class TransportEngine(Protocol):
    """The bytes below channels. Cuts a plan into messages, keeps several in flight, reports what arrived."""

    def negotiate(self, target_node: str, schema: KVCacheSchema) -> TransferStatus:
        """Ask whether the target takes blocks of this schema as they are. `DONE` if so, else `REFUSED`, or
        `RETRY` if it does not answer."""

    def submit(self, plan: TransportPlan) -> Ticket: ...

    def poll(self) -> Sequence[TransferReport]: ...

    def bandwidth_bytes_per_s(self, target_node: str) -> float | None:
        """What recent transfers reached, or None before the first: the migration planner reads it."""
