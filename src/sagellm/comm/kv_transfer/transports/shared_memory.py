"""`SharedMemoryTransport`: instances on one host. Payloads lie in memory that both map.

The side that connects makes slots of one chunk each and sends their file descriptor with its proof of the
key. A chunk is made in a slot, and its receiver copies it from there into blocks; messages go over a Unix
socket.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Callable, Mapping, Sequence

from sagellm.comm.kv_transfer.transports._auth import EXTRA_BYTES
from sagellm.comm.kv_transfer.transports._connection import PeerSocket
from sagellm.comm.kv_transfer.transports._slots import (
    MAX_SLOTS,
    NUM_SLOTS,
    Slots,
    SlotSizes,
    SlotTransport,
    UsedSlot,
)
from sagellm.comm.kv_transfer.transports._stream import AUTH_S
from sagellm.core.blocks import cdiv
from sagellm.core.clock import Clock
from sagellm.core.errors import ConfigError, KVDataError

MAX_SHARED_BYTES = 1 << 37
"""Of a link. Memory is taken as slots are used."""
_CREDENTIALS = struct.Struct("iII")
"""The process, user and group of a peer."""
_EXTRA = struct.Struct("<QI")
assert _EXTRA.size == EXTRA_BYTES


class SharedMemoryTransport(SlotTransport):
    """Implements `TransportEngine`. `key`: the same on all instances, at least 16 bytes.

    A link has `num_slots` slots. Instances run on one host, in one network namespace, as one user: the socket
    has a random name in Linux's abstract namespace, so a process that is killed leaves nothing behind, and
    peers of other users, but for root, are sent away before anything is said.
    """

    def __init__(
        self, key: bytes, num_slots: int = NUM_SLOTS, auth_s: float = AUTH_S, clock: Clock | None = None
    ) -> None:
        self._have_slots(num_slots)
        super().__init__(key, auth_s, clock)
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
            slots = Slots.of(_mapped(fd, slot_bytes * self._num_slots), slot_bytes)
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
        if len(connection.fds) != 1 or slot_bytes * num_slots > MAX_SHARED_BYTES or num_slots > MAX_SLOTS:
            raise KVDataError("a peer shares no memory, or too much")
        fd = connection.fds.pop()
        try:
            is_sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if not is_sealed or os.fstat(fd).st_size != slot_bytes * num_slots or not slot_bytes * num_slots:
                raise KVDataError("a peer shares memory that is not sealed, or of another size")
            slots = Slots.of(_mapped(fd, slot_bytes * num_slots), slot_bytes)
        finally:
            os.close(fd)
        with self._lock:
            self._slots[connection.link] = slots
            self._sizes[connection.link] = SlotSizes(num_slots, slot_bytes)

    def _take_slots(
        self, connection: PeerSocket, head: bytes, num_bytes: int, slots: Sequence[UsedSlot]
    ) -> None:
        place = self._endpoint.place(connection.link, head, num_bytes)
        if place is not None:
            memory = self._slots[connection.link]
            place.write([memory.slot(*each) for each in slots])
            self._endpoint.filled(connection.link, place)
        self._give_back(connection, slots)


def _mapped(fd: int, num_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(fd, num_bytes))


PLUGIN = SharedMemoryTransport
