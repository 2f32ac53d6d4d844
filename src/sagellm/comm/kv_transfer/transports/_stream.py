"""`StreamTransport`: frames over sockets, by one thread. What TCP and shared memory have in common."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from sagellm.comm.kv_transfer.transports._auth import (
    CHALLENGE_BYTES,
    EXTRA_BYTES,
    MAC_BYTES,
    RESPONSE_BYTES,
    ClientAuth,
    ServerAuth,
    check_key,
)
from sagellm.comm.kv_transfer.transports._connection import (
    CHUNK,
    PREFIX,
    SMALL,
    FrameHead,
    OutFrame,
    PeerSocket,
    frame,
    parse,
    verify,
)
from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import KVDataError
from sagellm.core.protocols.kv_transfer import Message, TransportEndpoint

if TYPE_CHECKING:
    from sagellm.core.shared_pages import SharedPages

log = logging.getLogger("sagellm.kv_transfer")
AUTH_S = 5.0
"""A connection must be there and authenticated by then."""
MAX_UNPROVEN = 64
"""Connections from others that have not proved to have the key; of more, the oldest is closed."""
PAUSE_S = 0.5
"""No connection is accepted for that time, where descriptors or memory are used up."""
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_IDLE_S = 0.5
_DROPPED_BYTES = 256 << 10


class StreamTransport:
    """Implements `TransportEngine` but for `address` and `connect`.

    All sockets and connections belong to the thread; other threads leave tasks for it. `_listen` makes the
    listening socket, `_dial` one that connects to an address.
    """

    max_payload_bytes = 0

    def __init__(self, key: bytes, auth_s: float = AUTH_S, clock: Clock | None = None) -> None:
        self._key, self._auth_s, self._clock = check_key(key), auth_s, clock or MonotonicClock()
        self._addresses: dict[int, Mapping[str, str | int]] = {}
        """By link that is ours."""
        self._connections: dict[int, PeerSocket] = {}
        self._unsent: dict[int, PeerSocket] = {}
        """By link: connections with frames that are sent together, before the next copy."""
        self._links = itertools.count(1)
        self._tasks: deque[Callable[[], None]] = deque()
        self._copies: deque[Callable[[], None]] = deque()
        """Tasks that copy chunks, of which each takes as long as many others."""
        self._is_awake = self._is_closing = False
        self._dropped = memoryview(bytearray(_DROPPED_BYTES))
        self._thread: threading.Thread | None = None
        self._paused_s: float | None = None
        """Until when no connection is accepted."""

    def _listen(self) -> socket.socket:
        raise AssertionError("a subclass listens")

    def _dial(self, address: Mapping[str, str | int]) -> socket.socket:
        """A socket that does not block, is prepared and is connecting."""
        raise AssertionError("a subclass dials")

    def _prepare(self, sock: socket.socket) -> None:
        """Set the options of a socket. Raises `OSError` for a peer with which nothing is spoken."""

    def register(self, pages: SharedPages) -> None:
        """A stream sends from where a payload lies anyway."""

    def start(self, endpoint: TransportEndpoint) -> None:
        self._endpoint = endpoint
        self._listener = self._listen()
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._waiting, self._waker = socket.socketpair()
        self._waiting.setblocking(False)
        self._selector.register(self._waiting, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="sagellm-kv-transport", daemon=True)
        self._thread.start()

    def reserve(
        self, link: int, num_bytes: int, count: int = 1, *, is_registered: bool = False
    ) -> Sequence[memoryview] | None:
        """None: a payload is sent from where it lies.

        One message waits at a time, so that its chunks are in the processor's cache when they are sent.
        """
        connection = self._connections.get(link)
        if connection is not None and connection.has_payload:
            raise BlockingIOError("chunks wait to be sent")
        return None

    def discard(self, link: int, memory: memoryview) -> None:
        """Nothing is reserved here."""

    def post(self, link: int, message: Message) -> None:
        self._submit(partial(self._post, link, message))

    def call(self, task: Callable[[], None], *, copies: bool = False) -> None:
        self._submit(task, copies=copies)

    def reset(self, link: int, reason: str) -> None:
        self._submit(partial(self._lose_link, link, reason))

    def close(self) -> None:
        self._is_closing = True
        if self._thread is not None:
            self._submit(lambda: None)
            self._thread.join()
            self._waker.close()

    def _submit(self, task: Callable[[], None], *, copies: bool = False) -> None:
        (self._copies if copies else self._tasks).append(task)
        if not self._is_awake and threading.current_thread() is not self._thread:
            self._is_awake = True
            try:
                self._waker.send(b"\0")
            except OSError:  # closed
                return

    # -- the thread

    def _run(self) -> None:
        """Serve sockets and run tasks.

        Frames wait for each other while there are tasks, since waking the peer costs as much as copying
        100 KB. They never wait for a copy, so that both sides copy at the same time.
        """
        while not self._is_closing:
            for key, events in self._selector.select(0 if self._tasks or self._copies else _IDLE_S):
                if key.fileobj is self._waiting:
                    self._waiting.recv(4096)
                    self._is_awake = False
                elif key.fileobj is self._listener:
                    self._accept()
                else:
                    self._serve(key.data, events)
            while self._tasks:
                self._run_task(self._tasks.popleft())
            while self._unsent:
                self._run_task(partial(self._flush_or_lose, self._unsent.popitem()[1]))
            if self._copies and not self._tasks:
                self._run_task(self._copies.popleft())
            self._expire()
        for connection in self._connections.values():
            connection.sock.close()
            self._forget(connection)
        self._listener.close()
        self._waiting.close()
        self._selector.close()

    def _run_task(self, task: Callable[[], None]) -> None:
        try:
            task()
        except Exception:  # the connections go on
            log.exception("a task of KV transfer failed")

    def _serve(self, connection: PeerSocket, events: int, *, goes_on: bool = False) -> None:
        """`goes_on`: the task that reads what the last turn has left. Before it, nothing is read."""
        if self._connections.get(connection.link) is not connection:
            return
        try:
            if connection.is_connecting and events & selectors.EVENT_WRITE:
                if error := connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    raise OSError(error, f"cannot connect: {os.strerror(error)}")
                connection.is_connecting = False
            if events & selectors.EVENT_READ and (goes_on or not connection.ready):
                connection.read(self._dropped)
                if connection.ready:  # after acknowledgements, and what other connections have
                    rest = partial(self._serve, connection, selectors.EVENT_READ, goes_on=True)
                    self._submit(rest, copies=True)
            self._flush(connection)
        except (OSError, KVDataError) as error:
            self._lose(connection, str(error))
        except Exception as error:  # the other connections go on
            log.exception("a connection of KV transfer failed")
            self._lose(connection, f"{type(error).__name__}: {error}")

    def _flush_or_lose(self, connection: PeerSocket) -> None:
        try:
            self._flush(connection)
        except OSError as error:
            self._lose(connection, str(error))

    def _flush(self, connection: PeerSocket) -> None:
        """Send what is queued; raises `OSError`."""
        if self._connections.get(connection.link) is not connection:
            return
        if not connection.is_connecting:
            connection.write(partial(self._written, connection))
        wants = selectors.EVENT_READ
        if connection.is_connecting or connection.outgoing:
            wants |= selectors.EVENT_WRITE
        if connection.wants != wants:
            connection.wants = wants
            self._selector.modify(connection.sock, wants, connection)

    def _written(self, connection: PeerSocket, sent: OutFrame) -> None:
        if sent.token is not None and not sent.peer_reads:
            self._endpoint.sent(connection.link, sent.token)

    def _expire(self) -> None:
        now = self._clock.now()
        if self._paused_s is not None and self._paused_s <= now:
            self._paused_s = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        for connection in list(self._connections.values()):
            if connection.deadline_s is not None and connection.deadline_s < now:
                self._lose(connection, f"not connected and authenticated within {self._auth_s:g} s")

    def _post(self, link: int, message: Message) -> None:
        connection = self._connections.get(link)
        if connection is None and message.opens and link in self._addresses:
            connection = self._connect(link)
        if connection is None:
            if message.is_chunk:
                self._endpoint.sent(link, message.token)
            return
        made = self._framed(connection, message)
        if connection.deadline_s is not None:
            connection.held.append(made)
            return
        connection.outgoing.append(made)
        if made.token is not None and not made.peer_reads:
            self._flush_or_lose(connection)
        else:
            self._unsent[link] = connection

    def _framed(self, connection: PeerSocket, message: Message) -> OutFrame:
        payload = [memoryview(part).cast("B") for part in message.payload]
        if not message.is_chunk:
            payload = [memoryview(bytes(part)) for part in payload]
            return OutFrame(frame(message.kind, message.head, payload, SMALL))
        return OutFrame(frame(message.kind, message.head, payload, CHUNK), message.token)

    # -- connections

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _NO_ROOM:
                log.warning("KV transfer accepts no connection for %g s: %s", PAUSE_S, error)
                self._selector.unregister(self._listener)
                self._paused_s = self._clock.now() + PAUSE_S
            return
        try:
            self._prepare(sock)
        except OSError:
            sock.close()
            return
        others = (each for each in self._connections.values() if not each.is_ours)
        unproven = [each for each in others if each.deadline_s is not None]
        if len(unproven) >= MAX_UNPROVEN:  # the oldest: a peer needs two round trips
            self._lose(unproven[0], "too many connections have not proved to have the key")
        auth = ServerAuth(self._key)
        connection = self._register(sock, next(self._links), is_ours=False)
        response = bytearray(RESPONSE_BYTES)

        def answer() -> None:
            proof, extra = auth.answer(bytes(response))
            self._shares(connection, extra)
            connection.outgoing.append(OutFrame(deque([memoryview(proof)])))
            self._open(connection)

        connection.outgoing.append(OutFrame(deque([memoryview(auth.challenge)])))
        connection.expect([memoryview(response)], answer)
        self._serve(connection, 0)

    def _connect(self, link: int) -> PeerSocket | None:
        try:
            sock = self._dial(self._addresses[link])
        except OSError as error:
            self._endpoint.lost(link, f"cannot connect: {error}")
            return None
        auth = ClientAuth(self._key)
        connection = self._register(sock, link, is_ours=True)
        connection.is_connecting = True
        challenge, proof = bytearray(CHALLENGE_BYTES), bytearray(MAC_BYTES)

        def respond() -> None:
            connection.expect([memoryview(proof)], check)
            self._prove(connection, partial(auth.respond, bytes(challenge)))

        def check() -> None:
            auth.check(bytes(proof))
            self._open(connection)

        connection.expect([memoryview(challenge)], respond)
        connection.wants = selectors.EVENT_READ | selectors.EVENT_WRITE
        self._selector.modify(sock, connection.wants, connection)
        return connection

    def _register(self, sock: socket.socket, link: int, *, is_ours: bool) -> PeerSocket:
        sock.setblocking(False)
        connection = PeerSocket(sock, link, is_ours, self._clock.now() + self._auth_s)
        self._connections[link] = connection
        connection.wants = selectors.EVENT_READ
        self._selector.register(sock, connection.wants, connection)
        return connection

    def _prove(self, connection: PeerSocket, respond: Callable[[bytes], bytes]) -> None:
        """Send our response, with what the transport adds to it."""
        response = respond(bytes(EXTRA_BYTES))
        connection.outgoing.append(OutFrame(deque([memoryview(response)])))

    def _shares(self, connection: PeerSocket, extra: bytes) -> None:
        """The peer has proved to have the key, and says what it shares."""

    def _open(self, connection: PeerSocket) -> None:
        """Both sides have the key."""
        connection.deadline_s = None
        connection.outgoing.extend(connection.held)
        connection.held.clear()
        self._expect_frame(connection)

    def _lose_link(self, link: int, reason: str) -> None:
        connection = self._connections.get(link)
        if connection is not None:
            self._lose(connection, reason)
        elif link in self._addresses:
            self._endpoint.lost(link, reason)

    def _lose(self, connection: PeerSocket, reason: str) -> None:
        if self._connections.get(connection.link) is not connection:
            return
        del self._connections[connection.link]
        self._selector.unregister(connection.sock)
        connection.sock.close()
        for token in self._forget(connection):
            self._endpoint.sent(connection.link, token)
        self._endpoint.lost(connection.link, reason)

    def _forget(self, connection: PeerSocket) -> list[int]:
        """Free what a connection holds; returns tokens of chunks that were not sent."""
        for fd in connection.fds:
            os.close(fd)
        frames = [*connection.outgoing, *connection.held]
        return [each.token for each in frames if each.token is not None and not each.peer_reads]

    # -- frames that come

    def _expect_frame(self, connection: PeerSocket) -> None:
        prefix = bytearray(PREFIX.size)

        def parsed() -> None:
            found = parse(bytes(prefix), self.max_payload_bytes)
            head = bytearray(found.head_bytes)
            connection.expect([memoryview(head)], lambda: self._take_head(connection, found, bytes(head)))

        connection.expect([memoryview(prefix)], parsed, take_whole=partial(self._take_whole, connection))

    def _take_whole(self, connection: PeerSocket) -> bool:
        """Take a frame that was read ahead; False if a part is missing.

        Payloads of chunks come after that.
        """
        ready = connection.ready
        if len(ready) < PREFIX.size:
            return False
        found = parse(ready, self.max_payload_bytes)
        stop = PREFIX.size + found.head_bytes
        end = stop + (found.payload_bytes if found.flag == SMALL else 0)
        if len(ready) < end:
            return False
        connection.ready = ready[end:]
        head, payload = bytes(ready[PREFIX.size : stop]), bytes(ready[stop:end])
        verify(found, head, payload)
        if found.flag == SMALL:
            self._take_message(connection, Message(found.kind, head, [payload]))
        else:
            self._take_chunk(connection, found, head)
        return True

    def _take_head(self, connection: PeerSocket, found: FrameHead, head: bytes) -> None:
        if found.flag != SMALL:
            verify(found, head)
            self._take_chunk(connection, found, head)
            return
        payload = bytearray(found.payload_bytes)

        def whole() -> None:
            verify(found, head, payload)
            self._expect_frame(connection)
            self._take_message(connection, Message(found.kind, head, [bytes(payload)]))

        connection.expect([memoryview(payload)], whole)

    def _take_message(self, connection: PeerSocket, message: Message) -> None:
        self._endpoint.message(connection.link, message)

    def _take_chunk(self, connection: PeerSocket, found: FrameHead, head: bytes) -> None:
        if found.flag != CHUNK:
            raise KVDataError("a payload in shared memory, which this transport has not")
        place = self._endpoint.place(connection.link, head, found.payload_bytes)
        if place is None:
            connection.num_discarded = found.payload_bytes
            self._expect_frame(connection)
            return

        def filled() -> None:
            is_filled = connection.place is place
            self._expect_frame(connection)
            if is_filled:
                self._endpoint.filled(connection.link, place)

        connection.expect(place.views, filled, place)
