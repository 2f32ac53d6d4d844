"""`ArrivingChunks`: where the chunks of accepted transfers go, whether they verify, and their ACKs."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain

from sagellm.comm.kv_transfer.blocks import RAW, InstanceBlocks, scratch
from sagellm.comm.kv_transfer.chunks import ChunkSpan
from sagellm.comm.kv_transfer.incoming import Incoming
from sagellm.comm.kv_transfer.messages import Ack, ChunkHead, Kind
from sagellm.core.checksums import checksums, copy_with_checksums
from sagellm.core.errors import KVDataError
from sagellm.core.protocols.kv_transfer import Message, TransportEngine

log = logging.getLogger("sagellm.kv_transfer")


class Place:
    """Implements `ChunkPlace`. `pieces` are the blocks of chunks, or memory from which they are filled.

    `checksums`: of what was written, if they were computed then.
    """

    __slots__ = (
        "_blocks", "_found", "_num_bytes", "checksums", "chunks", "head", "ids", "in_place", "incoming",
        "pieces",
    )  # fmt: skip

    def __init__(
        self, incoming: Incoming, head: ChunkHead, chunks: Sequence[ChunkSpan], ids: Sequence[Sequence[int]],
        pieces: Sequence[Sequence[memoryview]], blocks: InstanceBlocks | None,
    ) -> None:  # fmt: skip
        self.incoming, self.head, self.chunks = incoming, head, chunks
        self.ids, self.pieces = ids, pieces
        self._blocks, self.in_place = blocks, blocks is not None
        self.checksums: Sequence[int] | None = None
        self._found: list[int] = []
        """Checksums of chunks that were received whole."""
        self._num_bytes = 0
        """Received of the next chunk."""

    @property
    def views(self) -> Sequence[memoryview]:
        return list(chain.from_iterable(self.pieces))

    @property
    def lock(self) -> threading.Lock:
        return self.incoming.target.lock

    @property
    def is_open(self) -> bool:
        return self.incoming.target.is_open

    def received(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        while self.in_place and self._num_bytes >= self.chunks[len(self._found)].num_bytes:
            self._num_bytes -= self.chunks[len(self._found)].num_bytes
            self._found += checksums([self.pieces[len(self._found)]])
            if len(self._found) == len(self.chunks):
                self.checksums = self._found
                return

    def write(self, data: Sequence[memoryview]) -> None:
        with self.lock:
            if not self.is_open:
                return
            if self._blocks is None:
                self.checksums = copy_with_checksums([(self.pieces[0], data)])
            else:
                parts = split(data, [chunk.num_bytes for chunk in self.chunks])
                self.checksums = self._blocks.fill(self.ids, self.chunks, self.pieces, parts)


class ArrivingChunks:
    """Places chunks, verifies them, and acknowledges them.

    Methods are called with the channel's lock held, but for `verify`.
    """

    def __init__(
        self, transport: TransportEngine, blocks: InstanceBlocks, changed: threading.Condition
    ) -> None:
        self._transport, self._blocks, self._changed = transport, blocks, changed
        self._unsent: dict[tuple[int, int, int], tuple[list[int], list[int]]] = {}
        """By link, transfer and epoch: chunks that have verified, and chunks that have not."""
        self.num_late = self.num_damaged = 0

    def place(self, incoming: Incoming | None, head: ChunkHead, num_bytes: int, now: float) -> Place | None:
        """Where chunks of a message go; None if not all of them are expected.

        Raises `KVDataError` for more chunks than credits.
        """
        numbers = head.numbers
        if incoming is None or not incoming.expects(head.epoch, numbers):
            self.num_late += len(numbers)
            return None
        if len(incoming.pending) + len(numbers) > incoming.credits:
            raise KVDataError(f"more than {incoming.credits} chunks without credit")
        incoming.progress_s = now
        chunks = incoming.plan[numbers.start : numbers.stop]
        is_in_place = head.codec == RAW and not incoming.waiting.agreed.is_partial and self._blocks.has_views
        if not _fits(head, incoming, chunks, num_bytes) or (len(chunks) > 1 and not is_in_place):
            self._acknowledge(incoming, (), numbers)
            return None
        incoming.pending.update(numbers)
        block_ids = incoming.target.arrival.block_ids
        ids = [block_ids[chunk.first : chunk.stop] for chunk in chunks]
        if not is_in_place:
            return Place(incoming, head, chunks, ids, [[scratch(num_bytes)]], None)
        pieces = [self._blocks.views(each, chunk) for each, chunk in zip(ids, chunks, strict=True)]
        return Place(incoming, head, chunks, ids, pieces, self._blocks)

    def verify(self, place: Place) -> set[int]:
        """Verify chunks, and bring them to their blocks if they are not there. Returns those that are good.

        Without the lock.
        """
        incoming, head = place.incoming, place.head
        try:
            found = checksums(place.pieces) if place.checksums is None else place.checksums
            checked = zip(head.numbers, found, head.checksums, strict=True)
            good = {number for number, ours, theirs in checked if ours == theirs}
            if good and not place.in_place:
                agreed, [chunk] = incoming.waiting.agreed, place.chunks
                data = self._blocks.decoded(head.codec, place.pieces[0][0], chunk.num_bytes, agreed)
                with place.lock:
                    if place.is_open:
                        self._blocks.write(place.ids[0], agreed, data)
        except KVDataError:
            return set()
        except Exception:
            log.exception("a chunk of %s could not be taken", incoming.waiting.offer.request_id)
            return set()
        return good

    def land(self, place: Place, now: float, good: set[int]) -> bool:
        """Acknowledge chunks, of which these are good. Returns whether they make their transfer whole."""
        incoming, numbers = place.incoming, place.head.numbers
        incoming.pending.difference_update(numbers)
        if incoming.failure is not None or not incoming.target.is_open:
            return False
        incoming.landed |= good
        damaged = [number for number in numbers if number not in good] if len(good) < len(numbers) else ()
        self.num_damaged += len(damaged)
        incoming.progress_s = now
        self._acknowledge(incoming, good, damaged)
        return incoming.is_whole

    def _acknowledge(self, incoming: Incoming, good: Iterable[int], damaged: Iterable[int]) -> None:
        if not self._unsent:
            self._transport.call(self._send_acks)
        unsent = self._unsent.setdefault((*incoming.key, incoming.target.arrival.epoch), ([], []))
        unsent[0].extend(good)
        unsent[1].extend(damaged)

    def _send_acks(self) -> None:
        """One message for all chunks of a transfer that were verified meanwhile."""
        with self._changed:
            unsent, self._unsent = self._unsent, {}
        for (link, transfer, epoch), (good, damaged) in unsent.items():
            ack = Ack(transfer, epoch, tuple(good), tuple(damaged))
            self._transport.post(link, Message(Kind.ACK, ack.pack()))


def _fits(head: ChunkHead, incoming: Incoming, chunks: Sequence[ChunkSpan], num_bytes: int) -> bool:
    stop = max([chunk.stop for chunk in chunks])
    if head.codec == RAW:
        is_as_agreed = num_bytes == sum([chunk.num_bytes for chunk in chunks])
    else:
        is_as_agreed = head.codec == incoming.waiting.agreed.codec
    return (
        is_as_agreed
        and head.digest.hex() == incoming.waiting.sender.digest
        and head.token_hash == incoming.target.hashes[stop - 1]
    )


def split(data: Sequence[memoryview], sizes: Sequence[int]) -> list[list[memoryview]]:
    """The same bytes, as one list of parts for each size."""
    if [part.nbytes for part in data] == sizes:
        return [[part] for part in data]
    parts, found = deque(data), []
    for size in sizes:
        chunk: list[memoryview] = []
        while size:
            part = parts.popleft()
            if len(part) > size:
                parts.appendleft(part[size:])
                part = part[:size]
            chunk.append(part)
            size -= len(part)
        found.append(chunk)
    return found
