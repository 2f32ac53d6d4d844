"""Reads one publisher's KV events and asks it for missed batches.

The publisher may be ours or another engine's."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

import zmq

from sagellm.control_plane.kv_events._doorbell import Doorbell
from sagellm.control_plane.kv_events.codec import KVEventError, decode_batch
from sagellm.control_plane.kv_events.sequence import (
    SEQ_BYTES,
    Item,
    Malformed,
    Message,
    ReceivedBatch,
    SequenceTracker,
)
from sagellm.core.errors import ConfigError


class KVEventSubscriber:
    """Iterates over a publisher's batches, gaps and restarts.

    Where numbers are missing, at the beginning too, `replay_endpoint` is asked; what it no longer has is
    given as a `Gap`. Batches come in order, each once. Iteration ends with `close`, which any thread may
    call. Raises `ConfigError` for an endpoint that ZeroMQ cannot read. Waits for a publisher that is not
    there yet; `replay_timeout_s` is how long one message of a replay may take.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        *,
        replay_timeout_s: float = 5.0,
        hwm: int = 100_000,
    ) -> None:
        self._context = zmq.Context()
        self._replay_endpoint = replay_endpoint
        self._replay_timeout_s = replay_timeout_s
        try:
            self._sub = self._open(zmq.SUB, endpoint, hwm)
            self._sub.setsockopt(zmq.SUBSCRIBE, topic.encode())
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._bell = Doorbell()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._tracker = SequenceTracker()
        self._ready: deque[Item] = deque()
        self._caught_up = replay_endpoint is None

    def _open(self, kind: int, endpoint: str, hwm: int) -> zmq.SyncSocket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, hwm)
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close()
            raise ConfigError(
                f"KV events cannot be read from {endpoint!r}: {error.strerror}. An endpoint is "
                f"'tcp://host:port' or 'ipc://path'"
            ) from error
        return socket

    @property
    def next_seq(self) -> int:
        """The number of the batch that is expected next."""
        return self._tracker.next_seq

    def poll(self, timeout_s: float | None = None) -> Item | None:
        """The next item; None after `timeout_s` without one, or after `close`.

        `timeout_s` None waits for ever. Takes as long as a replay where one is needed. Raises `KVEventError`
        for a message that is no KV event message; the next call continues after it."""
        with self._lock:
            if not self._caught_up and not self._closing.is_set():
                self._caught_up = True
                self._ready.extend(self._tracker.catch_up(self._replay(0)))
            if not self._ready and self._wait(self._sub, timeout_s):
                message = _message(self._sub.recv_multipart(), replayed=False)
                self._ready.extend(self._tracker.receive(message, self._replay))
            return self._ready.popleft() if self._ready else None

    def __iter__(self) -> Iterator[Item]:
        while not self._closing.is_set():
            item = self.poll()
            if item is not None:
                yield item

    def _wait(self, socket: zmq.SyncSocket, timeout_s: float | None) -> bool:
        """Whether `socket` has a message; False after the time, or when the subscriber closes."""
        if self._closing.is_set():
            return False
        poller = zmq.Poller()
        poller.register(self._bell.fileno(), zmq.POLLIN)
        poller.register(socket, zmq.POLLIN)
        ready = dict(poller.poll(None if timeout_s is None else round(timeout_s * 1000)))
        return socket in ready and not self._closing.is_set()

    def _replay(self, start: int) -> list[Message]:
        """The batches that the publisher still has from `start` on.

        Few or none if it does not answer."""
        if self._replay_endpoint is None:
            return []
        # A socket of its own: an answer that comes too late cannot be taken for the next one.
        socket = self._open(zmq.DEALER, self._replay_endpoint, 0)
        try:
            socket.send_multipart([b"", start.to_bytes(SEQ_BYTES, "big")])
            return list(self._replies(socket))
        finally:
            socket.close()

    def _replies(self, socket: zmq.SyncSocket) -> Iterator[Message]:
        while self._wait(socket, self._replay_timeout_s):
            frames = socket.recv_multipart()[1:]  # the first separates the way back
            if not frames or not frames[-1]:
                return
            yield _message(frames, replayed=True)

    def check(self) -> None:
        """Raise `BookkeepingError` where the sequence numbers contradict each other."""
        self._tracker.check()

    def close(self) -> None:
        """End the iteration and free the sockets. Does nothing the second time."""
        self._closing.set()
        self._bell.ring()
        with self._lock:
            self._sub.close()
            self._context.term()
            self._bell.close()

    def __enter__(self) -> KVEventSubscriber:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _message(frames: list[bytes], *, replayed: bool) -> Message:
    """A message of three frames, the payload decoded."""
    if len(frames) != 3 or len(frames[1]) != SEQ_BYTES:
        sizes = ", ".join(str(len(frame)) for frame in frames)
        raise KVEventError(
            f"a message is topic, 8 bytes of sequence number, payload; got frames of {sizes} bytes"
        )
    seq = int.from_bytes(frames[1], "big")
    try:
        return ReceivedBatch(seq, decode_batch(frames[2]), replayed)
    except KVEventError as error:
        return Malformed(seq, str(error))
