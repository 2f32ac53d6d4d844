"""`FabricTransport`: a library reads chunks out of the sender's memory. For NIXL, Mooncake.

Messages go over a TCP socket that has authenticated, and one of them describes the sender's slots. For each
chunk the receiver has the library read a slot of the sender into a slot of its own, and copies from there
into blocks. So nothing but its own reads writes to a receiver's memory, and it knows when each of them has
ended. A peer that wrote might go on after its link was lost.

Memory that a library has registered stays so until the library is closed. A peer whose link was lost may
read from it late, and reads of this side may still arrive: both would meet memory of something else.
"""

from __future__ import annotations

import logging
import mmap
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from sagellm.comm.kv_transfer.transports._connection import SMALL, OutFrame, PeerSocket, frame
from sagellm.comm.kv_transfer.transports._slots import (
    MAX_SLOTS,
    NUM_SLOTS,
    Slots,
    SlotSizes,
    SlotTransport,
    UsedSlot,
)
from sagellm.comm.kv_transfer.transports._stream import AUTH_S
from sagellm.comm.kv_transfer.transports.tcp import TcpTransport
from sagellm.core.blocks import cdiv
from sagellm.core.clock import Clock
from sagellm.core.errors import KVDataError
from sagellm.core.ports import SagePorts
from sagellm.core.protocols.kv_transfer import ChunkPlace, Message

log = logging.getLogger("sagellm.kv_transfer")
SLOTS = 254
"""A message of these transports: where the sender's slots are. The payload is for the library."""
MAX_DESCRIPTION_BYTES = 256 << 10
LEAST_PAUSE_S, LONGEST_PAUSE_S, IDLE_PAUSE_S = 20e-6, 1e-3, 20e-3
"""Between two looks whether reads are done; the last one after the connection was lost."""
CLOSE_S = 5.0
"""A library that has not returned by then is left open."""
_SLOTS = struct.Struct("<QIQ")


class Fabric(Protocol):
    """A library that copies memory of another process into memory of this one.

    Both are registered with it. Called by the thread of a transport and by one thread for each peer. What
    fails raises `OSError`.
    """

    def register(self, memory: memoryview) -> bytes:
        """What a peer's `connect` needs to read this memory. It stays registered until `close`."""

    def offered(self) -> None:
        """A peer will read soon. Returns at once."""

    def connect(self, description: bytes) -> Any:
        """A peer. May wait for the network."""

    def read(self, peer: Any, local: int, remote: int, num_bytes: int) -> Any:
        """Begin to copy from the address `remote` to `local`. May wait for the network."""

    def is_done(self, read: Any) -> bool:
        """Whether a read has ended; raises if it failed. Asked no more after that."""

    def disconnect(self, peer: Any) -> None:
        """All reads of the peer have ended."""

    def close(self) -> None:
        """Nothing is read or written any more. Called once, when `connect` and `read` have returned."""


@dataclass(slots=True)
class Region:
    """Registered memory: slots for sending, or for reading into."""

    slots: Slots
    description: bytes


class FabricTransport(SlotTransport, TcpTransport):
    """Implements `TransportEngine` over a `Fabric`, which it closes.

    `host`, `port` and `advertise`: of the socket for messages. A link has `num_slots` slots on each side.
    """

    _max_together = 1
    """A chunk is taken as soon as its read has ended."""

    def __init__(
        self, fabric: Fabric, key: bytes, host: str = "127.0.0.1", port: int = SagePorts.KV_TRANSFER,
        num_slots: int = NUM_SLOTS, auth_s: float = AUTH_S, clock: Clock | None = None, advertise: str = "",
    ) -> None:  # fmt: skip
        self._have_slots(num_slots)
        super().__init__(key, host, port, auth_s, clock, advertise)
        self._fabric = fabric
        self._regions: dict[int, Region] = {}
        """Of the links that send."""
        self._left: list[Region] = []
        """Their links were lost while chunks were made in their slots."""
        self._idle: list[Region] = []
        self._readers: dict[int, _Reader] = {}
        self._running: set[_Reader] = set()

    def close(self) -> None:
        super().close()
        with self._lock:
            readers = list(self._running)
        for reader in readers:
            reader.join(CLOSE_S)
        if any(reader.is_alive() for reader in readers):
            log.warning("%s waits for a peer and does not return: it is left open", self.name)
            return
        for reader in readers:
            reader.give_up()
        self._fabric.close()

    def _take_region(self) -> Region:
        """Registered memory whose slots are all free."""
        with self._lock:
            region = self._idle.pop() if self._idle else None
        if region is None:
            slot_bytes = cdiv(self.max_payload_bytes, mmap.PAGESIZE) * mmap.PAGESIZE
            memory = memoryview(mmap.mmap(-1, slot_bytes * self._num_slots))
            region = Region(Slots.of(memory, slot_bytes), self._fabric.register(memory))
        region.slots.free = list(range(self._num_slots))
        return region

    # -- at the sender

    def _open(self, connection: PeerSocket) -> None:
        if connection.is_ours:
            region = self._take_region()
            with self._lock:
                self._regions[connection.link] = region
                self._slots[connection.link] = region.slots
            head = _SLOTS.pack(region.slots.slot_bytes, self._num_slots, region.slots.address)
            described = frame(SLOTS, head, [memoryview(region.description)], SMALL)
            connection.outgoing.append(OutFrame(described))
        super()._open(connection)

    def _forget(self, connection: PeerSocket) -> list[int]:
        reader = self._readers.pop(connection.link, None)
        if reader is not None:
            reader.end()
        with self._lock:
            tokens = super()._forget(connection)
            region = self._regions.pop(connection.link, None)
            if region is not None:
                region.slots.free.extend(region.slots.tokens)
                region.slots.tokens.clear()
                self._left.append(region)
                self._keep_idle()
        return tokens

    def discard(self, link: int, memory: memoryview) -> None:
        if not self._is_of_lost_link(memory):
            super().discard(link, memory)

    def _post(self, link: int, message: Message) -> None:
        """Send no chunk that was made for a lost connection: its transfer begins anew."""
        payload = message.payload
        if message.is_chunk and len(payload) == 1 and self._is_of_lost_link(memoryview(payload[0])):
            self._endpoint.sent(link, message.token)
        else:
            super()._post(link, message)
            if message.is_chunk:
                self._fabric.offered()

    def _is_of_lost_link(self, memory: memoryview) -> bool:
        """Whether it is a slot of a lost link. The slot is free then."""
        with self._lock:
            for region in self._left:
                number = region.slots.number_of(memory)
                if number is not None:
                    region.slots.free.append(number)
                    self._keep_idle()
                    return True
        return False

    def _keep_idle(self) -> None:
        """Regions are for other links once nothing is made in them any more. With the lock."""
        self._idle += [each for each in self._left if len(each.slots.free) == self._num_slots]
        self._left = [each for each in self._left if len(each.slots.free) < self._num_slots]

    # -- at the receiver

    def _take_message(self, connection: PeerSocket, message: Message) -> None:
        if message.kind != SLOTS:
            super()._take_message(connection, message)
            return
        if connection.is_ours or connection.link in self._readers or len(message.head) != _SLOTS.size:
            raise KVDataError("slots are described once, by the side that connects")
        slot_bytes, num_slots, address = _SLOTS.unpack(message.head)
        description = b"".join(message.payload)
        if num_slots > MAX_SLOTS or address + slot_bytes * num_slots > 1 << 64:
            raise KVDataError(f"a peer has {num_slots} slots of {slot_bytes} bytes")
        if len(description) > MAX_DESCRIPTION_BYTES:
            raise KVDataError(f"slots are described by at most {MAX_DESCRIPTION_BYTES} bytes")
        reader = _Reader(self, connection, description, address, slot_bytes)
        self._sizes[connection.link] = SlotSizes(num_slots, slot_bytes)
        self._readers[connection.link] = reader
        with self._lock:
            self._running.add(reader)
        reader.start()

    def _take_slots(
        self, connection: PeerSocket, head: bytes, num_bytes: int, slots: Sequence[UsedSlot]
    ) -> None:
        if len(slots) > self._max_together:
            raise KVDataError(f"a message with {len(slots)} slots: a read is of one")
        place = self._endpoint.place(connection.link, head, num_bytes)
        if place is None:
            self._give_back(connection, slots)
        else:
            self._readers[connection.link].submit(_Chunk(slots[0], place))


class _Chunk(NamedTuple):
    """A chunk in a peer's slot, and where it goes."""

    used: UsedSlot
    place: ChunkPlace


class _Read(NamedTuple):
    """A read that is on its way. `handle` is the library's; `slot` is here."""

    handle: Any
    chunk: _Chunk
    slot: int


class _Reader(threading.Thread):
    """Reads the chunks of one connection.

    It is a thread, since a library may wait for the network. When the connection is lost, it waits for the
    reads that are on their way. Before that, the memory into which they come is not used for anything else.
    """

    def __init__(
        self, transport: FabricTransport, connection: PeerSocket, description: bytes, address: int,
        slot_bytes: int,
    ) -> None:  # fmt: skip
        super().__init__(name=f"sagellm-kv-{transport.name}", daemon=True)
        self._transport, self._connection, self._fabric = transport, connection, transport._fabric
        self._description, self._address, self._slot_bytes = description, address, slot_bytes
        self._waiting: deque[_Chunk] = deque()
        self._active: list[_Read] = []
        self._changed = threading.Condition()
        self._filling = threading.Lock()
        """Held while blocks are written to, so that `end` waits for that."""
        self._is_ended = False

    def submit(self, chunk: _Chunk) -> None:
        with self._changed:
            self._waiting.append(chunk)
            self._changed.notify()

    def end(self) -> None:
        """The connection is lost: write to no block any more, and call no endpoint."""
        with self._filling:
            self._is_ended = True
        with self._changed:
            self._waiting.clear()
            self._changed.notify()

    def give_up(self) -> None:
        """Forget reads that are on their way: closing the library ends them."""
        self._active.clear()

    def run(self) -> None:
        region = peer = None
        try:
            region = self._transport._take_region()
            peer = self._fabric.connect(self._description)
            self._serve(region.slots, peer)
        except OSError as error:
            self._fail(error)
        except Exception as error:
            log.exception("reading the slots of a peer failed")
            self._fail(error)
        if self._active:  # the transport is closing
            return
        if peer is not None:
            with suppress(OSError):  # it may be gone
                self._fabric.disconnect(peer)
        with self._transport._lock:
            self._transport._running.discard(self)
            if region is not None:
                self._transport._idle.append(region)

    def _serve(self, slots: Slots, peer: Any) -> None:
        """Read until the connection is lost and no read is on its way."""
        pause_s = LEAST_PAUSE_S
        while not self._transport._is_closing:
            with self._changed:
                while not (self._waiting or self._active or self._is_ended):
                    self._changed.wait()
                if self._is_ended and not self._active:
                    return
                chunks = [self._waiting.popleft() for _ in range(min(len(self._waiting), len(slots.free)))]
            num_before = len(self._active)
            try:
                for chunk in chunks:
                    self._begin(chunk, slots, peer)
                num_before = len(self._active)
                self._take_finished(slots)
            except OSError as error:
                self._fail(error)
            if chunks or len(self._active) < num_before:
                pause_s = LEAST_PAUSE_S
            else:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, IDLE_PAUSE_S if self._is_ended else LONGEST_PAUSE_S)

    def _begin(self, chunk: _Chunk, slots: Slots, peer: Any) -> None:
        slot = slots.free[-1]
        local = slots.address + slot * slots.slot_bytes
        remote = self._address + chunk.used.number * self._slot_bytes
        handle = self._fabric.read(peer, local, remote, chunk.used.num_bytes)
        self._active.append(_Read(handle, chunk, slots.free.pop()))

    def _take_finished(self, slots: Slots) -> None:
        """Fill the places of chunks that have come. Raises if a read has failed."""
        for each in list(self._active):
            has_ended = True
            try:
                has_ended = self._fabric.is_done(each.handle)
                if has_ended:
                    self._fill(each.chunk, slots.slot(each.slot, each.chunk.used.num_bytes))
            finally:
                if has_ended:
                    self._active.remove(each)
                    slots.free.append(each.slot)

    def _fill(self, chunk: _Chunk, data: memoryview) -> None:
        transport, connection = self._transport, self._connection
        with self._filling:
            if self._is_ended:
                return
            chunk.place.write([data])
            transport._endpoint.filled(connection.link, chunk.place)
        transport._submit(lambda: transport._give_back(connection, [chunk.used]))

    def _fail(self, error: Exception) -> None:
        """Have the connection lost; the other side connects again."""
        transport, connection, reason = (
            self._transport,
            self._connection,
            f"its slots cannot be read: {error}",
        )
        self.end()
        transport._submit(lambda: transport._lose(connection, reason))
