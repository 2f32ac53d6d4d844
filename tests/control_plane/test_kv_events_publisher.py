"""The publisher over real sockets: plain readers, our own, dying ones, a full queue, and the end."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from sagellm.control_plane.kv_events import (
    Gap,
    KVEventPublisher,
    KVEventSubscriber,
    ReceivedBatch,
    Restart,
    decode_batch,
    from_wire,
)
from sagellm.control_plane.kv_events.publisher import LINGER_S, WallClock, _Collected
from sagellm.control_plane.kv_events.sequence import END_OF_REPLAY, Item
from sagellm.core.clock import ManualClock
from sagellm.core.errors import BookkeepingError, ConfigError
from sagellm.core.events import BlocksRemoved, BlocksStored, EventBus, IndexCleared, RequestQueued, StepDone
from sagellm.core.types import Namespace, Tokens

ANY_PORT = "tcp://127.0.0.1:*"
PATIENCE_MS = 20_000
STEP = StepDone(0, 0, 1, 1, 0, 0.001)


def stored(number: int) -> BlocksStored:
    """One block of four tokens; the first says which event it is."""
    tokens = Tokens([number, 1, 2, 3]).tobytes()
    return BlocksStored((0,), 0, (number.to_bytes(8, "big"),), None, tokens, Namespace())


def number_of(event: Any) -> int:
    return int(event.token_ids[0])


def publish(bus: EventBus, *numbers: int) -> None:
    """One step for each number."""
    for number in numbers:
        bus.emit(stored(number))
        bus.emit(STEP)


class Watched(KVEventPublisher):
    """Tells when batches were sent: a replay that is asked for earlier does not hold them."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self._sent = threading.Condition()  # first: the thread starts in there
        super().__init__(*given, **named)

    def _publish(self, batch: _Collected) -> None:
        super()._publish(batch)
        with self._sent:
            self._sent.notify_all()

    def wait_until_sent(self, num_batches: int) -> None:
        with self._sent:
            sent = self._sent.wait_for(lambda: self.num_published >= num_batches, PATIENCE_MS / 1000)
        assert sent, f"{self.num_published} of {num_batches} batches were sent"


def make(bus: EventBus, **options: Any) -> Watched:
    return Watched(bus, ANY_PORT, ANY_PORT, **{"block_size": 4} | options)


@pytest.fixture
def bus() -> EventBus:
    return EventBus()


class Peer:
    """Plain sockets of another process; they live until `close`."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._sockets: list[zmq.SyncSocket] = []

    def socket(self, kind: int) -> zmq.SyncSocket:
        self._sockets.append(self._context.socket(kind))
        return self._sockets[-1]

    def close(self, linger_ms: int = 0) -> None:
        self._context.destroy(linger_ms)


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.close()


def reader(peer: Peer, publisher: KVEventPublisher, topic: str = "") -> zmq.SyncSocket:
    """A plain SUB socket."""
    plain = peer.socket(zmq.SUB)
    plain.setsockopt_string(zmq.SUBSCRIBE, topic)
    plain.connect(publisher.endpoint)
    return plain


def join(bus: EventBus, publisher: KVEventPublisher, plain: zmq.SyncSocket) -> int:
    """Publish until the reader hears it, then read to the end; returns the number of the last batch."""
    while not plain.poll(10):
        publish(bus, 0)
    last = publisher.next_seq - 1
    while int.from_bytes(receive(plain)[1], "big") != last:
        pass
    return last


def asker(peer: Peer, publisher: KVEventPublisher) -> zmq.SyncSocket:
    assert publisher.replay_endpoint
    dealer = peer.socket(zmq.DEALER)
    dealer.connect(publisher.replay_endpoint)
    return dealer


def receive(plain: zmq.SyncSocket) -> list[bytes]:
    assert plain.poll(PATIENCE_MS)
    return plain.recv_multipart()


def read_until(subscriber: KVEventSubscriber, seq: int) -> list[Item]:
    items: list[Item] = []
    while not items or not isinstance(items[-1], ReceivedBatch) or items[-1].seq != seq:
        item = subscriber.poll(PATIENCE_MS / 1000)
        assert item is not None, f"batch {seq} never came; got {items}"
        items.append(item)
    subscriber.check()
    return items


def seqs(items: list[Item]) -> list[int]:
    return [item.seq for item in items if isinstance(item, ReceivedBatch)]


class Stalled(Watched):
    """Sends nothing before `gate` opens."""

    gate: threading.Event
    reached: threading.Event

    def _publish(self, batch: _Collected) -> None:
        self.reached.set()
        self.gate.wait()
        super()._publish(batch)


def stalled(bus: EventBus, **options: Any) -> Stalled:
    Stalled.gate, Stalled.reached = threading.Event(), threading.Event()
    return Stalled(bus, ANY_PORT, ANY_PORT, **{"block_size": 4} | options)


# --------------------------------------------------------------------------------------------- the sockets


def test_a_plain_reader_gets_topic_number_and_payload(bus: EventBus, peer: Peer) -> None:
    with make(bus, topic="kv@pod@model", clock=ManualClock(7.5)) as publisher:
        plain = reader(peer, publisher, "kv@")
        last = join(bus, publisher, plain)
        bus.emit(RequestQueued("ignored", 1, 0.0))
        bus.emit(stored(1))
        bus.emit(BlocksRemoved((0,), "capacity", (b"x",), Namespace()))
        bus.emit(IndexCleared())
        bus.emit(STEP)
        bus.emit(STEP)  # nothing happened: no batch, and no number used
        publish(bus, 2)
        topic, seq, payload = receive(plain)
        assert (topic, seq) == (b"kv@pod@model", (last + 1).to_bytes(8, "big"))
        batch = decode_batch(payload)
        assert (batch.ts, batch.data_parallel_rank) == (7.5, 0)
        removed = BlocksRemoved((), "capacity", (b"x",), Namespace())
        assert [from_wire(event) for event in batch.events][1:] == [removed, IndexCleared()]
        assert receive(plain)[1] == (last + 2).to_bytes(8, "big")
        publisher.check()
    publisher.check()
    assert publisher.num_published == publisher.next_seq == last + 3


@pytest.mark.parametrize("way_back", [[b""], []], ids=["REQ envelope", "bare"])
def test_the_frames_of_a_replay(bus: EventBus, peer: Peer, way_back: list[bytes]) -> None:
    with make(bus, topic="t") as publisher:
        publish(bus, 10, 11, 12)
        publisher.wait_until_sent(3)
        dealer = asker(peer, publisher)
        dealer.send_multipart([*way_back, b"short"])  # no answer to this one
        dealer.send_multipart([*way_back, (1).to_bytes(8, "big")])
        for number in (1, 2):
            *envelope, topic, seq, payload = receive(dealer)
            assert (envelope, topic, int.from_bytes(seq, "big")) == (way_back, b"t", number)
            assert number_of(decode_batch(payload).events[0]) == 10 + number
        assert receive(dealer) == [*way_back, b"", END_OF_REPLAY, b""]
        assert END_OF_REPLAY == b"\xff" * 8


def test_readers_may_bind_and_publishers_connect(bus: EventBus, peer: Peer) -> None:
    plain = peer.socket(zmq.SUB)
    plain.setsockopt_string(zmq.SUBSCRIBE, "")
    plain.bind(ANY_PORT)
    where = plain.getsockopt_string(zmq.LAST_ENDPOINT)
    with KVEventPublisher(bus, where, topic="one", block_size=4, connect=True) as publisher:
        join(bus, publisher, plain)
        publish(bus, 5)
        assert receive(plain)[0] == b"one"
        assert publisher.replay_endpoint is None


def test_an_endpoint_in_use_is_named(bus: EventBus) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(
            ConfigError, match=f"cannot bind '{where}': Address already in use.*'tcp://\\*:0'"
        ):
            KVEventPublisher(bus, where, block_size=4)
        with pytest.raises(ConfigError, match=where):
            KVEventPublisher(bus, ANY_PORT, where, block_size=4)
    assert not bus.wants(BlocksStored)
    with pytest.raises(ConfigError, match="cannot connect to 'nowhere'"):
        KVEventPublisher(bus, "nowhere", block_size=4, connect=True)
    with pytest.raises(ConfigError, match="max_queue_size must be at least 1, got 0"):
        make(bus, max_queue_size=0)


# ------------------------------------------------------------------------------------------ late and lossy


def test_a_late_subscriber_catches_up_and_goes_on(bus: EventBus) -> None:
    with make(bus) as publisher:
        publish(bus, 0, 1, 2)
        publisher.wait_until_sent(3)
        with KVEventSubscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber:
            items = read_until(subscriber, 2)
            assert seqs(items) == [0, 1, 2]
            assert all(isinstance(item, ReceivedBatch) and item.replayed for item in items)
            publish(bus, 3)
            while (item := subscriber.poll(0.02)) is None:  # the subscription may still be on its way
                publish(bus, 4)
            assert isinstance(item, ReceivedBatch)
            assert item.seq == 3
            last = publisher.next_seq - 1
            assert seqs([item, *read_until(subscriber, last)] if last > 3 else [item]) == list(
                range(3, last + 1)
            )
            assert subscriber.next_seq == last + 1


def test_what_is_no_longer_kept_is_a_gap(bus: EventBus) -> None:
    with make(bus, buffer_steps=2) as publisher:
        publish(bus, *range(5))
        publisher.wait_until_sent(5)
        with KVEventSubscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber:
            assert subscriber.poll() == Gap(0, 2)
            assert seqs(read_until(subscriber, 4)) == [3, 4]


def test_a_full_queue_drops_and_says_so(bus: EventBus, caplog: pytest.LogCaptureFixture) -> None:
    publisher = stalled(bus, max_queue_size=2)
    with caplog.at_level(logging.WARNING, "sagellm.kv_events"):
        publish(bus, 0)
        publisher.reached.wait()
        publish(bus, 1, 2, 3, 4)
    assert publisher.num_dropped == 2
    assert len(caplog.records) == 1
    assert "2 batches wait to be sent, batch 3 is dropped; readers see a gap" in caplog.text
    publisher.gate.set()
    publisher.wait_until_sent(3)
    publish(bus, 5)
    with publisher, KVEventSubscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber:
        publisher.wait_until_sent(4)
        items = read_until(subscriber, 5)
    assert seqs(items) == [0, 1, 2, 5]
    assert items[3] == Gap(3, 4)
    publisher.check()
    assert (publisher.next_seq, publisher.num_published) == (6, 4)


def test_a_batch_that_does_not_fit_the_wire_is_dropped_alone(
    bus: EventBus, caplog: pytest.LogCaptureFixture
) -> None:
    with make(bus) as publisher:
        bus.emit(BlocksStored((0,), 0, (b"x",), None, b"", Namespace()))
        bus.emit(STEP)
        publish(bus, 1)
        with KVEventSubscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber:
            publisher.wait_until_sent(1)
            assert read_until(subscriber, 1)[0] == Gap(0, 0)
    assert publisher.num_dropped == 1
    assert "batch 0 is dropped: 1 blocks of 4 tokens are 16 bytes" in caplog.text


def test_readers_that_die_do_no_harm(bus: EventBus) -> None:
    with make(bus) as publisher:
        publish(bus, *range(50))
        for _ in range(3):
            passing = Peer()
            reader(passing, publisher)
            asker(passing, publisher).send_multipart([b"", bytes(8)])
            passing.close(linger_ms=50)
            publish(bus, 50)
        last = publisher.next_seq - 1
        with KVEventSubscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber:
            publisher.wait_until_sent(last + 1)
            assert seqs(read_until(subscriber, last)) == list(range(last + 1))


def test_a_publisher_that_starts_again_is_noticed(bus: EventBus) -> None:
    clock = ManualClock(1.0)
    publisher = make(bus, clock=clock)
    endpoint, replay = publisher.endpoint, publisher.replay_endpoint
    publish(bus, 0, 1)
    publisher.wait_until_sent(2)
    with KVEventSubscriber(endpoint, replay) as subscriber:
        read_until(subscriber, 1)
        publisher.close()
        clock.advance(1.0)
        with KVEventPublisher(bus, endpoint, replay, block_size=4, clock=clock):
            publish(bus, 5, 6, 7)  # nobody listens yet: the number of the next is higher than expected
            while (item := subscriber.poll(0.02)) is None:
                publish(bus, 8)
            assert item == Restart(2)
            again = subscriber.poll(PATIENCE_MS / 1000)
            assert isinstance(again, ReceivedBatch)
            assert (again.seq, again.ts, number_of(again.batch.events[0])) == (0, 2.0, 5)


# -------------------------------------------------------------------------------------- threads and the end


def test_events_of_many_threads_keep_their_order(bus: EventBus) -> None:
    def work(thread: int) -> None:
        for number in range(100):
            publish(bus, thread * 1000 + number)

    with make(bus) as publisher:
        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        last = publisher.next_seq - 1
        publisher.wait_until_sent(last + 1)
        with KVEventSubscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber:
            items = read_until(subscriber, last)
    assert seqs(items) == list(range(last + 1))
    numbers = [number_of(e) for item in items if isinstance(item, ReceivedBatch) for e in item.batch.events]
    for index in range(4):
        assert [n for n in numbers if n // 1000 == index] == [index * 1000 + k for k in range(100)]
    assert len(numbers) == 400


def test_close_while_busy_accounts_for_every_batch(bus: EventBus) -> None:
    publisher = make(bus)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            publish(bus, 1)

    workers = [threading.Thread(target=work) for _ in range(2)]
    closers = [threading.Thread(target=publisher.close) for _ in range(2)]
    for thread in workers:
        thread.start()
    while publisher.num_published < 20:
        publisher.check()
    for thread in closers:
        thread.start()
    for thread in closers:
        thread.join()
    stop.set()
    for thread in workers:
        thread.join()
    publisher.close()
    publisher.check()
    assert publisher.next_seq == publisher.num_published + publisher.num_dropped >= 20
    assert not any(bus.wants(kind) for kind in (BlocksStored, BlocksRemoved, IndexCleared, StepDone))


def test_close_sends_what_was_collected(bus: EventBus, peer: Peer) -> None:
    publisher = make(bus)
    plain = reader(peer, publisher)
    join(bus, publisher, plain)
    bus.emit(stored(9))
    publisher.close()
    assert number_of(decode_batch(receive(plain)[2]).events[0]) == 9
    given = publisher.next_seq
    publisher.flush()
    publisher._collect(stored(1))  # a listener that was being called when the publisher closed
    publisher.flush()
    assert publisher.next_seq == given


def test_close_gives_up_when_its_time_is_over(bus: EventBus, caplog: pytest.LogCaptureFixture) -> None:
    publisher = stalled(bus)
    publisher._timer = timer = ManualClock()
    publish(bus, *range(600))
    publisher.reached.wait()
    closing = threading.Thread(target=publisher.close)
    closing.start()
    while not publisher._closed:
        threading.Event().wait(0.001)
    timer.advance(LINGER_S)
    publisher.gate.set()
    closing.join()
    assert publisher.num_dropped > 0
    assert f"closed before {publisher.num_dropped} batches could be sent" in caplog.text
    publisher.check()


def test_the_books_of_a_closed_publisher_must_balance(bus: EventBus) -> None:
    with make(bus) as publisher:
        publish(bus, 1)
    publisher._num_published += 1
    with pytest.raises(BookkeepingError, match="1 batches have a number, 2 were sent or dropped"):
        publisher.check()


def test_ts_is_the_time_of_day() -> None:
    assert WallClock().now() > 1_700_000_000
