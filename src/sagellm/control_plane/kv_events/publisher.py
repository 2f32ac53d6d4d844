"""Publishes the prefix index's changes over ZeroMQ, one batch per engine step.

The engine's thread collects and numbers; the publisher's own thread encodes, sends and answers replays."""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import NamedTuple, Self

import zmq

from sagellm.control_plane.kv_events._doorbell import Doorbell
from sagellm.control_plane.kv_events.codec import (
    EventForm,
    HashForm,
    KVEvent,
    KVEventBatch,
    WireForm,
    encode_batch,
    to_wire,
)
from sagellm.control_plane.kv_events.sequence import END_OF_REPLAY, SEQ_BYTES, ReplayBuffer
from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.config import EventsConfig
from sagellm.core.errors import BookkeepingError, ConfigError, SageError
from sagellm.core.events import BlocksRemoved, BlocksStored, EventBus, IndexCleared, StepDone

log = logging.getLogger("sagellm.kv_events")

LINGER_S = 1.0
_BATCHES_PER_TURN = 256


class WallClock:
    """Seconds since the epoch, which is what readers of the wire expect of `ts`."""

    def now(self) -> float:
        return time.time()


class _Collected(NamedTuple):
    """A numbered batch on its way to the publisher's thread."""

    seq: int
    ts: float
    events: list[KVEvent]


class KVEventPublisher:
    """Collects events from construction to `close`; each `StepDone` sends a batch.

    Messages are `[topic, sequence number as 8 bytes big-endian, payload]` on a PUB socket at `endpoint`. A
    request of 8 bytes to the ROUTER socket at `replay_endpoint` is answered with the kept batches from that
    number on, in the same three parts, and an end marker: number -1, empty payload.

    The engine never waits: a batch that finds `max_queue_size` batches in the queue is dropped. It keeps its
    number, so that readers see a gap, and counts in `num_dropped`. Endpoints are bound, or with `connect` the
    first one is connected, for readers that listen to many publishers. Raises `ConfigError` naming the
    endpoint where that fails. `clock` gives `ts`; by default the wall clock. All methods are safe from any
    thread. `endpoint` and `replay_endpoint` name the ports that were bound.
    """

    def __init__(
        self,
        bus: EventBus,
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        *,
        block_size: int,
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        max_queue_size: int = 10_000,
        hash_form: HashForm = "bytes",
        event_form: EventForm = "map",
        data_parallel_rank: int = 0,
        connect: bool = False,
        clock: Clock | None = None,
    ) -> None:
        _at_least("buffer_steps", buffer_steps, 0)
        _at_least("hwm", hwm, 1)
        _at_least("max_queue_size", max_queue_size, 1)
        self._form = WireForm(block_size, hash_form, event_form)
        self._rank = data_parallel_rank
        self._topic = topic.encode()
        self._clock = clock or WallClock()
        self._timer: Clock = MonotonicClock()
        self._context = zmq.Context()
        try:
            self._pub = self._open(zmq.PUB, endpoint, hwm, connect=connect)
            # A peer acknowledges what it read late: one whole replay and its marker must fit twice.
            replay_hwm = 2 * (buffer_steps + 1)
            self._router = self._open(zmq.ROUTER, replay_endpoint, replay_hwm) if replay_endpoint else None
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT) if self._router else None
        self._bell = Doorbell()
        self._lock = threading.Lock()
        self._pending: list[KVEvent] = []
        self._outbox: queue.Queue[_Collected] = queue.Queue(max_queue_size)
        self._next_seq = 0
        self._num_overflowed = 0
        self._num_unsendable = 0
        self._num_published = 0
        self._closed = False
        self._give_up_s = float("inf")
        self._buffer = ReplayBuffer(buffer_steps)
        self._unsubscribe = [
            bus.subscribe(BlocksStored, self._collect),
            bus.subscribe(BlocksRemoved, self._collect),
            bus.subscribe(IndexCleared, self._collect),
            bus.subscribe(StepDone, lambda _: self.flush()),
        ]
        self._thread = threading.Thread(target=self._run, name="sagellm-kv-events", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, bus: EventBus, events: EventsConfig, block_size: int, *, rank: int = 0) -> Self:
        """The publisher of a configuration whose `endpoint` is set. `rank`: of several that one router reads.

        Raises `ConfigError` for an endpoint that cannot be bound."""
        assert events.endpoint is not None
        return cls(
            bus,
            events.endpoint,
            events.replay_endpoint,
            events.topic,
            block_size=block_size,
            buffer_steps=events.buffer_steps,
            hash_form=events.hash_form,
            data_parallel_rank=rank,
        )

    def _open(self, kind: int, endpoint: str, hwm: int, *, connect: bool = False) -> zmq.SyncSocket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, hwm)
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            (socket.connect if connect else socket.bind)(endpoint)
        except zmq.ZMQError as error:
            verb = "connect to" if connect else "bind"
            raise ConfigError(
                f"KV events cannot {verb} {endpoint!r}: {error.strerror}. An endpoint is 'tcp://host:port' "
                f"with a free port ('tcp://*:0' takes any) or 'ipc://path'"
            ) from error
        return socket

    @property
    def next_seq(self) -> int:
        """The number that the next batch gets: how many there were."""
        return self._next_seq

    @property
    def num_published(self) -> int:
        """Batches that were sent."""
        return self._num_published

    @property
    def num_dropped(self) -> int:
        """Numbered batches that were not sent: the queue was full, or encoding failed."""
        return self._num_overflowed + self._num_unsendable

    # ------------------------------------------------------------------------------ on the engine's thread

    def _collect(self, event: KVEvent) -> None:
        with self._lock:
            if not self._closed:
                self._pending.append(event)

    def flush(self) -> None:
        """Send the collected events as one batch. Without events, sends nothing and uses no number."""
        with self._lock:
            self._number_pending()
        self._bell.ring()

    def _number_pending(self) -> None:
        if not self._pending:
            return
        batch = _Collected(self._next_seq, self._clock.now(), self._pending)
        self._pending = []
        self._next_seq += 1
        try:
            self._outbox.put_nowait(batch)
        except queue.Full:
            self._num_overflowed += 1
            if self._num_overflowed == 1:
                log.warning(
                    "KV events: %d batches wait to be sent, batch %d is dropped; readers see a gap. "
                    "Said once, num_dropped goes on counting",
                    self._outbox.maxsize,
                    batch.seq,
                )

    def close(self) -> None:
        """Send what was collected, for at most `LINGER_S` seconds, and end. Does nothing the second time."""
        with self._lock:
            first = not self._closed
            if first:
                self._number_pending()
                self._give_up_s = self._timer.now() + LINGER_S
                self._closed = True  # last: the other thread reads it without the lock
        if first:
            for unsubscribe in self._unsubscribe:
                unsubscribe()
        self._bell.ring()
        self._thread.join()
        if first:
            self._context.term()
            self._bell.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def check(self) -> None:
        """Raise `BookkeepingError` unless each number belongs to a batch sent, dropped or waiting.

        Exact after `close`; before, a batch may be between two counters.
        """
        with self._lock:
            given, told = self._next_seq, self._num_published + self.num_dropped
            closed = self._closed and not self._thread.is_alive()
        if told > given or (closed and told != given):
            raise BookkeepingError(f"{given} batches have a number, {told} were sent or dropped")
        if closed:
            self._buffer.check()

    # --------------------------------------------------------------------------- on the publisher's thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell.fileno(), zmq.POLLIN)
        if self._router:
            poller.register(self._router, zmq.POLLIN)
        try:
            while self._turn(poller):
                pass
        finally:
            self._end()

    def _end(self) -> None:
        """Drop the queue. Messages already sent may leave until the time is up."""
        left = self._outbox.qsize()
        if left:
            self._num_unsendable += left
            log.warning("KV events: closed before %d batches could be sent", left)
        linger_s = min(LINGER_S, max(0.0, self._give_up_s - self._timer.now()))
        for socket in filter(None, (self._pub, self._router)):
            socket.close(round(linger_s * 1000))

    def _turn(self, poller: zmq.Poller) -> bool:
        """Wait for work and do some of it; False at the end."""
        ready = dict(poller.poll(None if self._outbox.empty() else 0))
        if self._bell.fileno() in ready:
            self._bell.hush()
        if self._router in ready:
            self._answer_replay()
        closing = self._closed  # read first: whatever was numbered before it is in the queue now
        for _ in range(_BATCHES_PER_TURN):
            try:
                self._publish(self._outbox.get_nowait())
            except queue.Empty:
                return not closing
        return self._timer.now() < self._give_up_s

    def _publish(self, batch: _Collected) -> None:
        try:
            events = [to_wire(event, self._form) for event in batch.events]
            payload = encode_batch(KVEventBatch(batch.ts, events, self._rank), self._form.event_form)
        except (SageError, ValueError) as error:
            self._num_unsendable += 1
            log.error("KV events: batch %d is dropped: %s", batch.seq, error)
            return
        self._pub.send_multipart([self._topic, batch.seq.to_bytes(SEQ_BYTES, "big"), payload])
        self._buffer.append(batch.seq, payload)
        self._num_published += 1

    def _answer_replay(self) -> None:
        """Send every kept batch from the requested number on.

        The frames before the number are the address of the reader."""
        assert self._router
        *way_back, request = self._router.recv_multipart()
        if len(request) != SEQ_BYTES:
            log.warning("KV events: a replay request has %d bytes, it must be 8: ignored", len(request))
            return
        for seq, payload in self._buffer.since(int.from_bytes(request, "big")):
            self._router.send_multipart([*way_back, self._topic, seq.to_bytes(SEQ_BYTES, "big"), payload])
        self._router.send_multipart([*way_back, b"", END_OF_REPLAY, b""])


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigError(f"{name} must be at least {low}, got {value}")
