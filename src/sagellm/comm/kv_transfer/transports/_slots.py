"""`SlotTransport`: payloads lie in slots of one chunk; messages go over the socket.

A sender makes a chunk in a slot of its own and posts the slot's number. The receiver takes the bytes from
there, in a way that a subclass knows, and says that the slot is free. Where no slot is free, the sender
waits: that is what bounds this memory.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from dataclasses import dataclass, field
from typing import NamedTuple

from sagellm.comm.kv_transfer.transports._connection import (
    CHUNK,
    SLOT,
    FrameHead,
    OutFrame,
    PeerSocket,
    frame,
)
from sagellm.comm.kv_transfer.transports._stream import StreamTransport
from sagellm.core.errors import ConfigError, KVDataError
from sagellm.core.protocols.kv_transfer import Message

NUM_SLOTS = 16
MAX_SLOTS = 1 << 10
SLOT_FREE = 255
"""A message of these transports: the head has the numbers of slots."""


class SlotSizes(NamedTuple):
    """What a peer has said of its slots."""

    num_slots: int
    slot_bytes: int


@dataclass(slots=True)
class Slots:
    """Memory in slots. At the sender, `free` are not in use, and `tokens` name the chunks in the others."""

    memory: memoryview
    slot_bytes: int
    address: int
    free: list[int] = field(default_factory=list)
    tokens: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, memory: memoryview, slot_bytes: int) -> Slots:
        return cls(memory, slot_bytes, address_of(memory))

    def slot(self, number: int, num_bytes: int) -> memoryview:
        start = number * self.slot_bytes
        return self.memory[start : start + num_bytes]

    def number_of(self, part: memoryview) -> int | None:
        """The slot in which a payload lies."""
        if part.readonly:
            return None
        offset = address_of(part) - self.address
        return offset // self.slot_bytes if 0 <= offset < len(self.memory) else None


class SlotTransport(StreamTransport):
    """What a sender does with its slots, and how a receiver gives them back.

    A subclass calls `_have_slots` first. It fills `_slots` by link: at the sender its own slots, at a
    receiver that maps them the peer's; and `_sizes` by link, of the peer's. `_take_slot` takes a chunk.
    """

    def _have_slots(self, num_slots: int) -> None:
        """Raises `ConfigError` for too many."""
        if not 1 <= num_slots <= MAX_SLOTS:
            raise ConfigError(f"a link has 1 to {MAX_SLOTS} slots, not {num_slots}")
        self._num_slots = num_slots
        self._slots: dict[int, Slots] = {}
        self._sizes: dict[int, SlotSizes] = {}
        self._freed: list[tuple[PeerSocket, int]] = []
        self._lock = threading.RLock()
        """Guards slots."""

    def _take_slot(self, connection: PeerSocket, found: FrameHead, head: bytes) -> None:
        """A chunk lies in the peer's slot `found.slot`. Once it is taken, `_give_back`."""
        raise AssertionError("a subclass takes chunks")

    # -- at the sender

    def reserve(self, link: int, num_bytes: int) -> memoryview | None:
        with self._lock:
            slots = self._slots.get(link)
            if slots is None or num_bytes > slots.slot_bytes:
                return None
            if not slots.free:
                raise BlockingIOError("all slots are in use")
            return slots.slot(slots.free.pop(), num_bytes)

    def discard(self, link: int, memory: memoryview) -> None:
        with self._lock:
            slots = self._slots.get(link)
            number = None if slots is None else slots.number_of(memory)
            if slots is not None and number is not None:
                slots.free.append(number)

    def _framed(self, connection: PeerSocket, message: Message) -> OutFrame:
        with self._lock:
            slots = self._slots.get(connection.link)
            number = None
            if message.is_chunk and slots is not None and len(message.payload) == 1:
                number = slots.number_of(memoryview(message.payload[0]))
            if number is None or slots is None:
                return super()._framed(connection, message)
            slots.tokens[number] = message.token
        payload = [memoryview(message.payload[0])]
        buffers = frame(message.kind, message.head, payload, SLOT, number)
        return OutFrame(buffers, message.token, in_slot=True)

    def _forget(self, connection: PeerSocket) -> list[int]:
        with self._lock:
            slots = self._slots.pop(connection.link, None)
            self._sizes.pop(connection.link, None)
        in_slots = [] if slots is None else list(slots.tokens.values())
        return super()._forget(connection) + in_slots

    def _take_message(self, connection: PeerSocket, message: Message) -> None:
        if message.kind != SLOT_FREE:
            super()._take_message(connection, message)
            return
        numbers = struct.unpack(f"<{len(message.head) // 2}H", message.head[: len(message.head) // 2 * 2])
        tokens = []
        with self._lock:
            slots = self._slots.get(connection.link)
            for number in numbers:
                if slots is not None and number in slots.tokens:  # else it is a duplicate
                    tokens.append(slots.tokens.pop(number))
                    slots.free.append(number)
        for token in tokens:
            self._endpoint.sent(connection.link, token)

    # -- at the receiver

    def _take_chunk(self, connection: PeerSocket, found: FrameHead, head: bytes) -> None:
        if found.flag == CHUNK:
            super()._take_chunk(connection, found, head)
            return
        sizes = self._sizes.get(connection.link)
        if sizes is None or found.slot >= sizes.num_slots:
            raise KVDataError(f"a payload in slot {found.slot}, which is not shared")
        if found.payload_bytes > sizes.slot_bytes:
            raise KVDataError(f"a payload of {found.payload_bytes} bytes in a slot of {sizes.slot_bytes}")
        connection.left -= found.payload_bytes
        self._expect_frame(connection)
        self._take_slot(connection, found, head)

    def _give_back(self, connection: PeerSocket, slot: int) -> None:
        """The bytes in a slot of the peer were taken, or are not wanted."""
        if not self._freed:
            self._submit(self._tell_freed)
        self._freed.append((connection, slot))

    def _tell_freed(self) -> None:
        """One message for all slots of a connection that were taken from meanwhile."""
        freed: dict[int, list[int]] = {}
        for connection, slot in self._freed:
            if self._connections.get(connection.link) is connection:
                freed.setdefault(connection.link, []).append(slot)
        self._freed.clear()
        for link, slots in freed.items():
            self._post(link, Message(SLOT_FREE, struct.pack(f"<{len(slots)}H", *slots)))


def address_of(memory: memoryview) -> int:
    """Where writable memory lies in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
