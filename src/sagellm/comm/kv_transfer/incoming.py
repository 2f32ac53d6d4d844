"""What a `Receiver` keeps of the transfers that come."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from sagellm.comm.kv_transfer.chunks import ChunkSpan
from sagellm.comm.kv_transfer.layouts import Agreement
from sagellm.comm.kv_transfer.messages import Hello, Offer
from sagellm.core.protocols.kv_tiers import Arrival
from sagellm.core.protocols.kv_transfer import TransferStatus
from sagellm.core.types import Tokens

Path: TypeAlias = tuple[str, tuple[str, ...], int]
Key: TypeAlias = tuple[int, int]
"""A link, and the number of a transfer on it."""


@dataclass(slots=True)
class Waiting:
    """An offer that was not answered yet. `said_s`: when its sender was last told that this side is alive."""

    link: int
    sender: Hello
    agreed: Agreement
    offer: Offer
    tokens: Tokens
    note: bytes
    since_s: float
    said_s: float

    @property
    def key(self) -> Key:
        return self.link, self.offer.transfer

    @property
    def beat_s(self) -> float:
        """When its sender is to be told again that this side is alive."""
        return self.said_s + self.agreed.beat_s

    @property
    def identity(self) -> tuple[str, int]:
        """Names the transfer, on whichever link it comes."""
        return self.sender.instance, self.offer.transfer

    @property
    def path(self) -> Path:
        """Equal, as are the tokens, for ranks that send heads of one path."""
        return self.offer.request_id, self.offer.namespace, self.offer.num_blocks


class Lost(NamedTuple):
    """A transfer that had begun when its link was lost."""

    waiting: Waiting
    reason: str
    since_s: float


@dataclass(slots=True, eq=False)
class ArrivalBlocks:
    """The blocks of an arrival, which several transfers may fill. No thread writes to them after `close`.

    The transfers share its `credits`.
    """

    arrival: Arrival
    credits: int
    transfers: list[Incoming] = field(default_factory=list, repr=False)
    hashes: Sequence[bytes] = ()
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_open: bool = True

    def close(self) -> None:
        """Wait for the copy that is under way, which waits for no network."""
        with self.lock:
            self.is_open = False

    @property
    def is_covered(self) -> bool:
        """Whether all heads of its blocks come."""
        target = self.transfers[0].waiting.agreed.target
        if target is None or not self.transfers[0].waiting.agreed.is_partial:
            return True
        found = set().union(*(heads_of(each.waiting) for each in self.transfers))
        return found == set(range(target.first_head, target.last_head))

    def share_of(self, waiting: Waiting) -> int:
        """The credits of a transfer: by its share of the heads, at least one."""
        target = waiting.agreed.target
        if target is None or not waiting.agreed.is_partial:
            return self.credits
        return max(1, self.credits * len(heads_of(waiting)) // target.num_heads)


@dataclass(slots=True, eq=False)
class Incoming:
    """One transfer.

    Chunks are `pending` from their arrival until they are verified; then they are `landed`. `is_lost`: it
    failed since its link was lost, so it may be offered again.
    """

    waiting: Waiting
    target: ArrivalBlocks
    plan: Sequence[ChunkSpan]
    credits: int
    progress_s: float
    pending: set[int] = field(default_factory=set)
    landed: set[int] = field(default_factory=set)
    failure: tuple[TransferStatus, str] | None = None
    is_lost: bool = False
    num_leading: int = 0
    """Chunks that have landed, from the first on, as far as `num_layers` has looked."""

    @property
    def key(self) -> Key:
        return self.waiting.key

    def expects(self, epoch: int, numbers: range) -> bool:
        """Whether chunks are of this transfer, neither late nor duplicates."""
        if self.failure is not None or epoch != self.target.arrival.epoch or numbers.stop > len(self.plan):
            return False
        return self.landed.isdisjoint(numbers) and self.pending.isdisjoint(numbers)

    @property
    def is_whole(self) -> bool:
        return len(self.landed) == len(self.plan)

    @property
    def is_complete(self) -> bool:
        """Whether it is whole, and waits for no rank that has not begun."""
        return self.is_whole and self.target.is_covered

    def num_layers(self) -> int:
        """Leading layers that have landed whole. 0 for a transfer that is not by layer."""
        plan = self.plan
        while self.num_leading < len(plan) and self.num_leading in self.landed:
            self.num_leading += 1
        if self.num_leading == len(plan):
            return plan[-1].num_layers if plan else 0
        return max(0, plan[self.num_leading].num_layers - 1)

    def num_whole(self) -> int:
        """Leading blocks of which all bytes are there and verified."""
        return min(
            (chunk.first for number, chunk in enumerate(self.plan) if number not in self.landed),
            default=len(self.target.arrival.block_ids),
        )


def heads_of(waiting: Waiting) -> set[int]:
    wire = waiting.agreed.wire
    return set() if wire is None else set(range(wire.first_head, wire.last_head))
