"""Sequence numbers of batches: the replay buffer, and a reader's check for gaps.

Knows neither sockets nor msgpack."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from sagellm.core.errors import BookkeepingError

if TYPE_CHECKING:
    from sagellm.control_plane.kv_events.codec import KVEventBatch

SEQ_BYTES = 8
"""A sequence number on the wire: so many bytes, big-endian."""

END_OF_REPLAY = (-1).to_bytes(SEQ_BYTES, "big", signed=True)
"""The number of the message that ends a replay; its payload is empty."""


@dataclass(frozen=True, slots=True)
class ReceivedBatch:
    """One batch; `replayed` says that it came by a replay, not as it happened."""

    seq: int
    batch: KVEventBatch
    replayed: bool = False

    @property
    def ts(self) -> float:
        return self.batch.ts


@dataclass(frozen=True, slots=True)
class Malformed:
    """A batch that cannot be decoded; its events are lost to the reader."""

    seq: int
    reason: str

    @property
    def ts(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Gap:
    """Batches `first_seq` to `last_seq`, both included, are lost.

    They were neither received nor in the replay buffer. What the reader knows of this publisher may be wrong
    from here on, until all blocks are cleared. The wire form has no snapshot: a router treats what it knows
    of the publisher as a guess, and forgets the blocks whose removal it may have missed as they grow old."""

    first_seq: int
    last_seq: int

    @property
    def num_batches(self) -> int:
        return self.last_seq - self.first_seq + 1


@dataclass(frozen=True, slots=True)
class Restart:
    """The publisher counts from 0 again, where `expected_seq` should have come.

    It is another process, and no block that the former one stored is there."""

    expected_seq: int


Message = ReceivedBatch | Malformed
Item = ReceivedBatch | Malformed | Gap | Restart


class ReplayBuffer:
    """The last `num_batches` payloads sent, in order of number, perhaps with gaps."""

    def __init__(self, num_batches: int) -> None:
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=num_batches)

    def __len__(self) -> int:
        return len(self._sent)

    def append(self, seq: int, payload: bytes) -> None:
        self._sent.append((seq, payload))

    def since(self, start: int) -> Iterator[tuple[int, bytes]]:
        return ((seq, payload) for seq, payload in self._sent if seq >= start)

    def check(self) -> None:
        """Raise `BookkeepingError` unless the numbers ascend."""
        numbers = [seq for seq, _ in self._sent]
        if any(later <= earlier for earlier, later in pairwise(numbers)):
            raise BookkeepingError(f"replay buffer: sequence numbers do not ascend: {numbers}")


class SequenceTracker:
    """Puts batches in order and names what is missing.

    Every sequence number below `next_seq` was given out exactly once since the last `Restart`: as a message
    or inside a `Gap`. The wire form has no name for a run of a publisher, so a restart is told by numbers
    that go back, or by the last batch if the replay gives it with another time. One goes unnoticed where the
    first batch that arrives has the very number that was expected, or a higher one while the replay does not
    reach back to the last batch.
    """

    def __init__(self) -> None:
        self.next_seq = 0
        self._replayed_end = 0
        self._last_ts: float | None = None

    def catch_up(self, messages: Iterable[Message]) -> Iterator[Item]:
        """What a replay gave before anything was received; the same batches may yet arrive."""
        for message in messages:
            yield from self._take(message)
        self._replayed_end = self.next_seq

    def receive(self, message: Message, replay: Callable[[int], Sequence[Message]]) -> Iterator[Item]:
        """What follows from a message that arrived. `replay(start)` is asked where numbers are missing."""
        if self._is_repeat(message):
            return
        self._replayed_end = 0
        if message.seq < self.next_seq:
            yield self._restart()
        if message.seq > self.next_seq:
            missed = replay(max(0, self.next_seq - 1))
            if self._is_another_run(missed):
                yield self._restart()
                missed = replay(0)
            for earlier in missed:
                if earlier.seq < message.seq:
                    yield from self._take(earlier)
        yield from self._take(message)

    def _is_repeat(self, message: Message) -> bool:
        """Whether the catch-up has given it. A restarted publisher uses the same numbers at a later time."""
        if message.seq >= self._replayed_end:
            return False
        return message.ts is None or self._last_ts is None or message.ts <= self._last_ts

    def _is_another_run(self, missed: Sequence[Message]) -> bool:
        """Whether the last batch has another time now.

        Within a run a step's time never changes."""
        if not missed or missed[0].seq != self.next_seq - 1:
            return False
        return None not in (missed[0].ts, self._last_ts) and missed[0].ts != self._last_ts

    def _restart(self) -> Restart:
        restart = Restart(self.next_seq)
        self.next_seq = 0
        self._last_ts = None
        return restart

    def _take(self, message: Message) -> Iterator[Item]:
        if message.seq < self.next_seq:
            return
        if message.seq > self.next_seq:
            yield Gap(self.next_seq, message.seq - 1)
        self.next_seq = message.seq + 1
        self._last_ts = message.ts
        yield message

    def check(self) -> None:
        """Raise `BookkeepingError` where the numbers contradict each other."""
        if not 0 <= self._replayed_end <= self.next_seq:
            raise BookkeepingError(f"replayed up to {self._replayed_end}, but next is {self.next_seq}")
