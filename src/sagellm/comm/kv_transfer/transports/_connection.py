"""One socket of a stream transport: frames are read and written without waiting.

A frame is a prefix, a head and a payload. The prefix has a checksum of itself and the head, and, but for
chunks, of the payload too. Every size is compared with its limit before memory is taken for it.
"""

from __future__ import annotations

import socket
import struct
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NamedTuple

import xxhash

from sagellm.comm.kv_transfer.messages import MAX_HEAD_BYTES, MAX_TOGETHER, MAX_TOKENS
from sagellm.core.errors import KVDataError
from sagellm.core.protocols.kv_tiers import Buffer
from sagellm.core.protocols.kv_transfer import MAX_NOTE_BYTES, ChunkPlace
from sagellm.core.types import TOKEN_BYTES

PREFIX = struct.Struct("<4sBBHIIQ")
FRAME_MAGIC = b"sKV1"
MAX_MESSAGE_BYTES = MAX_TOKENS * TOKEN_BYTES + MAX_NOTE_BYTES
"""Of a payload that is no chunk: the tokens of an offer and its note."""
MAX_BUFFERS = 512
"""In one call: half of what Linux takes."""
READ_BYTES = 2 << 20
"""Read from a connection before others have their turn, and chunks are acknowledged."""
LEAST_BYTES = 1 << 20
"""Of a payload, before a waiting process is woken."""
AHEAD_BYTES = 4 << 10
"""Several small frames are read by one call, and of a payload no more than this is copied twice."""
SMALL, CHUNK, SLOT, MAPPED = range(4)
"""What a payload is. SLOT and MAPPED: it lies in memory that both sides share, not in the stream; the end of
the head names `num_parts` slots, or parts of the sender's blocks."""


class FrameHead(NamedTuple):
    kind: int
    flag: int
    num_parts: int
    head_bytes: int
    payload_bytes: int
    checksum: int


@dataclass(slots=True)
class OutFrame:
    """A frame on its way out. `token` names chunks whose payload is read until it is sent.

    Where the peer reads it, it is read until the peer says so.
    """

    buffers: deque[memoryview]
    token: int | None = None
    peer_reads: bool = False


def frame(
    kind: int, head: bytes, payload: Sequence[memoryview], flag: int, num_parts: int = 0
) -> deque[memoryview]:
    """The buffers of a frame."""
    num_bytes = sum(map(len, payload))
    fields = FRAME_MAGIC, kind, flag, num_parts, len(head), num_bytes
    covered = b"".join((PREFIX.pack(*fields, 0), head, *(payload if flag == SMALL else ())))
    packed = PREFIX.pack(*fields, xxhash.xxh3_64_intdigest(covered)) + head
    in_stream = payload if flag in (SMALL, CHUNK) else ()
    return deque((memoryview(packed), *(part for part in in_stream if len(part))))


def parse(prefix: Buffer, max_payload_bytes: int) -> FrameHead:
    """Raises `KVDataError` for what is no prefix, or too large. `max_payload_bytes`: of one chunk."""
    magic, kind, flag, num_parts, head_bytes, payload_bytes, checksum = PREFIX.unpack_from(prefix)
    if magic != FRAME_MAGIC or flag > MAPPED:
        raise KVDataError("no frame of KV transfer: bytes were lost or damaged on the way")
    most = MAX_MESSAGE_BYTES if flag == SMALL else MAX_TOGETHER * max_payload_bytes
    if head_bytes > MAX_HEAD_BYTES or payload_bytes > most:
        raise KVDataError(
            f"a frame of {head_bytes} and {payload_bytes} bytes, at most {MAX_HEAD_BYTES} and {most}"
        )
    return FrameHead(kind, flag, num_parts, head_bytes, payload_bytes, checksum)


def verify(found: FrameHead, head: bytes, payload: bytes | bytearray = b"") -> None:
    """Raises `KVDataError` if the bytes are not those that were sent."""
    prefix = PREFIX.pack(FRAME_MAGIC, *found[:-1], 0)
    if xxhash.xxh3_64_intdigest(b"".join((prefix, head, payload))) != found.checksum:
        raise KVDataError("a frame was damaged on the way")


@dataclass(slots=True)
class PeerSocket:
    """A socket that does not block. `views` are filled next; then `then` is called, which says what follows.

    `place` locks what is filled, if that are blocks. `deadline_s`: until when it must have authenticated;
    None from then on. `held`: frames that are sent when it has.
    """

    sock: socket.socket
    link: int
    is_ours: bool
    deadline_s: float | None
    outgoing: deque[OutFrame] = field(default_factory=deque)
    held: list[OutFrame] = field(default_factory=list)
    views: deque[memoryview] = field(default_factory=deque)
    then: Callable[[], None] = lambda: None
    place: ChunkPlace | None = None
    take_whole: Callable[[], bool] | None = None
    """While a frame begins next: takes one from `ready`, if all of it is there but payloads of chunks."""
    num_discarded: int = 0
    """Bytes of a payload that are still to be read and dropped."""
    ahead: bytearray = field(default_factory=lambda: bytearray(AHEAD_BYTES))
    ready: memoryview = field(default_factory=lambda: memoryview(b""))
    """Bytes that were read into `ahead` and have not been used."""
    left: int = 0
    """Bytes of this turn, with those in slots."""
    least: int = 1
    """How many bytes must be there before the socket counts as readable."""
    fds: list[int] = field(default_factory=list)
    is_connecting: bool = False
    wants: int = 0
    """The events that the selector waits for."""

    @property
    def has_payload(self) -> bool:
        """Whether chunks are on their way out."""
        return any(frame.token is not None for frame in tuple(self.outgoing))

    def expect(
        self, views: Sequence[memoryview], then: Callable[[], None], place: ChunkPlace | None = None,
        take_whole: Callable[[], bool] | None = None,
    ) -> None:  # fmt: skip
        self.views, self.then, self.place = deque([view for view in views if len(view)]), then, place
        self.take_whole = take_whole

    def read(self, dropped: memoryview) -> None:
        """Read what is there, up to `READ_BYTES`. Raises `OSError`, and what `then` raises."""
        self.left = READ_BYTES
        while True:
            while not self.views and not self.num_discarded:
                self.then()
            if self.left <= 0:
                self._set_least()
                return
            if self.ready:
                if self.num_discarded or self.take_whole is None or not self.take_whole():
                    self._use_ready()
                continue
            try:
                num_bytes = self._receive(dropped)
            except BlockingIOError:
                self._set_least()
                return
            if not num_bytes:
                raise ConnectionError("the peer has closed the connection")
            self.left -= num_bytes

    def _set_least(self) -> None:
        """Be woken once a payload is there, or `LEAST_BYTES` of it.

        A small frame wakes at once. Each wake of this process by the sender costs both as much as the copy
        of 100 KB.
        """
        least = 1
        if self.place is not None and self.sock.family != socket.AF_UNIX:
            least = max(1, min(sum(map(len, self.views)), LEAST_BYTES))
        if least != self.least:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
            self.least = least

    def _receive(self, dropped: memoryview) -> int:
        if self.num_discarded:
            num_bytes = self.sock.recv_into(dropped[: self.num_discarded])
            self.num_discarded -= num_bytes
            return num_bytes
        if self.place is not None:
            with self.place.lock:
                if self.place.is_open:
                    num_bytes = self._into(list(islice(self.views, MAX_BUFFERS)))
                    _advance(self.views, num_bytes)
                    self.place.received(num_bytes)
                    return num_bytes
            self._discard_place()
            return self._receive(dropped)
        if self.deadline_s is None and len(self.views[0]) < AHEAD_BYTES:
            num_bytes = self.sock.recv_into(self.ahead)
            self.ready = memoryview(self.ahead)[:num_bytes]
            return num_bytes
        num_bytes = self._into(list(islice(self.views, MAX_BUFFERS)))
        _advance(self.views, num_bytes)
        return num_bytes

    def _use_ready(self) -> None:
        """Bring bytes that were read ahead to where they belong."""
        if self.num_discarded:
            num_bytes = min(len(self.ready), self.num_discarded)
            self.num_discarded -= num_bytes
        elif self.place is None:
            self.take_whole = None
            num_bytes = _fill(self.views[0], self.ready)
            _advance(self.views, num_bytes)
        else:
            with self.place.lock:
                num_bytes = _fill(self.views[0], self.ready) if self.place.is_open else 0
                self.place.received(num_bytes)
            if not num_bytes:
                self._discard_place()
            _advance(self.views, num_bytes)
        self.ready = self.ready[num_bytes:]

    def _discard_place(self) -> None:
        """Drop the rest of a payload: its blocks may be others' now."""
        self.num_discarded = sum(map(len, self.views))
        self.views.clear()
        self.place = None

    def _into(self, views: list[memoryview]) -> int:
        if self.deadline_s is not None and self.sock.family == socket.AF_UNIX:
            room, flags = socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC
            size, ancillary, *_ = self.sock.recvmsg_into(views[:1], room, flags)
            for _, kind, data in ancillary:
                if kind == socket.SCM_RIGHTS:
                    self.fds.extend(array("i", data[: len(data) // 4 * 4]))
            if len(self.fds) > 1:
                raise KVDataError("a peer sends more than one descriptor")
            return size
        if len(views) == 1:
            return self.sock.recv_into(views[0])
        return self.sock.recvmsg_into(views)[0]

    def write(self, done: Callable[[OutFrame], None]) -> None:
        """Send what the socket takes; `done` is called for each whole frame. Raises `OSError`."""
        while self.outgoing:
            queued = chain.from_iterable(each.buffers for each in self.outgoing)
            try:
                num_bytes = self.sock.sendmsg(list(islice(queued, MAX_BUFFERS)))
            except BlockingIOError:
                return
            while self.outgoing:
                first = self.outgoing[0]
                size = sum(map(len, first.buffers))
                if num_bytes < size:
                    _advance(first.buffers, num_bytes)
                    break
                num_bytes -= size
                done(self.outgoing.popleft())


def _fill(view: memoryview, data: memoryview) -> int:
    num_bytes = min(len(view), len(data))
    view[:num_bytes] = data[:num_bytes]
    return num_bytes


def _advance(views: deque[memoryview], num_bytes: int) -> None:
    """Drop the first bytes."""
    while num_bytes:
        if num_bytes < len(views[0]):
            views[0] = views[0][num_bytes:]
            return
        num_bytes -= len(views.popleft())
