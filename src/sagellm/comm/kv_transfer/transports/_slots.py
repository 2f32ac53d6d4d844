"""`SlotTransport`: payloads lie in slots of one chunk; messages go over the socket.

A sender makes each chunk in a slot of its own, and posts the numbers of the slots behind the head of their
message. The receiver takes the bytes from there, in a way that a subclass knows, and says that the slots are
free. Where no slot is free, the sender waits: that is what bounds this memory.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sagellm.comm.kv_transfer.messages import MAX_TOGETHER
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
_SLOT = struct.Struct("<HI")


class SlotSizes(NamedTuple):
    """What a peer has said of its slots."""

    num_slots: int
    slot_bytes: int


class UsedSlot(NamedTuple):
    """A slot of a message, and how much is in it."""

    number: int
    num_bytes: int


@dataclass(slots=True)
class Slots:
    """Memory in slots. At the sender, `free` are not in use. `tokens` name what is in others that were sent,

    for the last slot of a message; None for its others.
    """

    memory: memoryview
    slot_bytes: int
    address: int
    free: list[int] = field(default_factory=list)
    tokens: dict[int, int | None] = field(default_factory=dict)

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
    receiver that maps them the peer's; and `_sizes` by link, of the peer's. `_take_slots` takes chunks.
    """

    _max_together = MAX_TOGETHER
    """Slots of one message."""

    def _have_slots(self, num_slots: int) -> None:
        """Raises `ConfigError` for too many."""
        if not 1 <= num_slots <= MAX_SLOTS:
            raise ConfigError(f"a link has 1 to {MAX_SLOTS} slots, not {num_slots}")
        self._num_slots = num_slots
        self._slots: dict[int, Slots] = {}
        self._sizes: dict[int, SlotSizes] = {}
        self._freed: dict[int, tuple[PeerSocket, list[int]]] = {}
        """By link, slots of the peer that were taken from."""
        self._lock = threading.RLock()
        """Guards slots."""

    def _take_slots(
        self, connection: PeerSocket, head: bytes, num_bytes: int, slots: Sequence[UsedSlot]
    ) -> None:
        """Chunks lie in slots of the peer. Once they are taken, `_give_back`."""
        raise AssertionError("a subclass takes chunks")

    # -- at the sender

    def reserve(
        self, link: int, num_bytes: int, count: int = 1, *, is_registered: bool = False
    ) -> Sequence[memoryview] | None:
        with self._lock:
            slots = self._slots.get(link)
            if slots is None or num_bytes > slots.slot_bytes:
                return None
            count = min(count, self._max_together, (self._num_slots + 1) // 2)
            if len(slots.free) < count:  # soon there are more
                raise BlockingIOError(f"less than {count} slots are free")
            return [slots.slot(slots.free.pop(), num_bytes) for _ in range(count)]

    def discard(self, link: int, memory: memoryview) -> None:
        with self._lock:
            slots = self._slots.get(link)
            number = None if slots is None else slots.number_of(memory)
            if slots is not None and number is not None:
                slots.free.append(number)

    def _framed(self, connection: PeerSocket, message: Message) -> OutFrame:
        used = self._in_slots(connection.link, message) if message.is_chunk else []
        if not used:
            return super()._framed(connection, message)
        payload = [memoryview(part) for part in message.payload]
        head = message.head + b"".join([_SLOT.pack(*each) for each in used])
        return OutFrame(frame(message.kind, head, payload, SLOT, len(used)), message.token, peer_reads=True)

    def _in_slots(self, link: int, message: Message) -> list[UsedSlot]:
        """Where its chunks are; nothing, if not all of them are in slots. Slots are in use from then on."""
        found: list[UsedSlot] = []
        with self._lock:
            slots = self._slots.get(link)
            for part in message.payload if slots is not None else ():
                view = memoryview(part)
                number = None if slots is None else slots.number_of(view)
                if number is None:
                    return []
                found.append(UsedSlot(number, len(view)))
            if slots is not None and found:
                slots.tokens.update(dict.fromkeys([each.number for each in found]))
                slots.tokens[found[-1].number] = message.token
        return found

    def _forget(self, connection: PeerSocket) -> list[int]:
        with self._lock:
            slots = self._slots.pop(connection.link, None)
            self._sizes.pop(connection.link, None)
        in_slots = [] if slots is None else [each for each in slots.tokens.values() if each is not None]
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
            if token is not None:
                self._endpoint.sent(connection.link, token)

    # -- at the receiver

    def _take_chunk(self, connection: PeerSocket, found: FrameHead, head: bytes) -> None:
        if found.flag == CHUNK:
            super()._take_chunk(connection, found, head)
            return
        sizes, named_bytes = self._sizes.get(connection.link), found.num_parts * _SLOT.size
        if sizes is None or not found.num_parts or len(head) < named_bytes:
            raise KVDataError(f"a payload in {found.num_parts} slots, which are not shared")
        used = [UsedSlot(*each) for each in _SLOT.iter_unpack(head[len(head) - named_bytes :])]
        for each in used:
            if each.number >= sizes.num_slots or each.num_bytes > sizes.slot_bytes:
                raise KVDataError(f"{each.num_bytes} bytes in slot {each.number}: there are {sizes}")
        if sum([each.num_bytes for each in used]) != found.payload_bytes:
            raise KVDataError(f"a payload of {found.payload_bytes} bytes in {used}")
        connection.left -= found.payload_bytes
        self._expect_frame(connection)
        self._take_slots(connection, head[: len(head) - named_bytes], found.payload_bytes, used)

    def _give_back(self, connection: PeerSocket, slots: Sequence[UsedSlot]) -> None:
        """The bytes in slots of the peer were taken, or are not wanted."""
        if not self._freed:
            self._submit(self._tell_freed)
        freed = self._freed.get(connection.link)
        if freed is None or freed[0] is not connection:
            self._freed[connection.link] = freed = connection, []
        freed[1].extend([each.number for each in slots])

    def _tell_freed(self) -> None:
        """One message for all slots of a connection that were taken from meanwhile."""
        freed, self._freed = self._freed, {}
        for link, (connection, slots) in freed.items():
            if self._connections.get(link) is connection:
                self._post(link, Message(SLOT_FREE, struct.pack(f"<{len(slots)}H", *slots)))


def address_of(memory: memoryview) -> int:
    """Where writable memory lies in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
