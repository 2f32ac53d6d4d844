"""`ArrivingChunks`: where the chunks of accepted transfers go, whether they verify, and their ACKs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from sagellm.comm.kv_transfer.blocks import RAW, InstanceBlocks, scratch
from sagellm.comm.kv_transfer.chunks import ChunkSpan
from sagellm.comm.kv_transfer.incoming import Incoming
from sagellm.comm.kv_transfer.messages import Ack, ChunkHead, Kind
from sagellm.core.checksums import checksum, copy_with_checksum
from sagellm.core.errors import KVDataError
from sagellm.core.protocols.kv_tiers import FORMAT_VERSION
from sagellm.core.protocols.kv_transfer import Message, TransportEngine

log = logging.getLogger("sagellm.kv_transfer")


class Place:
    """Implements `ChunkPlace`. `views` are the blocks themselves, or memory from which they are filled.

    `checksum`: of what was written, if it was computed then. `blocks`: those of `views`, if it is they.
    """

    __slots__ = ("_blocks", "checksum", "chunk", "head", "ids", "in_place", "incoming", "views")

    def __init__(
        self, incoming: Incoming, head: ChunkHead, ids: Sequence[int], views: list[memoryview],
        blocks: InstanceBlocks | None,
    ) -> None:  # fmt: skip
        self.incoming, self.head, self.ids, self.views = incoming, head, ids, views
        self.chunk = incoming.plan[head.number]
        self._blocks, self.in_place = blocks, blocks is not None
        self.checksum: int | None = None

    @property
    def lock(self) -> threading.Lock:
        return self.incoming.target.lock

    @property
    def is_open(self) -> bool:
        return self.incoming.target.is_open

    def write(self, data: memoryview) -> None:
        with self.lock:
            if not self.is_open:
                return
            if self._blocks is None:
                self.checksum = copy_with_checksum(self.views, [data])
            else:
                self.checksum = self._blocks.fill(self.ids, self.chunk, self.views, data)


class ArrivingChunks:
    """Places chunks, verifies them, and acknowledges them.

    Methods are called with the channel's lock held, but for `verify`.
    """

    def __init__(
        self, transport: TransportEngine, blocks: InstanceBlocks, changed: threading.Condition
    ) -> None:
        self._transport, self._blocks, self._changed = transport, blocks, changed
        self._unsent: list[tuple[Incoming, int, bool]] = []
        self.num_late = self.num_damaged = 0

    def place(self, incoming: Incoming | None, head: ChunkHead, num_bytes: int, now: float) -> Place | None:
        """Where a chunk goes; None if it is not expected.

        Raises `KVDataError` for more chunks than credits.
        """
        if incoming is None or not incoming.expects(head.epoch, head.number):
            self.num_late += 1
            return None
        if len(incoming.pending) >= incoming.credits:
            raise KVDataError(f"more than {incoming.credits} chunks without credit")
        incoming.progress_s = now
        chunk = incoming.plan[head.number]
        if not _fits(head, incoming, chunk, num_bytes):
            self._acknowledge(incoming, head.number, ok=False)
            return None
        incoming.pending.add(head.number)
        ids = incoming.target.arrival.block_ids[chunk.first : chunk.stop]
        if head.header.codec != RAW or incoming.waiting.agreed.is_partial or not self._blocks.has_views:
            return Place(incoming, head, ids, [scratch(num_bytes)], None)
        return Place(incoming, head, ids, self._blocks.views(ids, chunk), self._blocks)

    def verify(self, place: Place) -> bool:
        """Verify a chunk, and bring it to its blocks if it is not there. Without the lock."""
        incoming, header = place.incoming, place.head.header
        try:
            found = checksum(place.views) if place.checksum is None else place.checksum
            if found != header.checksum:
                return False
            if not place.in_place:
                data = self._blocks.decoded(header.codec, place.views[0], place.chunk.num_bytes)
                with place.lock:
                    if place.is_open:
                        self._blocks.write(place.ids, incoming.waiting.agreed, data)
        except KVDataError:
            return False
        except Exception:
            log.exception("a chunk of %s could not be taken", incoming.waiting.offer.request_id)
            return False
        return True

    def land(self, place: Place, now: float, *, ok: bool) -> bool:
        """Acknowledge a chunk. Returns whether it makes its transfer whole."""
        incoming, number = place.incoming, place.head.number
        incoming.pending.discard(number)
        if incoming.failure is not None or not incoming.target.is_open:
            return False
        if ok:
            incoming.landed.add(number)
        else:
            self.num_damaged += 1
        incoming.progress_s = now
        self._acknowledge(incoming, number, ok=ok)
        return incoming.is_whole

    def _acknowledge(self, incoming: Incoming, number: int, *, ok: bool) -> None:
        if not self._unsent:
            self._transport.call(self._send_acks)
        self._unsent.append((incoming, number, ok))

    def _send_acks(self) -> None:
        """One message for all chunks of a transfer that were verified meanwhile."""
        with self._changed:
            unsent, self._unsent = self._unsent, []
        found: dict[tuple[int, int, int], tuple[list[int], list[int]]] = {}
        for incoming, number, ok in unsent:
            key = *incoming.key, incoming.target.arrival.epoch
            found.setdefault(key, ([], []))[0 if ok else 1].append(number)
        for (link, transfer, epoch), (good, damaged) in found.items():
            ack = Ack(transfer, epoch, tuple(good), tuple(damaged))
            self._transport.post(link, Message(Kind.ACK, ack.pack()))


def _fits(head: ChunkHead, incoming: Incoming, chunk: ChunkSpan, num_bytes: int) -> bool:
    header, agreed = head.header, incoming.waiting.agreed
    return (
        header.version == FORMAT_VERSION
        and header.format_digest.hex() == incoming.waiting.sender.digest
        and header.token_hash == incoming.target.hashes[chunk.stop - 1]
        and header.num_bytes == num_bytes
        and (num_bytes == chunk.num_bytes if header.codec == RAW else header.codec == agreed.codec)
    )
