"""`SharedMemoryTransport`: instances on one host. Payloads lie in memory that both map.

The side that connects makes slots of one chunk each and sends their file descriptor with its proof of the
key. A chunk is made in a slot, and its receiver copies it from there into blocks; messages go over a Unix
socket. Where no slot is free, the sender waits for the receiver: that is what bounds this memory.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sagellm.comm.kv_transfer.transports._auth import EXTRA_BYTES
from sagellm.comm.kv_transfer.transports._connection import (
    CHUNK,
    SLOT,
    FrameHead,
    OutFrame,
    PeerSocket,
    frame,
)
from sagellm.comm.kv_transfer.transports._stream import AUTH_S, StreamTransport
from sagellm.core.blocks import cdiv
from sagellm.core.clock import Clock
from sagellm.core.errors import ConfigError, KVDataError
from sagellm.core.protocols.kv_transfer import Message

log = logging.getLogger("sagellm.kv_transfer")
NUM_SLOTS = 8
SLOT_FREE = 255
"""A message of this transport: the head has the numbers of slots."""
MAX_SHARED_BYTES = 1 << 37
"""Of a link. Memory is taken as slots are used."""
_CREDENTIALS = struct.Struct("iII")
"""The process, user and group of a peer."""
_EXTRA = struct.Struct("<QI")
assert _EXTRA.size == EXTRA_BYTES


@dataclass(slots=True)
class Slots:
    """Memory in slots. At the sender, `free` are not in use, and `tokens` name the chunks in the others."""

    memory: memoryview
    slot_bytes: int
    address: int
    free: list[int] = field(default_factory=list)
    tokens: dict[int, int] = field(default_factory=dict)

    @classmethod
    def map(cls, fd: int, slot_bytes: int, num_slots: int) -> Slots:
        memory = memoryview(mmap.mmap(fd, slot_bytes * num_slots))
        return cls(memory, slot_bytes, _address(memory))

    def slot(self, number: int, num_bytes: int) -> memoryview:
        start = number * self.slot_bytes
        return self.memory[start : start + num_bytes]

    def number_of(self, part: memoryview) -> int | None:
        """The slot in which a payload lies."""
        if part.readonly:
            return None
        offset = _address(part) - self.address
        return offset // self.slot_bytes if 0 <= offset < len(self.memory) else None


class SharedMemoryTransport(StreamTransport):
    """Implements `TransportEngine`. `key`: the same on all instances, at least 16 bytes.

    A link has `num_slots` slots. Instances run on one host, in one network namespace, as one user: the socket
    has a random name in Linux's abstract namespace, so a process that is killed leaves nothing behind, and
    peers of other users, but for root, are sent away before anything is said.
    """

    def __init__(
        self, key: bytes, num_slots: int = NUM_SLOTS, auth_s: float = AUTH_S, clock: Clock | None = None
    ) -> None:
        super().__init__(key, auth_s, clock)
        if not 1 <= num_slots <= 1 << 10:
            raise ConfigError(f"shared memory has 1 to {1 << 10} slots, not {num_slots}")
        self._num_slots = num_slots
        self._slots: dict[int, Slots] = {}
        self._freed: list[tuple[PeerSocket, int]] = []
        self._lock = threading.Lock()
        """Guards slots."""
        self._user = os.geteuid()

    def _listen(self) -> socket.socket:
        if self._slot_bytes * self._num_slots > MAX_SHARED_BYTES:
            raise ConfigError(
                f"{self._num_slots} slots of {self._slot_bytes} bytes: a link shares at most "
                f"{MAX_SHARED_BYTES} bytes; set num_slots or chunk_bytes lower"
            )
        self._name = f"sagellm-kv-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind("\0" + self._name)
        listener.listen()
        return listener

    def _prepare(self, sock: socket.socket) -> None:
        _, user, _ = _CREDENTIALS.unpack(
            sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if user not in (self._user, 0):
            raise PermissionError(f"the peer runs as user {user}, this instance as {self._user}")

    @property
    def _slot_bytes(self) -> int:
        return cdiv(self.max_payload_bytes, mmap.PAGESIZE) * mmap.PAGESIZE

    def address(self) -> Mapping[str, str | int]:
        return {"transport": "shared_memory", "name": self._name}

    def connect(self, address: Mapping[str, str | int]) -> int:
        name = address.get("name")
        is_name = isinstance(name, str) and name.isascii() and 0 < len(name) < 100
        if address.get("transport") != "shared_memory" or not is_name:
            raise ConfigError(f"{dict(address)} is no address of a transport shared_memory")
        link = next(self._links)
        self._addresses[link] = address
        return link

    def _dial(self, address: Mapping[str, str | int]) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.connect("\0" + str(address["name"]))
            self._prepare(sock)
        except OSError:
            sock.close()
            raise
        return sock

    # -- slots

    def _prove(self, connection: PeerSocket, respond: Callable[[bytes], bytes]) -> None:
        slot_bytes = self._slot_bytes
        fd = os.memfd_create("sagellm-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, slot_bytes * self._num_slots)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            slots = Slots.map(fd, slot_bytes, self._num_slots)
            slots.free = list(range(self._num_slots))
            response = respond(_EXTRA.pack(slot_bytes, self._num_slots))
            if socket.send_fds(connection.sock, [response], [fd]) != len(response):
                raise ConnectionError("the peer does not read")
        finally:
            os.close(fd)
        with self._lock:
            self._slots[connection.link] = slots

    def _shares(self, connection: PeerSocket, extra: bytes) -> None:
        """Map the peer's slots.

        They may be larger than ours; what lies in them is not. It must not be able to shrink them, since
        reading would crash then.
        """
        slot_bytes, num_slots = _EXTRA.unpack(extra)
        if len(connection.fds) != 1 or slot_bytes * num_slots > MAX_SHARED_BYTES or num_slots > 1 << 10:
            raise KVDataError("a peer shares no memory, or too much")
        fd = connection.fds.pop()
        try:
            is_sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if not is_sealed or os.fstat(fd).st_size != slot_bytes * num_slots or not slot_bytes * num_slots:
                raise KVDataError("a peer shares memory that is not sealed, or of another size")
            slots = Slots.map(fd, slot_bytes, num_slots)
        finally:
            os.close(fd)
        with self._lock:
            self._slots[connection.link] = slots

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
        in_slots = [] if slots is None else list(slots.tokens.values())
        return super()._forget(connection) + in_slots

    def _take_chunk(self, connection: PeerSocket, found: FrameHead, head: bytes) -> None:
        slots = self._slots.get(connection.link)
        if found.flag == CHUNK:
            super()._take_chunk(connection, found, head)
            return
        if slots is None or found.slot >= len(slots.memory) // slots.slot_bytes:
            raise KVDataError(f"a payload in slot {found.slot}, which is not shared")
        if found.payload_bytes > slots.slot_bytes:
            raise KVDataError(f"a payload of {found.payload_bytes} bytes in a slot of {slots.slot_bytes}")
        place = self._endpoint.place(connection.link, head, found.payload_bytes)
        if place is not None:
            place.write(slots.slot(found.slot, found.payload_bytes))
            self._endpoint.filled(connection.link, place)
        if not self._freed:
            self._submit(self._tell_freed)
        self._freed.append((connection, found.slot))
        self._expect_frame(connection)

    def _tell_freed(self) -> None:
        """One message for all slots of a connection that were copied from meanwhile."""
        freed: dict[int, list[int]] = {}
        for connection, slot in self._freed:
            if self._connections.get(connection.link) is connection:
                freed.setdefault(connection.link, []).append(slot)
        self._freed.clear()
        for link, slots in freed.items():
            self._post(link, Message(SLOT_FREE, struct.pack(f"<{len(slots)}H", *slots)))

    def _take_message(self, connection: PeerSocket, message: Message) -> None:
        if message.kind != SLOT_FREE:
            super()._take_message(connection, message)
            return
        with self._lock:
            slots = self._slots[connection.link]
            numbers = struct.unpack(f"<{len(message.head) // 2}H", message.head[: len(message.head) // 2 * 2])
            tokens = []
            for number in numbers:
                if number in slots.tokens:  # else it is a duplicate
                    tokens.append(slots.tokens.pop(number))
                    slots.free.append(number)
        for token in tokens:
            self._endpoint.sent(connection.link, token)


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


PLUGIN = SharedMemoryTransport
