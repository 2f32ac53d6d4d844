"""What a `Sender` keeps of a transfer."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sagellm.comm.kv_transfer.chunks import ChunkSpan
from sagellm.comm.kv_transfer.messages import Accept
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.kv_transfer import KVPath, Ticket, TransferStatus
from sagellm.core.types import BlockIds


@dataclass(slots=True)
class Outgoing:
    """One transfer. `credits`: chunks that may be sent now; `in_flight`: sent and not acknowledged.

    It will have `num_blocks` blocks; `block_ids` are those that are known. `computed[i]`: so many leading
    blocks have layer i, never more than have layer i - 1. Chunks of the plan are in `lacking`, by the layers
    that they need, until these are computed; then they are in `todo`.

    `num_posted`: messages whose payload a transport may still read. `outcome`: how it ends, once that is
    known; it is reported when nothing reads its blocks any more.
    """

    ticket: Ticket
    path: KVPath
    target: str
    link: int
    by_layer: bool
    num_blocks: int
    computed: list[int]
    began_s: float
    progress_s: float
    block_ids: BlockIds = field(default_factory=lambda: array("i"))
    num_attempts: int = 0
    num_offers: int = 0
    offer_s: float | None = None
    """When it is to be offered again; None: it is offered."""
    accept: Accept | None = None
    plan: Sequence[ChunkSpan] = ()
    hashes: Sequence[bytes] = ()
    lacking: dict[int, deque[int]] = field(default_factory=dict)
    todo: deque[int] = field(default_factory=deque)
    in_flight: set[int] = field(default_factory=set)
    left: Counter[int] = field(default_factory=Counter)
    """How many chunks the target does not have yet, by their layer; whole blocks count for the first."""
    failures: Counter[int] = field(default_factory=Counter)
    credits: int = 0
    accepted_s: float = 0.0
    num_landed: int = 0
    """Chunks since then."""
    num_posted: int = 0
    is_pumping: bool = False
    num_bytes: int = 0
    num_tokens: int = 0
    said_s: float = 0.0
    """When the target was last told that this side is alive."""
    outcome: TransferStatus | None = None
    reason: str = ""
    ended_s: float = 0.0

    @property
    def number(self) -> int:
        return self.ticket.transfer_id

    # -- what may be sent

    def begin(self, accept: Accept, plan: Sequence[ChunkSpan], max_credits: int, now: float) -> None:
        """The target takes it."""
        self.accepted_s, self.num_landed = now, 0
        self.accept, self.plan, self.credits = accept, plan, min(accept.credits, max_credits)
        self.left.clear()
        for number, chunk in enumerate(plan):
            needed = chunk.num_layers or len(self.computed)
            self.lacking.setdefault(needed, deque()).append(number)
            self.left[chunk.num_layers or 1] += 1
        for num_layers in list(self.lacking):
            self._make_ready(num_layers)

    def begin_anew(self, offer_s: float) -> None:
        """Its link was lost, or its target is silent: it is offered again then."""
        self.offer_s, self.accept, self.plan, self.credits = offer_s, None, (), 0
        self.lacking.clear()
        self.todo.clear()
        self.in_flight.clear()

    def extend(self, block_ids: Sequence[int]) -> None:
        """Know more of its blocks. Raises `ConfigError` for more than it will have."""
        if len(self.block_ids) + len(block_ids) > self.num_blocks:
            known = len(self.block_ids)
            raise ConfigError(f"a transfer of {self.num_blocks} blocks, {known} known, gets {len(block_ids)}")
        self.block_ids.extend(block_ids)

    def note_computed(self, num_layers: int, num_blocks: int) -> None:
        """The first layers of the first blocks are computed. Raises `ConfigError` for what it has not."""
        if not (0 <= num_layers <= len(self.computed) and 0 <= num_blocks <= len(self.block_ids)):
            raise ConfigError(
                f"{num_layers} layers of {num_blocks} blocks are computed, of {len(self.computed)} layers "
                f"and {len(self.block_ids)} blocks that are known"
            )
        first = num_layers
        while first and self.computed[first - 1] < num_blocks:
            first -= 1
        for layer in range(first, num_layers):
            self.computed[layer] = num_blocks
            self._make_ready(layer + 1)

    def _make_ready(self, num_layers: int) -> None:
        """Chunks that need so many layers, and have them, may be sent."""
        numbers, end = self.lacking.get(num_layers), self.computed[num_layers - 1]
        while numbers and self.accept is not None and self.accept.first + self.plan[numbers[0]].stop <= end:
            self.todo.append(numbers.popleft())
        if not numbers:
            self.lacking.pop(num_layers, None)

    def landed(self, numbers: Iterable[int]) -> None:
        """The target has these chunks."""
        for number in self.in_flight.intersection(numbers):
            self.in_flight.remove(number)
            self.left[self.plan[number].num_layers or 1] -= 1
            self.credits += 1
            self.num_landed += 1

    @property
    def layers_there(self) -> int | None:
        """How many layers the target has of all blocks; None without an ACCEPT."""
        if self.accept is None:
            return None
        lacking = (layer for layer, count in self.left.items() if count)
        return min(lacking, default=len(self.computed) + 1) - 1

    def num_within(self, time_s: float, now: float, most: int) -> int:
        """How many chunks will land within such a time: 1 to `most`.

        As many as have since its target took it.
        """
        spent_s = now - self.accepted_s
        if self.num_landed * time_s >= most * spent_s:
            return most
        return max(1, int(self.num_landed * time_s / spent_s))

    def next_chunks(self, most: int) -> range:
        """Take chunks that follow one another and may be sent now.

        They are in flight from then on. None, while chunks on their way will bring credits for `most`:
        messages would become small for good.
        """
        todo, num_credits = self.todo, self.credits + len(self.in_flight)
        most = min(most, len(todo), (num_credits + 1) // 2)
        if self.outcome is not None or not most or (self.credits < most and self.in_flight):
            return range(0)
        most = min(most, self.credits)
        first = stop = todo[0]
        while todo and todo[0] == stop and stop - first < most:
            todo.popleft()
            stop += 1
        numbers = range(first, stop)
        self.in_flight.update(numbers)
        self.credits -= len(numbers)
        return numbers

    def take_back(self, numbers: range) -> None:
        """The chunks were not sent."""
        for number in reversed(numbers):
            if number in self.in_flight:
                self.in_flight.remove(number)
                self.todo.appendleft(number)
                self.credits += 1

    # -- what it waits for

    @property
    def waits_for_layers(self) -> bool:
        """Whether its next chunk is not computed yet, and none is on its way."""
        return self.outcome is None and bool(self.lacking) and not self.todo and not self.in_flight

    @property
    def is_quiet(self) -> bool:
        """Whether nothing reads its blocks."""
        return not self.num_posted and not self.is_pumping
