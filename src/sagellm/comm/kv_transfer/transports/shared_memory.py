"""`SharedMemoryTransport`: instances on one host. Payloads lie in memory that both map.

The side that connects sends chunks. Blocks of a pool that others may map are copied from where they lie;
their descriptor is sent once the peer has proved to have the key. For other blocks it makes slots of one
chunk each, whose descriptor goes with its own proof: a chunk is made in a slot, and its receiver copies it
from there into blocks. Messages go over a Unix socket.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from sagellm.comm.kv_transfer.messages import MAX_HEAD_BYTES
from sagellm.comm.kv_transfer.transports._auth import EXTRA_BYTES
from sagellm.comm.kv_transfer.transports._connection import MAPPED, FrameHead, OutFrame, PeerSocket, frame
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
from sagellm.core.protocols.kv_transfer import Message
from sagellm.core.shared_pages import SharedPages, mapped_to_read

log = logging.getLogger("sagellm.kv_transfer")
MAX_SHARED_BYTES = 1 << 37
"""Of a link. Memory is taken as slots are used."""
MAX_MAPPED_BYTES = 1 << 44
"""Of the blocks of a peer, which take address space and no memory here."""
IS_MAPPED = 252
"""A message of this transport: the receiver has mapped the sender's blocks."""
READ = 253
"""As that one: the head has the numbers of messages whose chunks were read."""
_READ, _PART = struct.Struct("<Q"), struct.Struct("<QQ")
_CREDENTIALS = struct.Struct("iII")
"""The process, user and group of a peer."""
_EXTRA = struct.Struct("<QI")
assert _EXTRA.size == EXTRA_BYTES


class MappedPart(NamedTuple):
    """A part of the pages in which a sender's blocks lie."""

    offset: int
    num_bytes: int


class SharedMemoryTransport(SlotTransport):
    """Implements `TransportEngine`. `key`: the same on all instances, at least 16 bytes.

    Blocks in `SharedPages` are read where they lie, by one copy, which the receiver makes: it maps them when
    it is connected, and cannot write there. Other chunks go through slots, of which a link has `num_slots`;
    so do all, if the receiver has no address space for the blocks.

    Instances run on one host, in one network namespace, as one user: the socket has a random name in Linux's
    abstract namespace, so a process that is killed leaves nothing behind, and peers of other users, but for
    root, are sent away before anything is said.
    """

    def __init__(
        self, key: bytes, num_slots: int = NUM_SLOTS, auth_s: float = AUTH_S, clock: Clock | None = None
    ) -> None:
        self._have_slots(num_slots)
        super().__init__(key, auth_s, clock)
        self._user = os.geteuid()
        self._pages: SharedPages | None = None
        self._numbers = itertools.count(1)
        self._reads: dict[int, dict[int, int]] = {}
        """By link, messages whose chunks the peer may still read where they lie: number and token."""
        self._readers: set[int] = set()
        """Links whose peers have mapped our pages."""
        self._maps: dict[int, memoryview] = {}
        """By link, the pages of the peer."""
        self._taken: dict[int, tuple[PeerSocket, list[int]]] = {}
        """By link, the numbers of its messages whose chunks were read."""

    def register(self, pages: SharedPages) -> None:
        self._pages = pages

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

    # -- chunks that are read where they lie in blocks

    def _open(self, connection: PeerSocket) -> None:
        """Both sides have the key: share our blocks, or map the peer's."""
        if connection.is_ours:
            socket.send_fds(connection.sock, [b"\0"], [] if self._pages is None else [self._pages.fd])
            super()._open(connection)
            return

        def shared() -> None:
            if connection.fds:
                fd = connection.fds.pop()
                try:
                    self._maps[connection.link] = mapped_to_read(fd, MAX_MAPPED_BYTES)
                except OSError as error:
                    log.warning("KV comes from an instance of this host by two copies, not one: %s", error)
                finally:
                    os.close(fd)
            super(SharedMemoryTransport, self)._open(connection)
            if connection.link in self._maps:
                self._post(connection.link, Message(IS_MAPPED, b""))

        connection.expect([memoryview(bytearray(1))], shared)

    def reserve(
        self, link: int, num_bytes: int, count: int = 1, *, is_registered: bool = False
    ) -> Sequence[memoryview] | None:
        if is_registered and link in self._readers:
            return None
        return super().reserve(link, num_bytes, count)

    def _framed(self, connection: PeerSocket, message: Message) -> OutFrame:
        is_read = message.is_chunk and connection.link in self._readers
        payload = [memoryview(part).cast("B") for part in message.payload] if is_read else []
        parts = self._parts_of(payload)
        room = (MAX_HEAD_BYTES - len(message.head) - _READ.size) // _PART.size
        if not parts or len(parts) > room:
            return super()._framed(connection, message)
        number = next(self._numbers)
        self._reads.setdefault(connection.link, {})[number] = message.token
        named = b"".join([_READ.pack(number), *[_PART.pack(*each) for each in parts]])
        made = frame(message.kind, message.head + named, payload, MAPPED, len(parts))
        return OutFrame(made, message.token, peer_reads=True)

    def _parts_of(self, payload: Sequence[memoryview]) -> list[MappedPart]:
        """Where a payload lies in our pages; nothing, if it lies elsewhere."""
        pages, found = self._pages, list[MappedPart]()
        if pages is None:
            return found
        for view in filter(len, payload):
            offset = pages.offset_of(view)
            if offset is None:
                return []
            if found and found[-1].offset + found[-1].num_bytes == offset:
                found[-1] = MappedPart(found[-1].offset, found[-1].num_bytes + len(view))
            else:
                found.append(MappedPart(offset, len(view)))
        return found

    def _take_message(self, connection: PeerSocket, message: Message) -> None:
        if message.kind == IS_MAPPED and connection.is_ours:
            self._readers.add(connection.link)
            return
        if message.kind != READ:
            super()._take_message(connection, message)
            return
        reads = self._reads.get(connection.link, {})
        for [number] in _READ.iter_unpack(message.head[: len(message.head) // _READ.size * _READ.size]):
            token = reads.pop(number, None)
            if token is not None:  # else it is a duplicate
                self._endpoint.sent(connection.link, token)

    def _take_chunk(self, connection: PeerSocket, found: FrameHead, head: bytes) -> None:
        """Copy chunks from the blocks of the peer, in one pass with their checksums.

        A peer whose link was lost may write there meanwhile: the checksums are of what was copied.
        """
        if found.flag != MAPPED:
            super()._take_chunk(connection, found, head)
            return
        pages, at = self._maps.get(connection.link), len(head) - _READ.size - found.num_parts * _PART.size
        if pages is None or at < 0:
            raise KVDataError(f"a payload in {found.num_parts} parts of blocks, which are not shared")
        parts = [MappedPart(*each) for each in _PART.iter_unpack(head[at + _READ.size :])]
        most = max([each.offset + each.num_bytes for each in parts], default=0)
        if most > len(pages) or sum([each.num_bytes for each in parts]) != found.payload_bytes:
            raise KVDataError(f"a payload of {found.payload_bytes} bytes in {parts} of {len(pages)}")
        connection.left -= found.payload_bytes
        self._expect_frame(connection)
        place = self._endpoint.place(connection.link, head[:at], found.payload_bytes)
        if place is not None:
            place.write([pages[each.offset : each.offset + each.num_bytes] for each in parts])
            self._endpoint.filled(connection.link, place)
        self._tell_read(connection, *_READ.unpack_from(head, at))

    def _tell_read(self, connection: PeerSocket, number: int) -> None:
        """One message for all that were read meanwhile."""
        taken = self._taken.get(connection.link)
        if taken is None:
            self._taken[connection.link] = taken = connection, []
            self._submit(partial(self._send_read, connection.link))
        taken[1].append(number)

    def _send_read(self, link: int) -> None:
        connection, numbers = self._taken.pop(link)
        if self._connections.get(link) is connection:
            self._post(link, Message(READ, struct.pack(f"<{len(numbers)}Q", *numbers)))

    def _forget(self, connection: PeerSocket) -> list[int]:
        self._maps.pop(connection.link, None)
        self._readers.discard(connection.link)
        return super()._forget(connection) + list(self._reads.pop(connection.link, {}).values())


def _mapped(fd: int, num_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(fd, num_bytes))


PLUGIN = SharedMemoryTransport
